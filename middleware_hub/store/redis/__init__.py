"""A store in Redis or Valkey: for routers on several machines.

Everything that grew from one first prompt is in one hash, `r:{root}`: a field for each record, by its id. So one script on
one key checks what a batch builds on and writes it, and forgetting a conversation is one UNLINK. To find records by their text,
there is a hash for each block end, `p:{block}`, whose values are *references*: root, id and parent of the newest records that
are entered there. A look-up therefore takes two round trips: one for the references beyond the known part of a text, and one
for the unknown records of all conversations that it found.

    <prefix>meta            format, fingerprint of the tokenizer, number of shards, a name for this incarnation of the store
    <prefix>count           records, and their bytes; files of media, and their bytes
    <prefix>r:{root}        record id -> record;  g: generation, m: mark, s: bytes, n: number of records
    <prefix>b:{root}        record id + name -> blob;  record id -> names of its blobs
    <prefix>m:{key}         a file of media: a: about it, d: its bytes, s: their number, l:...: the tokens that it became
    <prefix>w:{key}         the roots whose records name that file (see `media`)
    <prefix>p:{block}       kind + offset + hash -> references, newest first;  b + kind: lengths that are in keys of their own
    <prefix>p:{block}...    the same references, once there are many texts in a block: a key for each text
    <prefix>n:...           name of a reply -> references
    <prefix>l:...           a log, as a list; its first element has the number of the second one, and how far the log is closed
    <prefix>o:N i:N d:N     shards: roots by the time of their last hit, the keys of all logs, those of deleted logs
    <prefix>announced       what routers announce of themselves, with the time at which that ends
    <prefix>returned        how far routers are with writing again what the store has lost (see `progress`)

A reference is: generation (4 bytes) | root | id | parent (16 bytes each), and in a name the length of the text (4 bytes). The
generation says to which life of a root it belongs, so that forgetting does not remove what was appended again meanwhile.
"""
