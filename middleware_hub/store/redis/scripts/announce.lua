-- Says what holds for some milliseconds from now: [key] | name, data, milliseconds. Returns the time.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
if tonumber(ARGV[3]) > 0 then
    redis.call('HSET', KEYS[1], ARGV[1], string.format('%015.0f', now + tonumber(ARGV[3])) .. ARGV[2])
else
    redis.call('HDEL', KEYS[1], ARGV[1])
end
return now
