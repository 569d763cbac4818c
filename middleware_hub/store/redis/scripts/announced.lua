-- Returns the time, and what was announced and holds now; forgets what does no longer: [key].
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local held, found = redis.call('HGETALL', KEYS[1]), {now}
for at = 1, #held, 2 do
    if tonumber(held[at + 1]:sub(1, 15)) > now then
        found[#found + 1] = held[at]
        found[#found + 1] = held[at + 1]:sub(16)
    else
        redis.call('HDEL', KEYS[1], held[at])
    end
end
return found
