-- Removes a file of media that nobody names: [file, names] | nothing. Returns its size, or -1 if it is named or not there.
if redis.call('EXISTS', KEYS[2]) == 1 then return -1 end
local size = redis.call('HGET', KEYS[1], 's')
redis.call('UNLINK', KEYS[1])
return tonumber(size or -1)
