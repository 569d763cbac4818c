"""Ask real engines what the recordings hold, and write them: `python -m tests.support.recorded.make [ENGINE]`.

It starts each engine with each family in turn (`tests/vlm_cpu/setup.sh` makes them), some minutes. Requests that leave an
engine without an answer, or end it, are not among them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.support.asking import Asking, until
from tests.support.client import call
from tests.support.engine_server import EngineServer
from tests.support.pictures import data_url, digest, picture
from tests.support.recorded import FOLDER, RUN, Exchange, image
from tests.support.vision import IMAGE, VISIONS, Vision

Json = dict[str, Any]
PICTURES = {
    "small.png": (56, 56, "PNG"),
    "middle.png": (300, 200, "PNG"),
    "large.png": (1024, 768, "PNG"),
    "upright.jpeg": (200, 300, "JPEG"),
}
# Of Qwen's vocabulary: <|im_start|>user\n, words, <|im_end|>\n<|im_start|>assistant\n.
USER, WORDS, ASSISTANT = [151_644, 872, 198], [3_838, 374, 419], [151_645, 198, 151_644, 77_091, 198]
ONE = [*USER, *IMAGE, *WORDS, *ASSISTANT]
TWO = [*USER, *IMAGE, *WORDS, *IMAGE, *ASSISTANT]
TEXT = [*USER, *WORDS, *ASSISTANT]
LONG = 3_000  # tokens, more than an engine samples until it is told to stop


def sglang() -> Iterator[tuple[str, Json]]:
    few = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}

    def one(name: str, *, params: Json | None = None, **more: Any) -> Json:
        hashes = [digest(image(name))]
        sent = {"input_ids": ONE, "image_data": [_url(name)], "mm_content_hashes": hashes}
        return {**sent, "sampling_params": {**few, **(params or {})}, **more}

    ids, logprobs = {"return_prompt_token_ids": True}, {"return_logprob": True}
    for name in PICTURES:
        yield name, one(name, **ids)
    yield "again", one("middle.png", **ids)
    yield "without ids", one("small.png")
    yield "logprobs", one("small.png", **ids, **logprobs)
    yield "logprobs of the prompt", one("small.png", **ids, **logprobs, logprob_start_len=0)
    yield "logprobs from inside an image on", one("small.png", **ids, **logprobs, logprob_start_len=6)
    yield "top logprobs", one("small.png", **logprobs, logprob_start_len=0, top_logprobs_num=1)
    yield "a stream", one("small.png", **ids, **logprobs, stream=True)
    yield "a stream without ids", one("small.png", stream=True)
    yield "several", one("small.png", params={"n": 2}, **ids)
    yield "a stream of several", one("small.png", params={"n": 2}, **ids, stream=True)
    both = [digest(image(name)) for name in ("small.png", "upright.jpeg")]
    yield (
        "two images",
        one("small.png", **ids)
        | {"input_ids": TWO, "image_data": [_url("small.png"), _url("upright.jpeg")], "mm_content_hashes": both},
    )
    batch: Json = {"input_ids": [ONE, ONE, TEXT], "image_data": [[_url("small.png")], [_url("middle.png")], []]}
    batch["mm_content_hashes"] = [[digest(image("small.png"))], [digest(image("middle.png"))], []]
    yield "a batch", {**batch, "sampling_params": few, **ids}
    yield "a stream of a batch", {**batch, "sampling_params": few, **ids, "stream": True}
    yield "a stop string", one("small.png", params={"max_new_tokens": 60, "stop": ["e", "a"]}, **ids)
    yield "other bytes than were named", one("small.png") | {"mm_content_hashes": [f"sha256:{'0' * 64}"]}
    yield "aborted", one("small.png", params={"max_new_tokens": LONG}, **ids, rid="aborted")
    yield "an aborted stream", one("small.png", params={"max_new_tokens": LONG}, **ids, rid="stream", stream=True)


def vllm() -> Iterator[tuple[str, Json]]:
    few = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}

    def part(name: str) -> Json:
        return {"type": "image_url", "url": _url(name), "uuid": digest(image(name))}

    def one(name: str, *, params: Json | None = None, **more: Any) -> Json:
        sent = {"token_ids": ONE, "content_parts": [part(name)], "output_mode": "text", "return_token_ids": True}
        return {**sent, "sampling_params": {**few, **(params or {})}, **more}

    tokens: Json = {"output_mode": "tokens"}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    for name in PICTURES:
        yield name, one(name)
    yield "again", one("middle.png")
    yield "an image by its name", one("middle.png") | {"content_parts": [_named(part("middle.png"))]}
    yield "an unknown name", one("small.png") | {"content_parts": [_named(part("small.png") | {"uuid": "unknown"})]}
    yield "without ids", one("small.png", return_token_ids=False)
    yield "tokens", one("small.png", **tokens)
    yield "logprobs", one("small.png", params={"logprobs": 0})
    yield "logprobs of tokens", one("small.png", params={"logprobs": 0}, **tokens)
    yield "top logprobs", one("small.png", params={"logprobs": 2})
    yield "logprobs of the prompt", one("small.png", params={"prompt_logprobs": 0})
    yield "a stream", one("small.png", params={"logprobs": 0}, stream=True)
    yield "a stream of tokens", one("small.png", params={"logprobs": 0}, **tokens, stream=True)
    yield "a stream with its usage", one("small.png", **usage)
    yield "several", one("small.png", params={"n": 2, "temperature": 1, "seed": 5})
    yield "a stream of several", one("small.png", params={"n": 2, "temperature": 1, "seed": 5}, **usage)
    parts = [part("small.png"), part("upright.jpeg")]
    yield "two images", one("small.png") | {"token_ids": TWO, "content_parts": parts}
    yield (
        "two images, one by its name",
        one("small.png") | {"token_ids": TWO, "content_parts": [_named(parts[0]), parts[1]]},
    )
    text = one("small.png", params={"logprobs": 0}) | {"token_ids": TEXT}
    del text["content_parts"]
    yield "no image", text
    stop = {"max_tokens": 60, "stop": ["e", "a"]}
    yield "a stop string", one("small.png", params=stop)
    yield "a stop string of tokens", one("small.png", params=stop, **tokens)
    yield "a stop string kept", one("small.png", params={**stop, "include_stop_str_in_output": True})
    yield "aborted", one("small.png", params={"max_tokens": LONG}, request_id="aborted")
    yield "an aborted stream", one("small.png", params={"max_tokens": LONG}, request_id="stream", stream=True)


def _url(name: str) -> str:
    return data_url(image(name))


def _named(part: Json) -> Json:
    return {key: value for key, value in part.items() if key != "url"}


REQUESTS = {"sglang": sglang, "vllm": vllm}
PATHS = {"sglang": "/generate", "vllm": "/inference/v1/generate"}


def perform(vision: Vision, worker: EngineServer, name: str, path: str, body: Json) -> Exchange:
    """Send a request, abort it if its name says so, and return what came back."""
    aborted = "aborted" in name
    sampled = vision.engine.progress(worker)[1]
    asking = Asking(worker.url, body, path=path)
    try:
        if aborted:  # behind its first token: a reply without one says less
            until(lambda: (now := vision.engine.progress(worker))[0] > 0 and now[1] > sampled, "it samples")
            if body.get("stream"):
                first = asking.event()
            vision.engine.abort(worker, body.get("rid") or body["request_id"])
        status = asking.response.status
        if status == 200 and body.get("stream"):
            events = asking.events()
            reply: Any = [first, events[-1]] if aborted else events
        else:
            reply = asking.answer().json()
        return Exchange(name, path, body, aborted, status, reply)
    finally:
        asking.close()


def empty_cache(vision: Vision, worker: EngineServer) -> None:
    """Begin as the recordings begin: what a reply says of the cache depends on those before it."""
    assert call(f"{worker.url}{vision.engine.flush}", {}).status == 200


def _short(value: Any, urls: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _short(one, urls) for key, one in value.items()}
    if isinstance(value, list):
        found: list[Any] = []
        for one, equal in groupby(value, key=lambda one: one if type(one) is int else object()):
            run = list(equal)
            whole = type(one) is int and len(run) >= RUN
            found += [{"run": [one, len(run)]}] if whole else [_short(each, urls) for each in run]
        return found
    return urls.get(value, value) if isinstance(value, str) else value


def main(engines: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, (width, height, kind) in PICTURES.items():
        if not (FOLDER / name).exists():
            (FOLDER / name).write_bytes(picture(width, height, len(name), kind))
    urls = {_url(name): f"@{name}" for name in PICTURES}
    for engine in engines or REQUESTS:
        for vision in VISIONS[engine]:
            flags = (*vision.flags, "--served-model-name", vision.family)
            with (
                tempfile.TemporaryDirectory() as folder,
                vision.kit.server(*flags, log_dir=Path(folder)) as worker,
            ):
                empty_cache(vision, worker)
                found = [perform(vision, worker, name, PATHS[engine], body) for name, body in REQUESTS[engine]()]
            lines = ",\n".join(json.dumps(_short(vars(one), urls), ensure_ascii=False) for one in found)
            (FOLDER / f"{engine}-{vision.family}.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main(sys.argv[1:])
