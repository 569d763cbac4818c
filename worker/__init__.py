"""The embedded engine: a worker without a model server, which behaves over HTTP as SGLang 0.5.23 does.

`tito-router demo-worker` runs it, the tests inspect it, and load is measured against it. The engine shares no code with the
router, so that it is an independent witness: nothing here imports `router` or `middleware_hub`. Where it differs
from a real SGLang, the real one is right.

From the bottom up: a `vocabulary`; a `source` of tokens (`noise`, or the `ngram` model with its `sampler`); a `sample`, which
is one reply while it is sampled (`generated_reply`, or a slice of a `pool`); the `engine`, which runs samples; `http`, which
serves the engine; the `worker`, which runs all of it in a thread.
"""
