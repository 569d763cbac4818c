"""How long one client blocks the others: the latency of `/liveness` while large and odd requests are served.

`python -m benchmarks.serving.holdups` starts a demo worker and a router as processes of their own. A third process asks for
`/liveness` over and over, while this one sends the requests of the table one after the other. A row shows the longest answer
during its request, the minimum over the rounds; the row `nothing` shows the machine's own noise. `--mb 1` is for requests that
are served, `--mb 24` for requests that are refused; `--only WORD` keeps the rows with that word in their name.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.support.programs import Program
from tests.support.vocabularies import vocabulary

MB = 1 << 20
GENERATE, RETRIEVE, CHAT = "/generate", "/retrieve_from_text", "/v1/chat/completions"
Row = tuple[str, str, Callable[[], bytes]]


def rows(size: int) -> Iterator[Row]:
    """Yield the name, path and body of each request. `size` is the approximate size of the body in bytes."""
    rng = random.Random(0)
    words = " ".join(rng.choices(("hello", "world", "the", "return x", "\n    if a == b:", "你好"), k=size // 8))[:size]
    letters = "".join(rng.choices("abcdefgh", k=MB)) * (size // MB)
    han = "".join(chr(rng.randrange(0x4E00, 0x9FA5)) for _ in range(MB // 3)) * (size // MB)
    options: dict[str, Any] = {"sampling_params": {"max_new_tokens": 1}}

    def text_of(text: Any, **more: Any) -> Callable[[], bytes]:
        return lambda: json.dumps({"text": text, **more}, ensure_ascii=False).encode()

    def chat(content: Any, **more: Any) -> Callable[[], bytes]:
        return lambda: json.dumps(
            {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 1, **more}
        ).encode()

    for kind, text in (("words", words), ("letters", letters), ("han", han)):
        yield f"retrieve, {kind}", RETRIEVE, text_of(text)
        yield f"generate, {kind}", GENERATE, text_of(text, **options)
    yield "explain, words", "/radix_tree/explain", text_of(words)
    yield "segments, words", GENERATE, lambda: json.dumps({"prompt_segments": [{"text": words}], **options}).encode()
    yield "completions, words", "/v1/completions", lambda: json.dumps({"prompt": words, "max_tokens": 1}).encode()
    yield "chat, words", CHAT, chat(words)
    yield "chat, many parts", CHAT, chat([{"type": "text", "text": "a"}] * (size // 32))
    yield (
        "chat, many messages",
        CHAT,
        lambda: json.dumps({"messages": [{"role": "user", "content": "a"}] * (size // 40)}).encode(),
    )
    yield (
        "chat, deep tools",
        CHAT,
        chat("a", tools=[{"type": "function", "function": {"name": "f", "parameters": nested(500)}}] * (size // 5000)),
    )
    yield "chat, lists", CHAT, lambda: b'{"messages": [' + b"[]," * (size // 3) + b"[]]}"
    yield (
        "generate, one prompt of ids",
        GENERATE,
        lambda: json.dumps({"input_ids": [100] * (size // 5), **options}).encode(),
    )
    yield (
        "generate, a batch of ids",
        GENERATE,
        lambda: json.dumps({"input_ids": [[100] * 5000] * (size // 25000), **options}).encode(),
    )
    yield "generate, a batch of texts", GENERATE, text_of(["a" * 60] * (size // 64), **options)
    yield "retrieve, a list of texts", RETRIEVE, text_of(["a" * 60] * (size // 64))
    yield (
        "generate, many fields",
        GENERATE,
        lambda: b'{"text": "a", ' + b",".join(b'"%07d":0' % n for n in range(size // 12)) + b"}",
    )
    yield (
        "generate, many parameters",
        GENERATE,
        lambda: b'{"text": "a", "sampling_params": {' + b",".join(b'"%07d":0' % n for n in range(size // 12)) + b"}}",
    )
    yield "generate, deep", GENERATE, lambda: b'{"text": "a", "x": ' + b"[" * (size // 2) + b"]" * (size // 2) + b"}"
    yield "generate, lists", GENERATE, lambda: b'{"text": "a", "sampling_params": [' + b"{}," * (size // 3) + b"{}]}"
    yield (
        "generate, an image",
        GENERATE,
        lambda: json.dumps({"text": "a", "image_data": "A" * size, **options}).encode(),
    )
    yield (
        "session, fields",
        "/sessions",
        lambda: b'{"metadata": {' + b",".join(b'"%07d":0' % n for n in range(size // 12)) + b"}}",
    )
    yield (
        "abort, fields",
        "/abort_request",
        lambda: b'{"rid": "a", ' + b",".join(b'"%07d":0' % n for n in range(size // 12)) + b"}",
    )
    yield "weights, lists", "/update_weights_from_tensor", lambda: b'{"x": [' + b"[]," * (size // 3) + b"[]]}"
    yield "proxied", "/v1/embeddings", lambda: b"x" * size


def nested(depth: int) -> Any:
    """Return objects nested this deep."""
    found: Any = {}
    for _ in range(depth):
        found = {"a": found}
    return found


def watch(url: str, pipe: Connection) -> None:
    """Ask for `/liveness` repeatedly; for each message on the pipe, send the longest time since the last one."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
    longest = 0.0
    while True:
        begun = time.perf_counter()
        connection.request("GET", "/liveness")
        connection.getresponse().read()
        longest = max(longest, time.perf_counter() - begun)
        if pipe.poll(0.002):
            pipe.recv()
            pipe.send(longest)
            longest = 0.0


