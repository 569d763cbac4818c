"""Clients that keep books: what they asked, what came of it, and whether the router's own books say the same.

A client asks to see the ids of its prompt and of its reply, so it knows what a trainer has to get, id for id, without a word
from the router's memory.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any
from urllib.parse import urlsplit

from tokenizers import Tokenizer

from tests.support.client import call
from tests.support.fleet import Fleet, until
from tests.support.oracle import versions_of
from worker.models.ngram import shipped_tokenizer

Json = dict[str, Any]

SAMPLING: Json = {"max_new_tokens": 40, "ignore_eos": True}
BROKEN = (OSError, http.client.HTTPException)
SECONDS = 120.0
RETRIES = "tito_router_retries_total"


@dataclass(frozen=True)
class Reply:
    """What a client got of a generation: all of it, or (`whole` is false) what came before its stream broke off."""

    prompt: str
    request_id: str
    worker: str
    asked_at: float  # `time.monotonic()`
    whole: bool = False
    text: str = ""
    prompt_ids: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[str, ...] = ()  # of each id; only at its end does a reply tell
    sent_at: float = 0.0  # by its worker; of a stream, its beginning
    before: Reply | None = None  # the turn on top of which this one was asked
    trajectory: Json = field(default_factory=dict)  # what it told of itself, if that was asked for

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt_ids, *self.ids]

    @cached_property
    def spelled(self) -> bool:
        """Whether the text is what the ids spell.

        SGLang (0.5.23) sends some of it twice where a chunk of ids ends within a character, the next one does too, and less
        of that one's text can be shown: a worker's fault, to be told and not to be mended.
        """
        text: str = _tokenizer().decode(self.ids)
        return text == self.text if self.whole else text.startswith(self.text)

    def training(self) -> tuple[list[int], list[float], list[str]]:
        """Mask and logprob of each token, and the versions of those that were sampled, in this turn and those before it."""
        mask, logprobs, versions = self.before.training() if self.before is not None else ([], [], [])
        known = self.before.tokens if self.before is not None else []
        assert list(self.prompt_ids[: len(known)]) == known, "a prompt begins with the turn before it, id for id"
        between = len(self.prompt_ids) - len(known)
        return (
            [*mask, *[0] * between, *[1] * len(self.ids)],
            [*logprobs, *[0.0] * between, *self.logprobs],
            [*versions, *self.versions],
        )


@dataclass(frozen=True)
class Refusal:
    """An answer that is an error."""

    status: int
    type: str | None
    retry_after: str | None


@dataclass
class Ledger:
    """Clients of a fleet; there are no others for as long as they are there."""

    fleet: Fleet
    replies: list[Reply] = field(default_factory=list)
    broken: list[Reply] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    garbage: list[bytes] = field(default_factory=list)
    space: str = field(default_factory=lambda: uuid.uuid4().hex)
    _begun: dict[str, Reply] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _begin: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._begin = self._books()

    # -- asking ----------------------------------------------------------------------------------------------------------

    def ask(
        self,
        prompt: str,
        *,
        stream: bool = False,
        sampling: Mapping[str, Any] = SAMPLING,
        headers: Mapping[str, str] | None = None,
        before: Reply | None = None,
        trajectory: bool = False,
    ) -> Reply | None:
        """One generation; what came of it if that is something to go on from.

        Raises whatever breaks off an answer that is no stream: such a one is not to break.
        """
        name, now = uuid.uuid4().hex, time.monotonic()
        body = {
            **{"text": prompt, "rid": name, "stream": stream, "sampling_params": sampling},
            **{"return_logprob": True, "return_prompt_token_ids": True, "return_trajectory": trajectory},
        }
        with _posted(self.fleet.url, body, {**self._headers, **(headers or {})}) as response:
            if response.status != 200:
                self._note(self.refusals, _refusal(response))
                return None
            got = Reply(prompt, name, response.getheader("x-router-worker", ""), now, before=before)
            return self._streamed(got, response) if stream else self._answered(got, response.read())

    def _answered(self, got: Reply, content: bytes) -> Reply | None:
        try:
            payload = json.loads(content)
        except ValueError:
            payload = {}
        if "meta_info" not in payload:
            self._note(self.garbage, content)
            return None
        reply = replace(_with(got, payload), whole=True)
        self._note(self.replies, reply)
        return reply

    def _streamed(self, got: Reply, response: http.client.HTTPResponse) -> Reply | None:
        try:
            for data in _events(response):
                if data == b"[DONE]":
                    break
                got = _with(got, json.loads(data))
                with self._lock:
                    self._begun[got.request_id] = got
            else:
                raise AssertionError(f"a stream that ends as if it were whole: {got}")
            assert not response.read(), "nothing comes behind the end, which is a clean one"
        except BROKEN:
            self._note(self.broken, got)
            return None
        finally:
            with self._lock:
                self._begun.pop(got.request_id, None)
        got = replace(got, whole=True)
        self._note(self.replies, got)
        return got

    @property
    def _headers(self) -> dict[str, str]:
        """What keeps apart what is remembered of them."""
        return {"x-radix-namespace": self.space}

    def _note(self, where: list[Any], what: Any) -> None:
        with self._lock:
            where.append(what)

    def begun(self, worker: str | None = None) -> list[Reply]:
        """The streams that have begun (at a worker) and are not over, as far as they have come."""
        with self._lock:
            return [got for got in self._begun.values() if worker in (None, got.worker)]

    def answered_by(self, worker: str) -> int:
        with self._lock:
            return sum(reply.worker == worker for reply in self.replies)

    def asked_since(self, moment: float) -> list[Reply]:
        """The replies to what was asked later than that (`time.monotonic()`)."""
        with self._lock:
            return [reply for reply in self.replies if reply.asked_at > moment]

    @property
    def failed(self) -> int:
        return len(self.refusals) + len(self.broken)

    # -- conversations ---------------------------------------------------------------------------------------------------

    def converse(self, opening: str, number: int, goes_on: Callable[[int], bool]) -> None:
        """Turns on top of each other, every second one streamed; one that fails is asked again."""
        last: Reply | None = None
        turn = 0
        while goes_on(turn):
            prompt = opening if last is None else f"{last.prompt}{last.text}\nObservation {turn}. "
            reply = self.ask(prompt, stream=(number + turn) % 2 == 0, before=last)
            last = reply if reply is not None and reply.text and reply.spelled else last
            turn += 1

    @contextmanager
    def load(self, conversations: int, *, turns: int = 2, name: str = "Conversation ") -> Iterator[None]:
        """So many conversations until the end of the block, and of `turns` turns at least."""
        calm = threading.Event()
        with ThreadPoolExecutor(conversations) as clients:
            jobs = [
                clients.submit(
                    self.converse, f"{name}{number}: ", number, lambda turn: turn < turns or not calm.is_set()
                )
                for number in range(conversations)
            ]
            try:
                yield
            finally:
                calm.set()
        for job in jobs:
            job.result()

    # -- the reckoning ---------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Nothing is in flight; each request has one outcome, here and there; each reply is retrieved as it came, once."""
        answered, seen = len(self.replies) + len(self.garbage), [reply for reply in self.broken if reply.ids]
        own = {
            "answered": answered,
            "failed": self.failed,
            "orphaned": 0,
            "exact": sum(reply.spelled for reply in (*self.replies, *seen)),
            "inexact": sum(not reply.spelled for reply in (*self.replies, *seen)),
            "no": len(self.garbage) + self.failed - len(seen),
        }
        print(self)
        self.fleet.until_idle()
        until(lambda: self._counted() == own, lambda: f"{own} for clients, {self._books()} less {self._begin} here")
        with ThreadPoolExecutor(4) as clients:
            for _ in clients.map(self._check, [*self.replies, *seen]):
                pass

    def _counted(self) -> dict[str, int]:
        """By the router, since these clients began."""
        now = self._books()
        return {word: now[word] - self._begin[word] for word in now}

    def _books(self) -> dict[str, int]:
        count = self.fleet.count
        outcomes, recorded = ("answered", "failed", "orphaned"), ("exact", "inexact", "no")
        return {
            **{word: count("tito_router_generations_total", outcome=word) for word in outcomes},
            **{word: count("tito_radix_replies_total", recorded=word) for word in recorded},
        }

    def _check(self, reply: Reply) -> None:
        body = {"text": reply.prompt + reply.text, "request_id": reply.request_id}
        assert_trains(call(self.fleet.url + "/retrieve_from_text", body, headers=self._headers).json(), reply)

    def __str__(self) -> str:
        told = Counter(refusal.status for refusal in self.refusals)
        parts = [f"{len(self.replies)} answered", f"{len(self.garbage)} of nonsense", f"{len(self.broken)} broken off"]
        parts += [f"{count} answered with {status}" for status, count in sorted(told.items())]
        parts += [f"{count} retried ({label})" for label, count in self.fleet.numbers(RETRIES).items() if count]
        return ", ".join(parts)


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(shipped_tokenizer() / "tokenizer.json"))


