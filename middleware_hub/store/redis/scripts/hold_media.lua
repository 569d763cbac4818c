-- Holds a file of media, and takes names of it back: [names] [hold, name...].
redis.call('SADD', KEYS[1], ARGV[1])
for at = 2, #ARGV do redis.call('SREM', KEYS[1], ARGV[at]) end
