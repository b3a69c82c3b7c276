-- Compare and append: the only way in which a request's stream is ever written, or gets a time to live.
--
-- KEYS[1]  P:req:{ID}:out     the request's stream
-- KEYS[2]  P:req:{ID}:cancel  its cancel flag
-- ARGV[1]  newest id that the writer has seen, '' for no stream
-- ARGV[2]  id of the new entry
-- ARGV[3]  its one field, 'd' or 'json'
-- ARGV[4]  its payload
-- ARGV[5]  time to live of the stream from now on, in ms; '0' leaves it as it is
-- ARGV[6]  '1' deletes the flag
--
-- Returns {1, whether the flag is set} if the entry is in, {0, newest id} if the writer was not up to date.
local newest = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
local id = newest[1] and newest[1][1] or ''
if id ~= ARGV[1] then
  return {0, id}
end
redis.call('XADD', KEYS[1], ARGV[2], ARGV[3], ARGV[4])
if ARGV[5] ~= '0' then
  redis.call('PEXPIRE', KEYS[1], ARGV[5])
end
if ARGV[6] == '1' then
  redis.call('DEL', KEYS[2])
end
return {1, redis.call('EXISTS', KEYS[2])}
