-- Delete this worker's consumer from every group in which it has nothing pending.
--
-- KEYS  1..n  jobs streams
-- ARGV  1     consumer name of this worker
--
-- Returns how many streams still hold entries of it (there the consumer stays: deleting it would delete those too).
local kept = 0
for _, key in ipairs(KEYS) do
  local pending = redis.pcall('XPENDING', key, 'workers', '-', '+', 1, ARGV[1])
  if pending.err and string.find(pending.err, '^ERR') then return pending end -- a right that is missing
  if not pending.err then
    if #pending == 0 then
      redis.call('XGROUP', 'DELCONSUMER', key, 'workers', ARGV[1])
    else
      kept = kept + 1
    end
  end
end
return kept
