-- Forgets the events of a log in front of a number, some at a time: [key] | before, most, '1' if the log has to be a
-- deleted one. Returns how many, and their bytes.
local head = redis.call('LINDEX', KEYS[1], 0)
if not head then return {0, 0} end
local base, closed = head:match('^(%d+):(%d+)$')
if ARGV[3] == '1' and tonumber(closed) < 2 then return {0, 0} end
local last = redis.call('LLEN', KEYS[1]) - 1
local count = math.min(tonumber(ARGV[1]) - 1 - tonumber(base), tonumber(ARGV[2]), last)
if count <= 0 then return {0, 0} end
redis.call('LPOP', KEYS[1])
local bytes = 0
for _, body in ipairs(redis.call('LPOP', KEYS[1], count)) do bytes = bytes + #body + 8 end
redis.call('LPUSH', KEYS[1], string.format('%.0f', base + count) .. ':' .. closed)
return {count, bytes}
