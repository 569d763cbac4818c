-- Returns the number of a log's last event, how far it is closed, and how many of its events were trimmed: [key].
local head = redis.call('LINDEX', KEYS[1], 0)
if not head then return {0, 0, 0} end
local base, closed = head:match('^(%d+):(%d+)$')
return {tonumber(base) + redis.call('LLEN', KEYS[1]) - 1, tonumber(closed), tonumber(base)}
