-- Compare and set the cancel flag: never for a request that has ended meanwhile. The flag lives as long as the stream
-- has left; without a stream, a given time.
--
-- KEYS[1]  P:req:{ID}:out     the request's stream
-- KEYS[2]  P:req:{ID}:cancel  its cancel flag
-- ARGV[1]  newest id that the caller has read, '' for no stream; the caller knows that this entry is not terminal.
--          '*' has the script read the newest entry itself: for a caller that is so far away that a request which
--          streams fast has always gone on by the time its command arrives
-- ARGV[2]  time to live of the flag in ms where there is no stream
--
-- Returns {1, time to live of the flag in ms} if it is set, {0, newest id} if the caller was not up to date, or,
-- with '*', if the newest entry is terminal or there is none.
local newest = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
local id = newest[1] and newest[1][1] or ''
if ARGV[1] == '*' then
  local field, payload = unpack(newest[1] and newest[1][2] or {})
  local decode = field == 'd' and cmsgpack.unpack or cjson.decode
  local ok, entry = pcall(decode, payload)
  if not ok or type(entry) ~= 'table' or (entry.e == 'finished' and entry.done == true) then
    return {0, id}
  end
elseif id ~= ARGV[1] then
  return {0, id}
end
local ttl = redis.call('PTTL', KEYS[1])
if ttl < 0 then
  ttl = tonumber(ARGV[2])
end
if ttl < 1 then
  ttl = 1
end
redis.call('SET', KEYS[2], '1', 'PX', ttl)
return {1, ttl}
