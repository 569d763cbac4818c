"""The store: recorded spans that outlive a process, and that several processes share.

*The store finds, the tree decides.* Spans are immutable, so a store keeps each as one record (`records.SpanRecord`), with its
links as ids. For a text that the tree does not know, a look-up finds the records on the text's path; the tree takes them in as
if it had recorded them, and decides as always. Nothing is replayed at the start.

**Open one** (`opening`, `protocol.Store`):

    store = open_store("sqlite:/var/lib/tito", durability="process")
    await store.open(fingerprint)              # of the tokenizer; StoreMismatchError for another one
    ...
    await store.close()

**Record a reply.** The id of a context is a hash of its content, so 16 samples of a prompt keep it once. A reply gets a new id.
`text` continues the whole text of `base`: that is `line` for a context and for a reply without a context of its own, the
context for any other reply, or None at the start of a chain. `root` is that of the parent.

    context = identified(SpanRecord(id=b"", root=parent_root or b"", namespace=namespace, serial=serials.next(), stamp=version,
                                    start=cut.start, width=len(prompt) - cut.start, text=prompt[line_end:], ids=ids, parent=...,
                                    take=cut.take, line=line, base=line, flags=flags, ends=ends))
    reply = SpanRecord(id=new_id(), root=context.root, start=len(prompt), width=len(text), text=text, parent=context.id,
                       take=context.count, line=line, base=context.id, ...)
    path = asked.longer(prompt + text)         # `asked` is the path of the look-up: only the new blocks are hashed
    await store.append(Batch([context, reply], {reply.id: path}))       # returns when it is acknowledged

MissingRecordError means that the conversation was forgotten meanwhile: append what the store lacks (`missing`) as well, and try
again. A record that is there already, with the same content, is no error.

**Look a text up** that the tree knows up to character `n` (the end of the reply it continues; 0 for nothing). `known` has the
ids of the records in the tree. If the `PathState` of the reply's end is at hand, only the text after it is hashed:

    asked = TextPath(namespace, text, state)                            # reply_path.state(len(whole text of the reply))
    found = await store.find(Query(asked, known_from=n, known=ids_in_tree, parents=[name]))
    for record in found.records: ...                                    # those that others build on come first

If a tree still has everything that it appended and found on the path of a text (nothing was evicted), it says
`Query(..., complete=True)` and asks `store.spared(query)` first. That answers at once (a few us) if no other process can have
written anything on the path, or given one of the names, since the last look-up or append here. It always does so for a process
that is alone; one of several processes on a SQLite file knows where the others wrote (see `sqlite.others`). `store.others()` is
0 if no other process wrote at all. `find` looks names up even for a `complete` query.

A look-up brings everything on which its records build (`SpanRecord.links`), before them, unless it is known. Otherwise they
come in the order of `serial`, so that the newest of equal texts stays the newest. Hashes are only for finding: compare the
texts. A damaged record is left out with everything that builds on it, logged and counted (`Found.damaged`).

**Logs** are for sessions and the like: `Batch.events` are appended together with the records of a turn, or refused together
with them (ClosedLogError, LogMovedError). `read(log, after=number)` returns what follows.

**Who writes.** All batches that were appended while the event loop was busy become one group (see `gathering`). With the
durability `process`, the loop writes a group itself, in about 0.1 ms, if it need not wait for anything; a thread writes the
other groups (see `sqlite.writer`). With Redis, the batches that come while a group is on its way become the next one (see
`redis`).

**Marks** (`note`) say which conversation was hit or retrieved. They are written later, in groups; `forget` uses them to decide.
"""
