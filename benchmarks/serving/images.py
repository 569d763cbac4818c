"""What a screenshot in every turn costs: `python -m benchmarks.serving.images` (or `make bench`).

Conversations of ten turns, in turn with and without images, from one client, which resends all of the conversation with each
turn, as agents do: in a session (OpenAI chat completions), and as `/generate`. A turn of those with images has one more
screenshot of 300 KB; a turn of those without has as many new tokens, all of them text. `named` names the screenshots of earlier
turns by their digests, and sends the file of the new one only.

The workers are embedded engines in another process, which take images. CPU is what the operating system counted for the
router's process. What an image may cost: a half more than a turn of text, and 1 ms for each MB that is sent to the worker.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import hashlib
import json
import random
import statistics
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import psutil
import uvloop

from benchmarks.pages import machine, spread, table
from benchmarks.processes import cpu_seconds, running, settle
from benchmarks.serving.client import CLIENTS, Client
from benchmarks.serving.targets import add_options, write
from tests.support.engine_server import free_port
from tests.support.pictures import picture
from worker.engine.prompt_images import length_of
from worker.models.ngram import shipped_image_tokenizer

TURNS, IN_WORDS, OUT_TOKENS, FILE_BYTES = 10, 150, 100, 300_000
CONVERSATIONS = 5
"""Of each kind in a round: the operating system counts hundredths of a second."""
PAD = "<|image_pad|>"
IMAGE = f"<|vision_start|>{PAD}<|vision_end|>"
Json = dict[str, Any]


class Screenshot(NamedTuple):
    """An image file, and what stands for it in requests."""

    url: str
    digest: str

    @property
    def tokens(self) -> int:
        """How many tokens the embedded engine makes of it."""
        return length_of(self.digest)


def screenshot(seed: int) -> Screenshot:
    """Return a picture with noise behind its end, as many bytes as a screenshot of a desktop has."""
    content = picture(1280, 800, seed)
    content += random.Random(seed).randbytes(FILE_BYTES - len(content))
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return Screenshot(url, f"sha256:{hashlib.sha256(content).hexdigest()}")


def words(count: int, seed: int) -> str:
    """Return text of about as many tokens."""
    return " ".join(random.Random(seed).choices(("the", "and", "it", "is", "of", "a"), k=count))


class Turn(NamedTuple):
    """What a client asks next: a text, and perhaps an image before it."""

    text: str
    image: Screenshot | None


def turns(seed: int, *, images: bool) -> list[Turn]:
    """Return the turns of a conversation. Without images, its texts have as many tokens more as the images have."""
    shots = [screenshot(100 * seed + number) for number in range(TURNS)]
    return [
        Turn(words(IN_WORDS + (0 if images else one.tokens), seed + number), one if images else None)
        for number, one in enumerate(shots)
    ]


async def post(client: Client, path: str, body: bytes) -> Json:
    """Return the answer. Raises RuntimeError for an error."""
    answer = await client.post(path, body)
    if answer.status >= 300:
        raise RuntimeError(f"{path}: {answer.status} {answer.body[:300]!r}")
    found: Json = json.loads(answer.body)
    return found


def _shown(one: Turn, *, named: bool) -> str:
    assert one.image is not None
    return one.image.digest if named else one.image.url


Conversation = Callable[[Client, list[Turn], bool], Awaitable[None]]


async def session(client: Client, asked: list[Turn], named: bool) -> None:
    """Play a session. `named`: images of earlier turns are named by their digests."""
    name = (await post(client, "/sessions", b"{}"))["session_id"]
    messages: list[bytes] = []
    last: Turn | None = None
    for one in asked:
        if named and last is not None and last.image is not None:
            messages[-2] = _message(last, named=True)
        messages.append(_message(one, named=False))
        body = b'{"max_tokens":%d,"messages":[%b]}' % (OUT_TOKENS, b",".join(messages))
        reply = await post(client, f"/sessions/{name}/v1/chat/completions", body)
        messages.append(json.dumps(reply["choices"][0]["message"]).encode())
        last = one


def _message(one: Turn, *, named: bool) -> bytes:
    content: list[Json] = [{"type": "text", "text": one.text}]
    if one.image is not None:
        content.insert(0, {"type": "image_url", "image_url": {"url": _shown(one, named=named)}})
    return json.dumps({"role": "user", "content": content}).encode()


async def generate(client: Client, asked: list[Turn], named: bool) -> None:
    """Play a conversation of texts. `named`: images of earlier turns are named by their digests."""
    text, given = "", list[bytes]()
    for number, one in enumerate(asked):
        text += f"{IMAGE if one.image else ''}{one.text}\n"
        if one.image is not None:
            if named and given:
                given[-1] = json.dumps(_shown(asked[number - 1], named=True)).encode()
            given.append(json.dumps(one.image.url).encode())
        images = b',"image_data":[%b]' % b",".join(given) if given else b""
        body = b'{"text":%b,"sampling_params":{"max_new_tokens":%d}%b}' % (
            json.dumps(text).encode(),
            OUT_TOKENS,
            images,
        )
        text += (await post(client, "/generate", body))["text"] + "\n"


WAYS: dict[str, tuple[Conversation, bool]] = {
    "session": (session, False),
    "session, named": (session, True),
    "/generate": (generate, False),
    "/generate, named": (generate, True),
}


@contextlib.contextmanager
def processes() -> Iterator[tuple[str, psutil.Process]]:
    """Run a worker that takes images and a router. Yield the router's URL and process."""
    ports, folder = (free_port(), free_port()), str(shipped_image_tokenizer())
    worker, router = f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
    flags = ["--worker-urls", worker, "--tokenizer-path", folder, "--log-level", "warning", "--port", str(ports[1])]
    engine = running("worker", "--scripted", "--images", "--port", str(ports[0]), port=ports[0])
    with engine, running("router", *flags, port=ports[1]) as process:
        yield router, process


