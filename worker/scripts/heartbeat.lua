-- Write what this worker is and does; gone by itself when it stops writing. One script, so that the key is never
-- without TTL.
--
-- KEYS  1     the worker's hash
-- ARGV  1     TTL in ms
--       2..   field, value, …
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
