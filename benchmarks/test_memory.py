"""Bytes per cached token, and the collection of ten million tokens without a stall.

Aim: at most 12 bytes a token in turns of 1,000 tokens, plus 1 KB a turn, plus its text. It measures the resident memory of a
separate process.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

_PROGRAM = r"""
import gc, json, resource, sys, time
from middleware_hub.radix.tree import RadixTree
from middleware_hub.radix.records import Context, SampledReply
from middleware_hub.spans.chain import pack_ids, pack_logprobs
from middleware_hub.tokenizer.vocabulary import Vocabulary
import random

per_turn, total = int(sys.argv[1]), int(sys.argv[2])
NS = ("", "", "")
rng = random.Random(0)
vocabulary = Vocabulary({i: b"abcd" for i in range(1000)}, special=[])
tree = RadixTree(vocabulary)

def rss():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()

def turn(text, number):
    context_tokens, reply_tokens = per_turn - per_turn // 3, per_turn // 3
    context = f"{number:08x}" + "abcd" * (context_tokens - 2)
    reply = "abcd" * reply_tokens
    match = tree.match(NS, text + context)
    tree.pin(match)
    ids = [rng.randrange(1000) for _ in range(context_tokens)]
    sampled = [rng.randrange(1000) for _ in range(reply_tokens)]
    logprobs = pack_logprobs([-rng.randrange(1, 9999) / 4096 for _ in sampled])
    request = "%032x" % rng.getrandbits(128)
    tree.record(match, Context(pack_ids(ids)), SampledReply(pack_ids(sampled), reply, "1", logprobs, request_ids=(request,)))
    tree.unpin(match)
    return text + context + reply

gc.collect()
before = rss()
started = time.perf_counter()
number = 0
while tree.stats.tokens < total:
    text = ""
    for _ in range(10):
        text = turn(text, number)
        number += 1
filled = time.perf_counter() - started
gc.collect()
held = rss() - before
stats = tree.stats
answer = {
    "turns": stats.generations,
    "tokens": stats.tokens,
    "bytes": held,
    "text": stats.characters,
    "bytes a token": round((held - stats.characters) / stats.tokens, 2),
    "beyond 12 a token, a turn": round((held - stats.characters - 12 * stats.tokens) / stats.generations),
    "estimated / measured": round(tree.estimated_bytes / held, 2),
    "full gc pass, ms": None,
}
t = time.perf_counter(); gc.collect(); answer["full gc pass, ms"] = round((time.perf_counter() - t) * 1e3, 1)
# Collect all of it in steps, as the middleware does; the longest step is what an event loop would feel.
tree.max_tokens = 0
steps = []
more = True
while more:
    t = time.perf_counter()
    more = tree.collect(seconds=0.002)
    steps.append(time.perf_counter() - t)
steps.sort()
answer["collect steps"] = len(steps)
answer["longest step, ms"] = round(steps[-1] * 1e3, 2)
answer["99.9% of steps, ms"] = round(steps[int(len(steps) * 0.999)] * 1e3, 2)
answer["collect, s"] = round(sum(steps), 2)
assert tree.stats.tokens == tree.stats.nodes == 0
print(json.dumps(answer))
"""


@pytest.mark.parametrize(("per_turn", "total"), [(1_000, 10_000_000), (150, 3_000_000)])
def test_memory_and_collection(benchmark: BenchmarkFixture, per_turn: int, total: int) -> None:
    def run() -> dict:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(per_turn), str(total)], check=True, capture_output=True, text=True
        )
        return json.loads(done.stdout)

    benchmark.extra_info.update(benchmark.pedantic(run, rounds=1))
    print(benchmark.extra_info)