async def measure(rounds: int, ways: list[str]) -> list[Json]:
    found: dict[str, list[Json]] = {way: [] for way in ways}
    with processes() as (url, process):
        client = await CLIENTS["raw"].connect(url)
        for number in range(rounds + 1):  # the first one warms everything up
            for place, way in enumerate(ways):
                play, named = WAYS[way]
                first = CONVERSATIONS * (number * len(ways) + place)  # no way meets an image of another one
                row: Json = {}
                for images in (False, True):
                    asked = [turns(seed, images=images) for seed in range(first, first + CONVERSATIONS)]
                    before = cpu_seconds(process)
                    for one in asked:
                        await play(client, one, named)
                    used = cpu_seconds(process) - before
                    row["images" if images else "text"] = 1000 * used / TURNS / CONVERSATIONS
                if number:
                    found[way].append(row)
                    print(json.dumps({"way": way, **row}), flush=True)
            if not number:
                await asyncio.to_thread(settle, process)
        await client.close()
    megabytes = sum(range(1, TURNS + 1)) * len(screenshot(0).url) / 1e6 / TURNS
    return [{"way": way, "rounds": rows, "sent_mb": megabytes} for way, rows in found.items()]


def tables(found: list[Json]) -> str:
    rows = []
    for one in found:
        text, images = ([row[kind] for row in one["rounds"]] for kind in ("text", "images"))
        allowed = 1.5 * statistics.median(text) + one["sent_mb"]
        rows.append([one["way"], spread(text), spread(images), f"{allowed:.2f}"])
    about = (
        f"{TURNS} turns, each with a screenshot of {FILE_BYTES // 1000} KB, or with as many new tokens of text; on average "
        f"{found[0]['sent_mb']:.1f} MB of images go to the worker with a turn. The median of the rounds (least-largest)."
    )
    head = ["", "CPU of a turn of text, ms", "of a turn with an image, ms", "1.5 x text + 1 ms a MB"]
    return "\n\n".join([f"{machine()}. {about}", table(head, rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=10)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="how the client asks (all)")
    args = parser.parse_args()
    found = uvloop.run(measure(args.rounds, args.ways))
    write(args, "images", tables(found), found)


if __name__ == "__main__":
    main()
