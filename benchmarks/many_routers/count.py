"""The count: asks a router that has seen nothing for everything that clients were told."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.many_routers.clients import Truth
from benchmarks.many_routers.ledger import TOLD_LOSSES, Entry, Ledger
from benchmarks.many_routers.machines import TENANTS
from benchmarks.many_routers.trainers import Trained
from middleware_hub.spans.chain import STORE_UNREACHABLE
from middleware_hub.store.opening import open_store
from middleware_hub.store.protocol import Store
from tests.support.client import call

AT_ONCE = 32
PATIENCE = 10.0
"""Seconds during which the count asks again, if an answer says that the store could not be asked."""
Json = dict[str, Any]


class Count:
    """Looks for each answer at one router, and in the store itself; what differs from the answer goes into the ledger."""

    def __init__(self, url: str, ledger: Ledger, truth: Truth, trained: Trained) -> None:
        self._url, self._ledger, self._truth, self._trained = url, ledger, truth, trained
        self._entries = {entry.rid: entry for entry in ledger.entries if entry.rid}
        self._finalized = False  # of the session that is looked at
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        """Count everything."""
        answered = [one for one in self._ledger.entries if one.outcome == "answered" and one.sampled]
        texts = [one for one in answered if one.kind not in ("openai", "anthropic", "chat")]
        turns = [one for one in answered if one.kind in ("openai", "anthropic")]
        self.counts["answered"] = len(answered)
        self.counts["answered to pictures"] = sum(bool(one.images) for one in answered)
        self.counts["told unsaved"] = sum(not one.saved for one in answered)
        chains = self._truth.chains()
        for one in texts:
            if (tuple(one.sent), one.images, tuple(one.sampled), tuple(one.logprobs)) not in chains:
                self._ledger.accuse("wrong", "no worker has sampled this", one)
        for key in sorted({(one.tenant, one.space) for one in texts}):
            self._retrieve([one for one in texts if (one.tenant, one.space) == key], *key)
        self.counts += self._trained.check(texts)
        self._others(texts)
        self._sessions(turns)
        self._chats([one for one in answered if one.kind == "chat"])

    def _missing(self, entry: Entry, words: str) -> None:
        """Note a missing reply; replies that were reported as unsaved count apart."""
        self._ledger.accuse("lost" if entry.saved else "lost, told unsaved", words, entry)

    # Text ------------------------------------------------------------------------------------------------------------

    def _post(self, path: str, body: Json, tenant: str, space: str = "") -> Any:
        headers = {"authorization": f"Bearer {TENANTS[tenant]}", **({"x-radix-namespace": space} if space else {})}
        answer = call(self._url + path, body, headers=headers)
        return answer.json() if answer.status == 200 else (answer.status, answer.content[:200])

    def _retrieve(self, entries: Sequence[Entry], tenant: str, space: str) -> None:
        for some in _pieces(entries):
            found = self._post("/retrieve_from_text", _asked(some), tenant, space)
            for one, got in zip(some, found, strict=True):
                self._compare(one, self._asked_again(one, got, tenant, space))

    def _asked_again(self, entry: Entry, found: Json, tenant: str, space: str) -> Json:
        """Ask again if the store could not be asked this time: the answer says so, and may be another one later.

        A reply whose answer always says so was sampled while the store was away, and its client was told.
        """
        deadline = time.monotonic() + PATIENCE
        while STORE_UNREACHABLE in set(found["reasons"]) - entry.reasons and time.monotonic() < deadline:
            self.counts["asked again"] += 1
            time.sleep(0.5)
            (found,) = self._post("/retrieve_from_text", _asked([entry]), tenant, space)
        return found

    def _compare(self, entry: Entry, found: Json) -> None:
        names = [turn["request_id"] for turn in found["turns"]]
        turns = [self._entries[name] for name in names if name in self._entries]
        if strangers := [one.rid for one in turns if one.tenant != entry.tenant]:
            self._ledger.accuse("crossed", f"its answer has turns of another tenant: {strangers}", entry)
        if entry.rid not in found["request_ids"]:
            self._missing(entry, f"{found['request_ids']} end here, exact is {found['exact']}, {found['reasons']}")
            return
        if len(found["request_ids"]) != len(set(found["request_ids"])) or names.count(entry.rid) != 1:
            self._ledger.accuse("doubled", f"it is there {found['request_ids'].count(entry.rid)} times: {names}", entry)
        count, size = len(entry.sampled), len(entry.chain)
        # It may keep the beginning of a reply beside its own line: then it has the reasons of that reply's prompt.
        beside = [one for one in turns if not entry.follows(one)]
        told = entry.reasons.union(*(TOLD_LOSSES if one.outcome != "answered" else one.reasons for one in beside))
        versions = [one for one in found["weight_versions"] if one["end"] == size]
        faults = [
            words
            for words, bad in {
                "other tokens": found["tokens"] != entry.chain,
                "another mask": found["loss_mask"][-count:] != [1] * count,
                "other logprobs": found["rollout_logp"] is None or found["rollout_logp"][-count:] != entry.logprobs,
                "another version": not versions or versions[0]["version"] != entry.version,
                "other images": [one["digest"] for one in _images(found)] != list(entry.images),
                "not exact": not found["exact"] and not (told and set(found["reasons"]) & told),
            }.items()
            if bad
        ]
        if faults:
            self._ledger.accuse("wrong", f"{', '.join(faults)}; exact is {found['exact']}, {found['reasons']}", entry)
            return
        self.counts["retrieved whole"] += 1
        self.counts["retrieved whole, told unsaved"] += not entry.saved
        self.counts["not exact, as told"] += not found["exact"]

    def _others(self, texts: Sequence[Entry]) -> None:
        """Check that the other tenant, and the other namespace, know nothing of it."""
        for tenant in TENANTS:
            for space in ("", "eval"):
                foreign = [one for one in texts if (one.tenant, one.space) != (tenant, space)][-400:]
                for some in _pieces(foreign):
                    found = self._post("/retrieve_from_text", _asked(some), tenant, space)
                    if isinstance(found, tuple):  # pictures that this tenant has not sent
                        self.counts["refused to others"] += len(some)
                        continue
                    for one, got in zip(some, found, strict=True):
                        if one.rid in [turn["request_id"] for turn in got["turns"]] or one.rid in got["request_ids"]:
                            self._ledger.accuse("crossed", f"tenant {tenant}, namespace {space or '-'} gets it", one)
                        self.counts["asked by others"] += 1

    # Chats -----------------------------------------------------------------------------------------------------------

    def _chats(self, entries: Sequence[Entry]) -> None:
        """Go on with each chat without a session: its worker must get all tokens of it, and so of the turns before it."""
        inside = {one.parent for one in entries if one.parent and one.sent[: len(one.parent.chain)] == one.parent.chain}
        for one in entries:
            if one in inside or self._goes_on(one):
                self.counts["retrieved whole"] += 1
                self.counts["retrieved whole, told unsaved"] += not one.saved

    def _goes_on(self, entry: Entry) -> bool:
        said = [{"role": "assistant", "content": entry.text}, {"role": "user", "content": "And on?"}]
        body = {"model": "m", "messages": [*entry.messages, *said], "max_tokens": 1}
        headers = {"authorization": f"Bearer {TENANTS[entry.tenant]}", "x-parent-generation": entry.rid}
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = call(f"{self._url}/v1/chat/completions", body, headers=headers)
            told = {one.strip() for one in answer.headers.get("x-radix-reasons", "").split(",")}
            if answer.status == 200 and (STORE_UNREACHABLE not in told or time.monotonic() > deadline):
                break
            if time.monotonic() > deadline:
                self._missing(entry, f"its chat answers {answer.status}: {answer.content[:120]!r}")
                return False
            self.counts["asked again"] += 1
            time.sleep(0.5)
        (record,) = self._truth.of(answer.headers["x-generation-id"])
        if list(record.input_ids)[: len(entry.chain)] != entry.chain:
            self._missing(entry, f"its chat goes on without it: {told}")
            return False
        self.counts["chats that went on whole"] += 1
        return True

    # Sessions --------------------------------------------------------------------------------------------------------

    def _sessions(self, turns: Sequence[Entry]) -> None:
        by_session: defaultdict[str, list[Entry]] = defaultdict(list)
        for one in turns:
            by_session[one.line].append(one)
        for name, entries in by_session.items():
            self._session(name, entries)
        self.counts["sessions"] = len(by_session)

    def _session(self, name: str, entries: list[Entry]) -> None:
        tenant = entries[0].tenant
        headers = {"authorization": f"Bearer {TENANTS[tenant]}"}
        answer = call(f"{self._url}/sessions/{name}/trajectories", headers=headers)
        if answer.status != 200:
            for one in entries:
                self._missing(one, f"its session answers {answer.status}: {answer.content[:120]!r}")
            return
        other = next(key for one, key in TENANTS.items() if one != tenant)
        status = call(f"{self._url}/sessions/{name}", headers={"authorization": f"Bearer {other}"}).status
        if status != 404:
            self._ledger.accuse("crossed", f"another tenant gets {status} for its session", entries[0])
        summary = call(f"{self._url}/sessions/{name}", headers=headers).json()
        self._finalized = summary["phase"].lower() == "finalized"
        trajectories = answer.json()["trajectories"]
        for entry in entries:
            self._turn(entry, trajectories)

    def _turn(self, entry: Entry, trajectories: list[Json]) -> None:
        places = [(one, turn) for one in trajectories for turn in one["turns"] if turn["request_id"] == entry.rid]
        if not places and not entry.saved and self._finalized:
            self.counts["told unsaved, and the session was finalized before it was handed over"] += 1
            return
        if not places:
            self._missing(entry, f"it is in none of its session's {len(trajectories)} trajectories")
            return
        trained = 0
        for one, turn in places:
            if [image["digest"] for image in _images(one)][: len(entry.images)] != list(entry.images):
                self._ledger.accuse("wrong", "other images", entry)
                return
            part = slice(turn["start"], turn["end"])
            before = [*one["prompt_ids"], *one["response_ids"][: turn["start"]]]
            if one["response_ids"][part] != entry.sampled or before != entry.sent:
                self._ledger.accuse("wrong", "other tokens", entry)
                return
            if one["response_logprobs"][part] != entry.logprobs:
                self._ledger.accuse("wrong", "other logprobs", entry)
                return
            trained += all(one["response_mask"][part])
        if trained != 1:
            self._ledger.accuse("doubled", f"its tokens are to be trained in {trained} trajectories", entry)
            return
        self.counts["retrieved whole"] += 1
        self.counts["retrieved whole, told unsaved"] += not entry.saved


def check_store(url: str, ledger: Ledger, truth: Truth) -> Counter[str]:
    """Read the whole store: each reply is there once and was sampled by a worker, and `verify` finds nothing."""
    sampled = {ids for _, _, ids, _ in truth.chains()}
    beginnings: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
    for ids in sampled:
        beginnings[ids[0] if ids else -1].append(ids)
    counts: Counter[str] = Counter()

    async def read(store: Store) -> None:
        names: Counter[tuple[str, ...]] = Counter()
        async for record in store.scan():
            counts["records"] += 1
            if not record.sampled:
                continue
            names.update((record.namespace[0], name) for name in record.request_ids)
            ids = tuple(memoryview(record.ids).cast("i"))
            # If the client left, the router may have received only the beginning of the reply.
            if ids not in sampled and not any(one[: len(ids)] == ids for one in beginnings[ids[0]]):
                ledger.accuse("wrong", f"the store has a reply that no worker gave: {record.request_ids}")
        counts["replies"] = len(names)
        for name, times in names.items():
            if times > 1:
                about = next((one for one in ledger.entries if one.rid == name[1]), None)
                ledger.accuse("doubled", f"the store has {name} {times} times", about)
        async for finding in store.verify():
            if finding.kind != "file":
                ledger.accuse("wrong", f"verify: {finding.kind} {finding.message}")

    async def opened() -> None:
        store = open_store(url)
        await store.open(None)
        try:
            await read(store)
        finally:
            await store.close()

    asyncio.run(opened())
    return counts


def _asked(entries: Sequence[Entry]) -> Json:
    """Return the body of a retrieval of some texts: clients name their pictures."""
    body: Json = {"text": [one.whole for one in entries], "return_logp": True}
    return body | ({"image_data": [list(one.images) for one in entries]} if any(one.images for one in entries) else {})


def _images(found: Json) -> list[Json]:
    told = found.get("multi_modal_data")
    return [] if told is None else list(told["images"])


def _pieces(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    for at in range(0, len(entries), AT_ONCE):
        yield entries[at : at + AT_ONCE]
