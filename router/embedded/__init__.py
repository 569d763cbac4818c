"""The embedded engine: a worker without a model server, which behaves over HTTP as SGLang 0.5.23 does.

`tito-router demo-worker` runs it, the tests inspect it, and load is measured against it. It shares no code with the router, so
that it can be a witness against it: nothing here imports the rest of `router`, nor `middleware_hub`. Where it differs from a
real SGLang, the real one is right.

From the bottom up: a `vocabulary`; a `source` of tokens (`noise`, or a `model` with its `sampler`, or a `pool`); a `sample`,
which is one reply while it is sampled; the `engine`, which runs samples; the `app`, which serves the engine over HTTP; the
`worker`, which runs the app in a thread.
"""
