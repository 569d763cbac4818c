-- Returns the number of the first event that follows, and the events of a log behind a number: [key] | after, limit.
local head = redis.call('LINDEX', KEYS[1], 0)
if not head then return {0, {}} end
local base = tonumber(head:match('^(%d+)'))
local from = math.max(tonumber(ARGV[1]) - base, 0)
return {base + from + 1, redis.call('LRANGE', KEYS[1], from + 1, from + tonumber(ARGV[2]))}
