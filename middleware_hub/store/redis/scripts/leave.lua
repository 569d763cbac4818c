-- Removes references from places: [main, more] of each | field and reference of each. An empty field: `main` is a string.
local call = redis.call
local function without(have, reference)
    local at = have and have:find(reference, 1, true)
    return at and have:sub(1, at - 1) .. have:sub(at + #reference)
end
local function leave(at, reference)
    local left = without(call('GET', at), reference)
    if left == '' then call('DEL', at) elseif left then call('SET', at, left) end
end
for at = 1, #KEYS / 2 do
    local main, more, field, reference = KEYS[2 * at - 1], KEYS[2 * at], ARGV[2 * at - 1], ARGV[2 * at]
    if field == '' then
        leave(main, reference)
    else
        local left = without(call('HGET', main, field), reference)
        if left == '' then call('HDEL', main, field) elseif left then call('HSET', main, field, left) end
        if not left and #field > 1 then leave(more, reference) end
    end
end
return 0
