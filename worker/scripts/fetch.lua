-- Give the fields of an entry that is pending for this worker (a delivery whose reply was lost), and renew its lease.
--
-- KEYS  1     jobs stream
-- ARGV  1     consumer name of this worker
--       2     entry id
--
-- Returns {1, fields}; {1} if the entry is pending but was deleted from the stream; {0} if it is not this worker's.
local pending = redis.pcall('XPENDING', KEYS[1], 'workers', ARGV[2], ARGV[2], 1)
if pending.err and string.find(pending.err, '^ERR') then return pending end -- a right that is missing
if pending.err or #pending == 0 or pending[1][2] ~= ARGV[1] then return {0} end
local entry = redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[2])
if #entry == 0 then return {1} end
redis.call('XCLAIM', KEYS[1], 'workers', ARGV[1], 0, ARGV[2], 'JUSTID')
return {1, entry[1][2]}