def ask(url: str, path: str, body: bytes) -> str:
    """Return the status of the answer with its size, or with the start of an error's body."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
    with suppress(ConnectionError):  # the answer may come before the end of the request
        connection.request("POST", path, body, {"content-type": "application/json"})
    try:
        response = connection.getresponse()
        content = response.read()
    except (ConnectionError, http.client.HTTPException) as error:
        return repr(error)
    finally:
        connection.close()
    return f"{response.status} {content[:90]!r}" if response.status >= 400 else f"{response.status} {len(content):,} B"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=24.0, help="size of a body (%(default)g)")
    parser.add_argument("--rounds", type=int, default=3, help="a row shows their minimum (%(default)s)")
    parser.add_argument("--only", default="", help="rows with this in their name")
    parser.add_argument(
        "--router", action="append", default=[], help="further flags of the router, each as --router=FLAG"
    )
    arguments = parser.parse_args()
    folder = str(vocabulary("qwen-whole"))
    with ExitStack() as entered:
        logs = Path(entered.enter_context(tempfile.TemporaryDirectory()))
        worker = entered.enter_context(Program("worker", "demo-worker", "--tokenizer-path", folder, folder=logs))
        worker.wait_until_up()
        flags = ("--tokenizer-path", folder, "--worker-urls", worker.url, *arguments.router)
        router = entered.enter_context(Program("router", *flags, folder=logs))
        router.wait_until_up()
        here, there = multiprocessing.Pipe()
        watcher = multiprocessing.get_context("spawn").Process(target=watch, args=(router.url, there), daemon=True)
        watcher.start()
        here.send(None)
        here.recv()

        def longest() -> float:
            here.send(None)
            return float(here.recv()) * 1000

        time.sleep(2)
        print(f"{'nothing':32} {longest():8.1f} ms")
        for name, path, body in rows(int(arguments.mb * MB)):
            if arguments.only not in name:
                continue
            content, held, seconds = body(), [], 0.0
            for _ in range(arguments.rounds):
                longest()
                begun = time.perf_counter()
                answer = ask(router.url, path, content)
                seconds = time.perf_counter() - begun
                time.sleep(0.2)
                held.append(longest())
            print(f"{name:32} {min(held):8.1f} ms   {seconds:6.2f} s   {answer}", flush=True)
            if not router.alive:
                print(router.log[-2000:])
                return
        watcher.terminate()


if __name__ == "__main__":
    main()
