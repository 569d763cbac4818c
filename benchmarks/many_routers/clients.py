"""The clients: conversations as text and in sessions, each turn sent to the router that the balancer chooses."""

from __future__ import annotations

import contextlib
import random
import threading
import uuid
from dataclasses import dataclass, field

from benchmarks.many_routers.asking import GONE, Answer, Json, ask
from benchmarks.many_routers.ledger import TOLD_LOSSES, Entry, Kind, Ledger
from benchmarks.many_routers.machines import TENANTS
from tests.support.pictures import data_url, digest, picture
from worker.engine.records import GenerationRecord
from worker.worker import EmbeddedWorker

TURNS = (3, 9)
OPENINGS = 12
"""The number of prompts with which both tenants begin all of their conversations."""
PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
PICTURES = {digest(one): one for one in (picture(30 + 10 * seed, 40, seed) for seed in range(8))}
"""All pictures, which the tenants share, by their digests."""
Chain = tuple[tuple[int, ...], tuple[str, ...], tuple[int, ...], tuple[float, ...]]
"""A prompt's ids and pictures, and a reply's ids and logprobs."""


class Truth:
    """What the workers sampled, by the id that the router gave each generation."""

    def __init__(self, workers: list[EmbeddedWorker]) -> None:
        self._logs = [worker.log for worker in workers]
        self._read = [0] * len(workers)
        self._found: dict[str, list[GenerationRecord]] = {}
        self._lock = threading.Lock()

    def of(self, rid: str) -> list[GenerationRecord]:
        """Return the records of a generation, in any order."""
        with self._lock:
            for at, log in enumerate(self._logs):
                new = log[self._read[at] :]
                self._read[at] += len(new)
                for record in new:
                    self._found.setdefault(record.rid[:32], []).append(record)
            return self._found.get(rid, [])

    def chains(self) -> set[Chain]:
        """Return everything that was sampled."""
        return {
            (tuple(one.input_ids), tuple(one.images), tuple(one.output_ids), tuple(one.logprobs))
            for log in self._logs
            for one in list(log)
        }


@dataclass
class Shared:
    """What all clients share. `rewarded`: the conversations that are complete, so that trainers get them."""

    url: str
    ledger: Ledger
    truth: Truth
    images: bool = False
    rewarded: set[str] = field(default_factory=set)
    stopping: threading.Event = field(default_factory=threading.Event)


