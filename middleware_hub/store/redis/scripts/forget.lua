-- Forgets a conversation that has not grown since it was read: [root, blobs] | number of its records, its generation.
-- Returns the size that is given back, or -1.
local held = redis.call('HMGET', KEYS[1], 'n', 'g', 's')
if held[1] ~= ARGV[1] or held[2] ~= ARGV[2] then return -1 end
redis.call('UNLINK', KEYS[1], KEYS[2])
return tonumber(held[3])
