"""The embedded engine: a worker without a model server, which talks as SGLang 0.5.23 does, over real HTTP.

It is what `tito-router demo-worker` runs, what the tests look into, and what load is measured against. It shares no line
with the router, so that it can be a witness against it: nothing here imports the rest of `router`, nor `middleware_hub`.
Where it differs from a real SGLang, the real one is right.

From the bottom up: a `vocabulary`; a `source` of tokens (`noise`, or a `model` with its `sampler`, or a `pool`); a `sample`,
which is one reply in the making; the `engine`, which runs samples; the `app`, which puts it on the wire; the `worker`, which
serves that in a thread.
"""