class Client:
    """One client, of one tenant, in a thread of its own."""

    def __init__(self, shared: Shared, number: int, seed: int) -> None:
        self.shared, self.ledger = shared, shared.ledger
        self.dice = random.Random(f"{seed} {number}")
        self.tenant = sorted(TENANTS)[number % len(TENANTS)]
        self.headers = {"authorization": f"Bearer {TENANTS[self.tenant]}", "content-type": "application/json"}

    def run(self) -> None:
        """Have conversations until it is time to stop."""
        while not self.shared.stopping.is_set():
            self.dice.choice((self.talk, self.talk, self.session, self.chat))()

    def ask(self, path: str, body: Json, headers: dict[str, str] | None = None, leaves: float | None = None) -> Answer:
        """Ask the balancer, see `asking.ask`."""
        return ask(self.shared.url + path, body, {**self.headers, **(headers or {})}, leaves)

    # Text ------------------------------------------------------------------------------------------------------------

    def talk(self) -> None:
        """Play a conversation as text, with forks back to earlier replies."""
        dice = self.dice
        line, space = uuid.UUID(int=dice.getrandbits(128)).hex, dice.choice(("", "", "eval"))
        said: list[Entry] = []
        for _ in range(dice.randint(*TURNS)):
            if self.shared.stopping.is_set():
                return
            parent = None if not said else said[-1] if dice.random() < 0.85 else dice.choice(said)
            if parent is None:
                text = "<|im_start|>system\nYou are one of many agents, and you remember everything.<|im_end|>\n" * 4
                text += (
                    f"<|im_start|>user\nQuestion {dice.randrange(OPENINGS)}: 你好?<|im_end|>\n<|im_start|>assistant\n"
                )
            else:
                text = parent.whole + dice.choice(
                    (
                        "<|im_end|>\n<|im_start|>user\nAnd on, naïve.<|im_end|>\n<|im_start|>assistant\n",
                        " And then: ",
                        "\n",
                    )
                )
            shown = self.shown()
            text += "".join(f"{PLACEHOLDER}\n" for _ in shown)
            said += self.turn(line, space, parent, text, ((parent.images if parent is not None else ()) + shown))
            self.shared.stopping.wait(dice.uniform(0, 0.05))
        self._reward(line, space)

    def _reward(self, line: str, space: str) -> None:
        """Say that a conversation is complete: trainers may have it, as a group of its own."""
        body = {"group_id": line, "rollout_id": line, "reward": self.dice.random()}
        for _ in range(40):
            with contextlib.suppress(*GONE):
                answer = self.ask("/trajectories/reward", body, {"x-radix-namespace": space} if space else {})
                if answer.status not in (502, 503, 504):
                    self.ledger.count(f"rewards {answer.status}")
                    if answer.status == 200:
                        self.shared.rewarded.add(line)
                    return
            if self.shared.stopping.wait(0.1):
                return

    def shown(self) -> tuple[str, ...]:
        """Return the digests of the pictures that a turn shows: three of eight show some."""
        if not self.shared.images or self.dice.random() > 3 / 8:
            return ()
        return tuple(self.dice.choices(sorted(PICTURES), k=self.dice.randint(1, 2)))

    def turn(self, line: str, space: str, parent: Entry | None, text: str, images: tuple[str, ...] = ()) -> list[Entry]:
        """Send a request until it is answered, and return the replies."""
        dice = self.dice
        kind: Kind = dice.choice(("plain", "plain", "stream", "stream", "n", "batch"))
        named = parent is not None and dice.random() < 0.7
        for _ in range(40):
            if self.shared.stopping.is_set():
                break
            count = {"n": 3, "batch": 3}.get(kind, 1)
            entries = [
                self.ledger.begin(
                    Entry(
                        *(kind, self.tenant, space, line, self.ledger.now(), parent, uuid.uuid4().hex),
                        prompt=text,
                        images=images,
                    )
                )
                for _ in range(count)
            ]
            body: Json = {
                "text": text,
                "rid": entries[0].rid,
                "return_logprob": True,
                "return_prompt_token_ids": True,
                "sampling_params": {"max_new_tokens": dice.randint(4, 40)},
            }
            if kind == "stream":
                body["stream"] = True
            elif kind == "n":
                body["sampling_params"]["n"] = 3
                del body["rid"]
            elif kind == "batch":
                body["text"], body["rid"] = [text] * 3, [one.rid for one in entries]
            if images:
                given = [self.given(name, parent) for name in images]
                body["image_data"] = [given] * 3 if kind == "batch" else given
            headers = {"x-abort-policy": dice.choice(("retry", "return"))}
            headers |= {"x-group-id": line, "x-group-size": "1", "x-rollout-id": line}
            if space:
                headers["x-radix-namespace"] = space
            if named and parent is not None:
                headers["x-radix-parent"] = parent.rid
            if found := self.asked(entries, body, headers):
                return found
            self.shared.stopping.wait(0.05)
        return []

    def asked(self, entries: list[Entry], body: Json, headers: dict[str, str]) -> list[Entry]:
        """Send one request; return the entries that were answered."""
        dice, kind = self.dice, entries[0].kind
        leaves = dice.uniform(0.0, 0.08) if dice.random() < 0.06 else None
        aborts = kind in ("plain", "stream") and leaves is None and dice.random() < 0.1
        helper = None
        if aborts:
            helper = threading.Timer(dice.uniform(0.01, 0.06), self._abort, (body["rid"],))
            helper.start()
        try:
            answer = self.ask("/generate", body, headers, leaves=leaves)
        except GONE as error:
            outcome = "left" if leaves is not None and isinstance(error, TimeoutError) else "unanswered"
            for entry in entries:
                self.ledger.end(entry, outcome, type(error).__name__)  # type: ignore[arg-type]
            return []
        finally:
            if helper is not None:
                helper.join()
        if answer.status != 200:
            self._refused(entries, answer)
            return []
        replies = answer.body if isinstance(answer.body, list) else [answer.body]
        for entry, reply in zip(entries, replies, strict=True):
            self._hear(entry, reply, answer)
        return [one for one in entries if one.sampled]

    def _hear(self, entry: Entry, reply: Json, answer: Answer) -> None:
        meta = reply["meta_info"]
        if entry.kind != "n" and meta["id"] != entry.rid:
            self.ledger.accuse("wrong", f"asked {entry.rid}, and {meta['id']} was answered", entry)
        entry.rid, entry.text, entry.version = meta["id"], reply["text"], meta.get("weight_version", "")
        entry.finish = (meta.get("finish_reason") or {}).get("type", "")
        entry.sent, entry.sampled = reply.get("prompt_token_ids") or [], reply["output_ids"]  # none of what was queued
        entry.logprobs = [one[0] for one in meta["output_token_logprobs"]]
        self._told(entry, answer)
        self.ledger.end(entry, "answered")
        self.ledger.count(f"finished by {entry.finish}")
        self.check_beginning(entry)

    def _told(self, entry: Entry, answer: Answer) -> None:
        headers = answer.headers
        entry.router = headers.get("x-served-by", "")
        entry.recorded = headers.get("x-radix-recorded", "")
        entry.saved = not answer.told_unsaved and (entry.kind == "stream" or headers.get("x-radix-saved") != "no")
        told = frozenset(headers.get("x-radix-reasons", "").replace(",", " ").split()) & TOLD_LOSSES
        entry.reasons = told | (entry.parent.reasons if entry.parent is not None else frozenset())

    def given(self, name: str, parent: Entry | None) -> str:
        """Return a picture as a request gives it: its bytes, or often the digest of one that the turn before showed."""
        if parent is not None and name in parent.images and self.dice.random() < 0.7:
            return name
        return data_url(PICTURES[name])

    def check_beginning(self, entry: Entry) -> None:
        """Check that a turn begins with all tokens of the turns before it, unless a client was told of a loss."""
        parent = entry.parent
        if parent is None or not entry.sent or entry.sent[: len(parent.chain)] == parent.chain:
            return
        if entry.reasons:
            self.ledger.count("turns encoded without what they were told is not known")
        elif not parent.saved:
            self.ledger.count("turns encoded again behind a reply that was not saved")
            entry.reasons |= {"behind unsaved"}
        else:
            self.ledger.accuse("wrong", "its prompt does not begin with the tokens of the turn before it", entry)

    def _refused(self, entries: list[Entry], answer: Answer) -> None:
        for entry in entries:
            entry.router = answer.headers.get("x-served-by", "")
            self.ledger.end(entry, "refused", f"{answer.status} {str(answer.body)[:160]}")
        if answer.status == 400 and "media_unknown" in str(answer.body) and _was_unsaved(entries[0].parent):
            self.ledger.count("pictures to be sent again, as that reply was not saved")
        elif answer.status not in (502, 503, 504):
            self.ledger.accuse("wrong", f"refused with {answer.status}: {str(answer.body)[:200]}", entries[0])

    def _abort(self, rid: str) -> None:
        with contextlib.suppress(*GONE):
            self.ask("/abort_request", {"rid": rid})

    # Sessions --------------------------------------------------------------------------------------------------------

    def session(self) -> None:
        """Play a session in both dialects; at its end finalize it, now and then while a turn is in flight."""
        dice = self.dice
        name = uuid.uuid4().hex
        if not self._made(name):
            return
        messages = [self.said(f"Question {dice.randrange(OPENINGS)}: 你好?")]
        parent: Entry | None = None
        for _ in range(dice.randint(*TURNS)):
            entry = self.session_turn(name, parent, messages)
            if entry is None:
                return
            messages = [*messages, {"role": "assistant", "content": entry.text}, self.said("And on?")]
            parent = entry
        if dice.random() < 0.5:
            self._finalize(name, parent, messages)

    def said(self, text: str) -> Json:
        """Return a message of the user, perhaps with pictures, as OpenAI writes it."""
        shown = [{"type": "image_url", "image_url": {"url": name}} for name in self.shown()]
        return {"role": "user", "content": [{"type": "text", "text": text}, *shown] if shown else text}

    def _made(self, name: str) -> bool:
        for _ in range(40):
            if self.shared.stopping.is_set():
                return False
            with contextlib.suppress(*GONE):
                answer = self.ask("/sessions", {"session_id": name})
                if answer.status in (201, 409):  # 409: the first answer was lost on its way
                    self.ledger.count("sessions")
                    return True
            self.shared.stopping.wait(0.1)
        return False

    def session_turn(
        self, name: str, parent: Entry | None, messages: list[Json], *, tries: int = 40, over: bool = False
    ) -> Entry | None:
        """Ask for a turn until it is answered; None if it never was. With `over` the session may be over."""
        dice = self.dice
        for _ in range(tries):
            if self.shared.stopping.is_set():
                break
            kind: Kind = dice.choice(("openai", "anthropic"))
            if any(not one["content"] for one in messages):
                kind = "openai"  # the other dialect has no empty turns
            entry = Entry(kind, self.tenant, "", name, self.ledger.now(), parent, images=tuple(_shown_in(messages)))
            self.ledger.begin(entry)
            given = {name: self.given(name, parent) for name in entry.images}
            body: Json = {"model": "m", "messages": [_written(one, given, kind) for one in messages]}
            body["max_tokens"] = dice.randint(4, 24)
            path = f"/sessions/{name}/v1/" + ("chat/completions" if kind == "openai" else "messages")
            try:
                answer = self.ask(path, body)
            except GONE as error:
                self.ledger.end(entry, "unanswered", type(error).__name__)
                continue
            if answer.status != 200:
                if over and answer.status == 409:
                    self.ledger.end(entry, "refused", "409")
                    return None
                self._refused([entry], answer)
                self.shared.stopping.wait(0.1)
                continue
            self._hear_turn(entry, answer)
            return entry
        return None

    # Chats without a session -----------------------------------------------------------------------------------------

    def chat(self) -> None:
        """Play a chat that names no session. Its messages say which it is: the template does not spell replies as they are."""
        line = uuid.uuid4().hex
        messages: list[Json] = [{"role": "user", "content": f"Question {line}: 你好?"}]
        entry: Entry | None = None
        for _ in range(self.dice.randint(*TURNS)):
            entry = self.chat_turn(line, entry, messages)
            if entry is None:
                return
            messages = [*messages, {"role": "assistant", "content": entry.text}, {"role": "user", "content": "And on?"}]

    def chat_turn(self, line: str, parent: Entry | None, messages: list[Json]) -> Entry | None:
        """Ask for a turn until it is answered; None if it never was.

        A reply that was lost on its way may read the same as the one that came after it, so the turn before is named.
        """
        headers = {} if parent is None else {"x-parent-generation": parent.rid}
        for _ in range(40):
            if self.shared.stopping.is_set():
                break
            entry = Entry("chat", self.tenant, "", line, self.ledger.now(), parent, messages=messages)
            self.ledger.begin(entry)
            body: Json = {"model": "m", "messages": messages, "max_tokens": self.dice.randint(4, 24)}
            try:
                answer = self.ask("/v1/chat/completions", body, headers)
            except GONE as error:
                self.ledger.end(entry, "unanswered", type(error).__name__)
                continue
            if answer.status == 200:
                self._hear_turn(entry, answer)
                return entry
            self._refused([entry], answer)
            self.shared.stopping.wait(0.1)
        return None

    def _hear_turn(self, entry: Entry, answer: Answer) -> None:
        body = answer.body
        entry.rid = answer.headers["x-generation-id"]
        if entry.kind in ("openai", "chat"):
            (choice,) = body["choices"]
            entry.text, entry.finish = choice["message"]["content"] or "", choice["finish_reason"]
        else:
            entry.text = "".join(part["text"] for part in body["content"] if part["type"] == "text")
            entry.finish = body["stop_reason"]
        self._told(entry, answer)
        sampled = self.shared.truth.of(entry.rid)
        if not sampled:
            self.ledger.end(entry, "answered")
            self.ledger.accuse("wrong", "no worker knows of this generation", entry)
            return
        record = sampled[-1]
        if tuple(record.images) != entry.images:
            self.ledger.accuse("wrong", f"its worker was shown {record.images}", entry)
        entry.sent, entry.sampled, entry.logprobs = record.input_ids, list(record.output_ids), list(record.logprobs)
        entry.version = record.versions[-1] if record.versions else ""
        self.ledger.end(entry, "answered")
        self.check_beginning(entry)

    def _finalize(self, name: str, parent: Entry | None, messages: list[Json]) -> None:
        """Finalize, half of the time while a turn is asked for at another router."""
        helper = None
        if self.dice.random() < 0.5:
            other = Client(self.shared, 0, self.dice.getrandbits(32))
            other.tenant, other.headers = self.tenant, self.headers
            helper = threading.Thread(
                target=other.session_turn, args=(name, parent, messages), kwargs={"tries": 1, "over": True}, daemon=True
            )
            helper.start()
            self.shared.stopping.wait(self.dice.uniform(0, 0.1))
        with contextlib.suppress(*GONE):
            answer = self.ask(f"/sessions/{name}/finalize", {})
            self.ledger.count(f"finalized {answer.status}")
        if helper is not None:
            helper.join()


def _shown_in(messages: list[Json]) -> list[str]:
    """Return the digests of the pictures in messages, in order."""
    parts = [part for one in messages if isinstance(one["content"], list) for part in one["content"]]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


def _written(message: Json, given: dict[str, str], kind: Kind) -> Json:
    """Return a message with its pictures as `given`, in a dialect."""
    if not isinstance(message["content"], list):
        return message

    def part(one: Json) -> Json:
        if one["type"] == "text":
            return one
        url = given[one["image_url"]["url"]]
        if kind != "anthropic":
            return {"type": "image_url", "image_url": {"url": url}}
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2] or url}
        return {"type": "image", "source": source}

    return {**message, "content": [part(one) for one in message["content"]]}


def _was_unsaved(entry: Entry | None) -> bool:
    """Return whether a turn, or one before it, was told not to be saved: another router may not have its pictures."""
    while entry is not None and entry.saved:
        entry = entry.parent
    return entry is not None
