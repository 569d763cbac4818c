-- Forgets a log if it is a deleted one: [key, list of logs, list of deleted logs, counters] | name. In a cluster there is only
-- the key, and the caller changes the others. Returns the bytes that are freed.
local head = redis.call('LINDEX', KEYS[1], 0)
if not head or tonumber(head:match(':(%d+)$')) < 2 then return 0 end
local bytes = 100 + 2 * #ARGV[1]
for _, body in ipairs(redis.call('LRANGE', KEYS[1], 1, -1)) do bytes = bytes + #body + 8 end
redis.call('DEL', KEYS[1])
if KEYS[2] then
    redis.call('ZREM', KEYS[2], ARGV[1])
    redis.call('ZREM', KEYS[3], ARGV[1])
    redis.call('HINCRBY', KEYS[4], 'bytes', -bytes)
end
return bytes
