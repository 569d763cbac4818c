"""The store: what was recorded, beyond the life of a process and for several processes at once.

*The store finds, the tree decides.* Spans are immutable, so a store keeps each as one record (`records.SpanRecord`), with its
links as ids. A tree that does not know a text asks the store which records lie on its path, puts them in as if they had been
recorded there, and decides as always. Nothing is replayed at start.

**Open one** (`opening`, `protocol.Store`):

    store = open_store("sqlite:/var/lib/tito", durability="process")
    await store.open(fingerprint)              # of the tokenizer; StoreMismatchError for another one
    ...
    await store.close()

**Record a reply.** A context is named by its content: 16 samples of a prompt keep it once. A reply gets an id of its own.
`base` says behind whose whole text `text` stands: behind `line` for a context and for a reply without a context of its own,
behind the context for any other reply, or None at the start of a chain. `root` is that of the parent.

    context = identified(SpanRecord(id=b"", root=parent_root or b"", namespace=namespace, serial=serials.next(), stamp=version,
                                    start=cut.start, width=len(prompt) - cut.start, text=prompt[line_end:], ids=ids, parent=...,
                                    take=cut.take, line=line, base=line, flags=flags, ends=ends))
    reply = SpanRecord(id=new_id(), root=context.root, start=len(prompt), width=len(text), text=text, parent=context.id,
                       take=context.count, line=line, base=context.id, ...)
    path = asked.longer(prompt + text)         # `asked` is the path of the look-up: only the new blocks are hashed
    await store.append(Batch([context, reply], {reply.id: path}))       # returns when it is acknowledged

On MissingRecordError the conversation was forgotten meanwhile: append what it lacks, too (`missing`), and try again. What is
there already, with the same content, is no fault.

**Look a text up** that the tree knows up to character `n` (the end of the reply it continues; 0 for nothing). `known` tells
which records the tree has. Where `PathState` of a reply's end is kept beside it, only the text behind is hashed:

    asked = TextPath(namespace, text, state)                            # reply_path.state(len(whole text of the reply))
    found = await store.find(Query(asked, known_from=n, known=ids_in_tree, parents=[name]))
    for record in found.records: ...                                    # those that others build on come first

A tree that still has all that it appended and found on the path of a text (nothing of it was evicted) says
`Query(..., complete=True)`, and asks `store.spared(query)` first: that answers at once (a few us) where nobody else can have
written anything on the path, nor given one of the names, since this was looked up or appended here. In a process that is alone
it always does; one of several on a SQLite file hears where the others wrote (see `sqlite.others`). `store.others()` tells
whether anybody else wrote at all: 0 if nobody did. `find` looks names up even if it is `complete`.

The records of a look-up are closed: whatever one builds on (`SpanRecord.links`) stands before it or is known. Apart from that
they come by `serial`, so that the newest of equal texts is the newest again. Hashes only find: compare texts. What is damaged
is left out with all that builds on it, logged and counted (`Found.damaged`).

**Logs** are for sessions and the like: `Batch.events` are appended with the records of a turn in one step, or refused
(ClosedLogError, LogMovedError) together with them. `read(log, after=number)` reads on.

**Who writes.** What was appended while the event loop was busy is one group (see `gathering`). With the durability `process`,
the loop writes a group itself where nothing has to be waited for, about 0.1 ms; a thread writes the rest (see `sqlite.writer`).
With Redis, what is asked for while a group is on its way is the next one (see `redis`).

**Marks** (`note`) say which conversation was hit or retrieved. They are written in groups, later; `forget` goes by them.
"""
