-- Give an entry that is still this worker's to nobody (consumer "-"), idle for longer than any lease, so that the next
-- worker that looks for idle entries takes it.
--
-- KEYS  1     jobs stream
-- ARGV  1     consumer name of this worker
--       2     entry id
--       3     idle time in ms
--
-- Returns 1, or 0 if the entry is not this worker's. JUSTID: handing back is no delivery.
local pending = redis.pcall('XPENDING', KEYS[1], 'workers', ARGV[2], ARGV[2], 1)
if pending.err and string.find(pending.err, '^ERR') then return pending end -- a right that is missing
if pending.err or #pending == 0 or pending[1][2] ~= ARGV[1] then return 0 end
redis.call('XCLAIM', KEYS[1], 'workers', '-', 0, ARGV[2], 'IDLE', ARGV[3], 'JUSTID')
return 1
