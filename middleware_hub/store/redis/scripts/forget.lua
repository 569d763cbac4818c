-- Forgets a conversation that has not grown since it was read: [root, blobs, order of forgetting, counters] | number of its
-- records, its generation, its id. In a cluster there are only the first two keys, and the caller changes the others.
-- Returns the size that is given back, or -1.
local held = redis.call('HMGET', KEYS[1], 'n', 'g', 's')
if held[1] ~= ARGV[1] or held[2] ~= ARGV[2] then return -1 end
redis.call('UNLINK', KEYS[1], KEYS[2])
if KEYS[3] then
    redis.call('ZREM', KEYS[3], ARGV[3])
    redis.call('HINCRBY', KEYS[4], 'records', -tonumber(held[1]))
    redis.call('HINCRBY', KEYS[4], 'bytes', -tonumber(held[3]))
end
return tonumber(held[3])
