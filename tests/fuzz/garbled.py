"""A worker whose replies are spoilt, as a header tells it: what a router must survive of the other side.

Asked without that header it replies as it should, always the same.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from tests.fuzz.bodies import words
from tests.fuzz.mutate import Mutator

SEED = b"x-spoilt"
IDS = (39, 303, 345)
"""What it samples; of the shipped tokenizer."""

_STATUSES = (200, 200, 200, 200, 200, 400, 404, 429, 503, 204)
_TYPES = (b"application/json", b"text/event-stream; charset=utf-8", b"text/plain", b"")


def reply(text: str, prompt_tokens: int, request_id: str) -> dict[str, Any]:
    """A good one."""
    logprobs = [[-0.5 * (number + 1), token, None] for number, token in enumerate(IDS)]
    meta = {
        "id": request_id,
        "finish_reason": {"type": "length", "length": len(IDS)},
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(IDS),
        "weight_version": "default",
        "output_token_logprobs": logprobs,
        "weight_versions": [{"version": "default", "start": 0, "end": len(IDS)}],
    }
    return {"text": text, "output_ids": list(IDS), "meta_info": meta}


class _Asked(msgspec.Struct):
    input_ids: list[Any] = []
    rid: Any = None


class GarbledWorker:
    """An ASGI application."""

    def __init__(self, text: str) -> None:
        """`text` is what `IDS` spell."""
        self._text = text
        self._mutator = Mutator(
            [*words(), "text", "output_ids", "index", "error"], [msgspec.json.encode(reply(text, 1, "r1"))]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": f"{message['type']}.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        seed = dict(scope["headers"]).get(SEED)
        about_itself = {
            "/server_info": {"model_path": "m"},
            "/get_server_info": {},
            "/ping": {},
            "/model_info": {"weight_version": "default"},
        }
        if scope["path"] in about_itself:
            await self._send(send, 200, b"application/json", [msgspec.json.encode(about_itself[scope["path"]])])
        elif seed is None:
            await self._send(send, 200, b"application/json", [msgspec.json.encode(self._good(body))])
        else:
            await self._spoilt(send, self._good(body), random.Random(seed))

    def _good(self, body: bytes) -> Any:
        """A reply to each prompt; to what is none, one of some sort."""
        try:
            asked = msgspec.json.decode(body, type=_Asked)
        except (ValueError, RecursionError):
            return reply(self._text, 0, "")
        batch = bool(asked.input_ids) and isinstance(asked.input_ids[0], list)
        prompts = asked.input_ids if batch else [asked.input_ids]
        rids = (
            asked.rid if isinstance(asked.rid, list) and len(asked.rid) == len(prompts) else [asked.rid] * len(prompts)
        )
        replies = [
            reply(self._text, len(prompt) if isinstance(prompt, list) else 0, name)
            for prompt, name in zip(prompts, rids, strict=True)
        ]
        return replies if batch else replies[0]

    async def _spoilt(self, send: Send, good: Any, rng: random.Random) -> None:
        streamed = rng.random() < 0.4
        content: list[bytes] = []
        for _ in range(rng.randint(1, 4) if streamed else 1):
            # Copied, for it is changed in place.
            value = self._mutator.json(msgspec.json.decode(msgspec.json.encode(good)), rng, rng.randint(0, 3))
            written = self._mutator.written(value, rng)
            if rng.random() < 0.25:
                written = self._mutator.bytes(written, rng)
            content.append(b"data: " + written + b"\n\n" if streamed else written)
        if streamed and rng.random() < 0.8:
            content.append(b"data: [DONE]\n\n")
        kind = _TYPES[1 if streamed else 0] if rng.random() < 0.9 else rng.choice(_TYPES)
        await self._send(send, rng.choice(_STATUSES), kind, content, broken=rng.random() < 0.05)

    async def _send(self, send: Send, status: int, kind: bytes, content: list[bytes], *, broken: bool = False) -> None:
        if status == 204:
            content = [b""]
        headers = [(b"content-type", kind)] if kind else []
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for part in content:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if broken:
            return  # and the server cuts the connection
        await send({"type": "http.response.body", "body": b"", "more_body": False})
