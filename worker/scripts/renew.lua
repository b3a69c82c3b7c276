-- Renew the leases of entries that are still this worker's; touch no others.
--
-- KEYS  1     jobs stream
-- ARGV  1     consumer name of this worker
--       2..   entry ids
--
-- Returns, per id, 1 (renewed) or 0 (another worker's, acknowledged, deleted, or no such group). JUSTID: a renewal is
-- no delivery. The owner is checked here because XCLAIM alone would take the entry back from whoever has it now.
local out = {}
for i = 2, #ARGV do
  local pending = redis.pcall('XPENDING', KEYS[1], 'workers', ARGV[i], ARGV[i], 1)
  if pending.err and string.find(pending.err, '^ERR') then return pending end -- a right that is missing
  local mine = not pending.err and #pending == 1 and pending[1][2] == ARGV[1]
  if mine then
    mine = #redis.call('XCLAIM', KEYS[1], 'workers', ARGV[1], 0, ARGV[i], 'JUSTID') == 1
  end
  out[#out + 1] = mine and 1 or 0
end
return out
