-- Lets a file of media go, and removes it if nobody names it: [file, names] [hold]. Returns its size, or -1 if it is named or
-- not there.
redis.call('SREM', KEYS[2], ARGV[1])
if redis.call('EXISTS', KEYS[2]) == 1 then return -1 end
local size = redis.call('HGET', KEYS[1], 's')
redis.call('UNLINK', KEYS[1])
return tonumber(size or -1)
