-- Appends batches. Each of them is taken whole, or refused: everything is checked before anything of it is written.
--
-- KEYS and ARGV are read from front to back, see `writing/appending.py`. `together` is 1 where all keys are in one place: then the
-- counters and the order of forgetting are written here. In a cluster a call has the keys of one slot, and its caller
-- writes those with what is returned here.
local keys, args = 0, 0
local function key() keys = keys + 1; return KEYS[keys] end
local function arg() args = args + 1; return ARGV[args] end
local function number() return tonumber(arg()) end
local call = redis.call

local together, again, crowd = arg() == '1', arg() == '1', number()
local counters = together and key()
local records, bytes = 0, 0

-- A mark is: tick (8 bytes, big-endian) | retrieved (0 or 1) | stamp. Ticks are compared as bytes: a double is too small.
local function merged(old, new)
    if not old then return new end
    local late = new:sub(1, 8) > old:sub(1, 8) and new or old
    local retrieved = (old:byte(9) == 49 or new:byte(9) == 49) and '1' or '0'
    return late:sub(1, 8) .. retrieved .. late:sub(10)
end

-- Microseconds; those of retrieved conversations are negative, so that these come first.
local function score(mark)
    local tick = 0
    for at = 1, 8 do tick = tick * 256 + mark:byte(at) end
    tick = math.floor(tick / 1000)
    if mark:byte(9) == 49 then tick = tick - 4503599627370496 end
    return string.format('%.0f', tick)
end

local function read_root()
    local root = {key = key(), order = together and key(), id = arg(), generation = arg(), mark = arg(), new = {}}
    for at = 1, number() do
        local record = {id = arg(), sampled = arg() == '1', cost = number(), body = arg(), links = {}}
        for link = 1, number() do record.links[link] = arg() end
        root[at] = record
    end
    root.beside = {}
    local blobs = number()
    if blobs > 0 then root.blobs = key() end
    for at = 1, blobs do root.beside[at] = {id = arg(), name = arg(), body = arg()} end
    return root
end

local function read_batch()
    local batch = {roots = {}, places = {}, events = {}}
    for at = 1, number() do batch.roots[at] = read_root() end
    for at = 1, number() do
        batch.places[at] = {main = key(), more = key(), root = number(), field = arg(), reference = arg(), most = number()}
    end
    for at = 1, number() do
        batch.events[at] = {
            log = key(), index = together and key(), dead = together and key(),
            name = arg(), closes = number(), expected = number(), body = arg()}
    end
    return batch
end

-- Records -----------------------------------------------------------------------------------------------------------------

