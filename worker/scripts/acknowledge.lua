-- Acknowledge and delete a job that is still this worker's; a dead one is copied to the dead-letter stream.
--
-- KEYS  1     jobs stream
--       2     dead-letter stream
-- ARGV  1     consumer name of this worker
--       2     entry id
--       3..   nothing, or for a dead job the fields to put behind its own: name, value, …
--
-- Returns 1, or 0 if the entry is not this worker's (any more). The copy comes first: it alone can fail, for want of
-- memory, and then nothing has happened yet and the whole is sent again. The owner check makes XACK's 1 certain.
local pending = redis.pcall('XPENDING', KEYS[1], 'workers', ARGV[2], ARGV[2], 1)
if pending.err and string.find(pending.err, '^ERR') then return pending end -- a right that is missing
if pending.err or #pending == 0 or pending[1][2] ~= ARGV[1] then return 0 end
if #ARGV > 2 then
  local entry = redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[2])
  if #entry == 1 then
    local fields = entry[1][2]
    local copy = {}
    -- Lua's unpack ends at 8,000 values; an entry of thousands of fields is garbage of which the beginning will do
    for i = 1, math.min(#fields, 4000) do copy[i] = fields[i] end
    for i = 3, #ARGV do copy[#copy + 1] = ARGV[i] end
    redis.call('XADD', KEYS[2], '*', unpack(copy))
  end
end
if redis.call('XACK', KEYS[1], 'workers', ARGV[2]) ~= 1 then return 0 end
redis.call('XDEL', KEYS[1], ARGV[2])
return 1