def assert_trains(found: Json, reply: Reply) -> None:
    """A retrieval gives a trainer what the client saw, all turns of it, recorded once."""
    mask, logprobs, versions = reply.training()
    assert found["tokens"] == reply.tokens, reply
    assert found["loss_mask"] == mask, reply
    assert found["rollout_logp"] == logprobs, reply
    assert found["exact"] == reply.spelled, (reply, found["reasons"])
    assert (found["variants"], found["request_ids"]) == (1, [reply.request_id]), reply
    if reply.whole:
        assert [version for _, version in versions_of(found["weight_versions"])] == versions, reply


def _with(got: Reply, payload: Json) -> Reply:
    """The reply after a payload: all of it once more, or (of a stream of deltas) what is new."""
    meta = payload["meta_info"]
    assert meta["id"] == got.request_id
    ids, logprobs = tuple(payload["output_ids"]), tuple(entry[0] for entry in meta["output_token_logprobs"])
    text, count = payload["text"], meta["completion_tokens"]
    if len(ids) < count:
        ids, logprobs, text = got.ids + ids, got.logprobs + logprobs, got.text + text
    assert len(ids) == len(logprobs) == count
    return replace(
        got,
        text=text,
        prompt_ids=tuple(payload["prompt_token_ids"]),
        ids=ids,
        logprobs=logprobs,
        sent_at=got.sent_at or meta["response_sent_to_client_ts"],
        versions=tuple(version for _, version in versions_of(meta.get("weight_versions", ()))),
        trajectory=meta.get("trajectory", {}),
    )


def _events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The payloads of a stream. Raises IncompleteRead (which reading by line would hide) if it breaks off."""
    rest = b""
    while piece := response.read1():
        *events, rest = (rest + piece).split(b"\n\n")
        yield from (event.removeprefix(b"data: ") for event in events)


def _refusal(response: http.client.HTTPResponse) -> Refusal:
    content = response.read()
    try:
        error = json.loads(content).get("error", {})
    except ValueError:
        error = {}
    return Refusal(response.status, error.get("type"), response.getheader("retry-after"))


@contextmanager
def _posted(url: str, body: Json, headers: Mapping[str, str]) -> Iterator[http.client.HTTPResponse]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=SECONDS)
    try:
        connection.request(
            "POST", "/generate", json.dumps(body).encode(), {"content-type": "application/json", **headers}
        )
        yield connection.getresponse()
    finally:
        connection.close()


def tell(worker: str, path: str, body: Json) -> None:
    """A call to a worker, past the router."""
    answer = call(worker + path, body)
    assert answer.status == 200, answer.content