local function check_root(root)
    local there = call('EXISTS', root.key) == 1
    local function known(id) return root.new[id] or (there and call('HEXISTS', root.key, id) == 1) end
    local missing = {}
    for _, record in ipairs(root) do
        if known(record.id) then
            root.seen = root.seen or record.sampled
            if record.sampled and (root.new[record.id] or call('HGET', root.key, record.id)) ~= record.body then
                return {'conflict', record.id}
            end
            record.body = false
        else
            for _, link in ipairs(record.links) do
                if not known(link) then missing[#missing + 1] = link end
            end
            root.new[record.id] = record.body
        end
    end
    for _, blob in ipairs(root.beside) do
        if not known(blob.id) then missing[#missing + 1] = blob.id end
    end
    if #missing > 0 then return {'missing', unpack(missing)} end
end

local function write_root(root)
    local held = call('HMGET', root.key, 'g', 'm', 's', 'n')
    local count, size = 0, 0
    root.generation = held[1] or root.generation
    if root.mark ~= '' then root.mark = merged(held[2], root.mark) else root.mark = held[2] or '' end
    for _, record in ipairs(root) do
        if record.body then
            call('HSET', root.key, record.id, record.body)
            count, size = count + 1, size + record.cost
        end
    end
    for _, blob in ipairs(root.beside) do
        if call('HSETNX', root.blobs, blob.id .. blob.name, blob.body) == 1 then
            local names = call('HGET', root.blobs, blob.id)
            call('HSET', root.blobs, blob.id, names and names .. '\0' .. blob.name or blob.name)
            size = size + #blob.body + 100
        end
    end
    call('HSET', root.key, 'g', root.generation, 'm', root.mark,
        's', tonumber(held[3] or 0) + size, 'n', tonumber(held[4] or 0) + count)
    if together and root.mark ~= '' then call('ZADD', root.order, score(root.mark), root.id) end
    records, bytes = records + count, bytes + size
    return {root.generation, root.mark, count, size}
end

-- Places ------------------------------------------------------------------------------------------------------------------

local function in_front(have, reference, most)
    if have:find(reference, 1, true) then return nil end
    return (reference .. have):sub(1, most * #reference)
end

local function push(at, reference, most)
    local have = call('GET', at)
    local all = have and in_front(have, reference, most) or (not have and reference)
    if all then call('SET', at, all) end
end

-- Notes that `more` keys hold entries of this kind for texts that are so long.
local function note_length(main, field)
    local kind, offset = 'b' .. field:sub(1, 1), field:byte(2)
    local bits = call('HGET', main, kind) or string.rep('\0', 32)
    local at = math.floor(offset / 8) + 1
    local byte = bit.bor(bits:byte(at), bit.lshift(1, offset % 8))
    if byte ~= bits:byte(at) then
        call('HSET', main, kind, bits:sub(1, at - 1) .. string.char(byte) .. bits:sub(at + 1))
    end
end

local function enter(place, roots)
    local reference = place.reference
    if place.root > 0 then reference = roots[place.root].generation .. reference end
    if place.field == '' then return push(place.main, reference, place.most) end
    local have = call('HGET', place.main, place.field)
    if have then
        local all = in_front(have, reference, place.most)
        if all then call('HSET', place.main, place.field, all) end
    elseif #place.field == 1 or call('HLEN', place.main) < crowd then
        call('HSET', place.main, place.field, reference)
    else
        push(place.more, reference, place.most)
        note_length(place.main, place.field)
    end
end

-- Logs: a list, whose first element is 'number of the first event - 1':'how far it is closed' ------------------------------

local function end_of(log)
    local head = call('LINDEX', log, 0)
    if not head then return {last = 0, closed = 0} end
    local base, closed = head:match('^(%d+):(%d+)$')
    return {there = true, base = base, last = tonumber(base) + call('LLEN', log) - 1, closed = tonumber(closed)}
end

-- Returns the number of an event that was appended by an earlier try. Its body begins with 8 bytes that name the try.
local function appended(log, body)
    local last = call('LRANGE', log, -1000, -1)
    for at = #last, 1, -1 do
        if last[at] == body then return end_of(log).last - #last + at end
    end
end

-- `again`: the batch may have been appended before.
local function check_events(events, again)
    local ends = {}
    for at, event in ipairs(events) do
        event.number = again and appended(event.log, event.body)
        if event.number then
            event.body = false
        else
            local log = ends[event.log] or end_of(event.log)
            ends[event.log] = log
            if log.closed >= math.max(1, event.closes) then return {'closed', at} end
            if event.expected >= 0 and event.expected ~= log.last then
                return {event.expected < log.last and 'moved' or 'early', at, log.last}
            end
            log.last, log.closed = log.last + 1, math.max(log.closed, event.closes)
            event.number = log.last
        end
    end
end

local function write_event(event)
    if not event.body then return event.number end
    local log = end_of(event.log)
    if not log.there then
        call('RPUSH', event.log, '0:0')
        if together then call('ZADD', event.index, 0, event.name) end
        bytes = bytes + 100 + 2 * #event.name
    end
    call('RPUSH', event.log, event.body)
    bytes = bytes + #event.body + 8
    if event.closes > log.closed then
        call('LSET', event.log, 0, (log.base or '0') .. ':' .. event.closes)
        if together and event.closes >= 2 then call('ZADD', event.dead, 0, event.name) end
    end
    call('SPUBLISH', event.log, event.number)
    return event.number
end

local function take(batch)
    local refused, seen = nil, again
    for _, root in ipairs(batch.roots) do
        refused = refused or check_root(root)
        seen = seen or root.seen
    end
    refused = refused or check_events(batch.events, seen)
    if refused then return refused end
    local roots, numbers = {}, {}
    for at, root in ipairs(batch.roots) do roots[at] = write_root(root) end
    for _, place in ipairs(batch.places) do enter(place, batch.roots) end
    for at, event in ipairs(batch.events) do numbers[at] = write_event(event) end
    return {'ok', numbers, together and 0 or roots}
end

local answers = {}
for at = 1, number() do answers[at] = take(read_batch()) end

local marks = {}
for at = 1, number() do
    local root, order, id, mark = key(), together and key(), arg(), arg()
    if call('EXISTS', root) == 1 then
        mark = merged(call('HGET', root, 'm'), mark)
        call('HSET', root, 'm', mark)
        if together then call('ZADD', order, score(mark), id) end
    else
        mark = ''
    end
    marks[at] = together and 0 or mark
end

if together then
    if records > 0 then call('HINCRBY', counters, 'records', records) end
    if bytes > 0 then call('HINCRBY', counters, 'bytes', bytes) end
    return {answers}
end
return {answers, marks, bytes}
