-- Read new jobs of all three priorities, in the order of KEYS, each with the room that the ones before have left.
--
-- KEYS  1..n  jobs streams, the first to be read first
-- ARGV  1     consumer name of this worker
--       2     room: the most entries to hand out
--
-- Returns one item per stream read: {index in KEYS, entries}, or {index in KEYS, error text} where it cannot be read
-- (no group, not a stream). Creates no stream and no group. An error of one stream must not lose what another has
-- already delivered, hence pcall. One that is the server's (a replica, a missing right) is the whole reply.
local room = tonumber(ARGV[2])
local delivered = false
local out = {}
for i, key in ipairs(KEYS) do
  if room <= 0 then break end
  local reply = redis.pcall('XREADGROUP', 'GROUP', 'workers', ARGV[1], 'COUNT', room, 'STREAMS', key, '>')
  if type(reply) == 'table' and reply.err then
    local is_streams = string.find(reply.err, '^NOGROUP') or string.find(reply.err, '^WRONGTYPE')
    if not delivered and not is_streams then return reply end
    out[#out + 1] = {i, reply.err}
  elseif type(reply) == 'table' and reply[1] then
    local entries = reply[1][2]
    room = room - #entries
    delivered = true
    out[#out + 1] = {i, entries}
  end
end
return out
