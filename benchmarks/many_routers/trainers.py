"""The trainers: they claim what clients sampled as text, and acknowledge it, give it back, or die with it."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence

from benchmarks.many_routers.asking import GONE, Answer, Json, ask
from benchmarks.many_routers.clients import Shared
from benchmarks.many_routers.ledger import Entry
from benchmarks.many_routers.machines import TENANTS

LEASE = 3.0
SPACES = ("", "eval")


class Trained:
    """What trainers acknowledged: each reply is trained on once, with the tokens that its client was told of."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._times: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, sample: Json) -> None:
        """Note a sample that was acknowledged."""
        known = {one.rid: one for one in list(self._shared.ledger.entries) if one.rid}
        for found in sample["trajectories"]:
            for turn in found["turns"]:
                part = slice(turn["start"], turn["end"])
                if not any(found["loss_mask"][part]):
                    continue  # it is trained on in another sequence
                with self._lock:
                    self._times[turn["request_id"]] += 1
                entry = known.get(turn["request_id"])
                if entry is not None and entry.outcome == "answered":
                    self._compare(entry, found, part)

    def _compare(self, entry: Entry, found: Json, part: slice) -> None:
        if found["tokens"][: part.start] != entry.sent or found["tokens"][part] != entry.sampled:
            self._shared.ledger.accuse("wrong", "a trainer got other tokens", entry)
        elif found["rollout_logp"] is None or found["rollout_logp"][part] != entry.logprobs:
            self._shared.ledger.accuse("wrong", "a trainer got other logprobs", entry)

    def check(self, entries: Sequence[Entry]) -> Counter[str]:
        """Accuse what was not trained on once.

        A reply that was told unsaved may come to the store after its conversation was handed out: nobody rewards it then.
        """
        counts: Counter[str] = Counter()
        for one in entries:
            times = self._times[one.rid]
            if times > 1:
                self._shared.ledger.accuse("doubled", f"trainers acknowledged it {times} times", one)
            elif times == 1:
                counts["trained on once"] += 1
            elif one.line not in self._shared.rewarded:
                counts["not for trainers: its conversation has no reward"] += 1
            elif one.saved:
                self._shared.ledger.accuse("lost", "no trainer acknowledged it", one)
            else:
                counts["not for trainers: told unsaved"] += 1
        return counts


class Trainer:
    """One trainer of one tenant, in a thread of its own."""

    def __init__(self, shared: Shared, trained: Trained, number: int, seed: int, url: str | None = None) -> None:
        self._shared, self._trained, self._url = shared, trained, url or shared.url
        self._dice = random.Random(f"trainer {seed} {number}")
        self._key = TENANTS[sorted(TENANTS)[number % len(TENANTS)]]

    def run(self) -> None:
        """Claim until it is time to stop."""
        stopping = self._shared.stopping
        while not stopping.wait(self._dice.uniform(0.1, 0.5)):
            space = self._dice.choice(SPACES)
            claim = self._asked("claim", space, {"limit": 8, "lease_seconds": LEASE, "return_logp": True})
            if claim is None or claim.status != 200 or claim.body["claim_id"] is None:
                continue
            stopping.wait(self._dice.uniform(0, 0.5))
            ends = self._dice.choice(("ack", "ack", "ack", "release", "dies"))
            self._shared.ledger.count(f"claims: {ends}")
            if ends == "ack":
                self._acknowledge(claim.body, space)
            elif ends == "release":
                self._asked("release", space, {"claim_id": claim.body["claim_id"]})

    def rest(self) -> None:
        """Claim and acknowledge all that is left, and what other claims hold until their leases are over."""
        for space in SPACES:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                body = {"groups": 64, "lease_seconds": 60, "return_logp": True}
                claim = self._asked("claim", space, body)
                if claim is not None and claim.status == 200:
                    if claim.body["claim_id"] is not None:
                        self._acknowledge(claim.body, space)
                        continue
                    if not claim.body["waiting"]["claimed_samples"]:
                        break
                time.sleep(0.2)

    def _acknowledge(self, claim: Json, space: str) -> None:
        """Acknowledge until that is answered: it may be sent twice."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            answer = self._asked("ack", space, {"claim_id": claim["claim_id"]})
            if answer is None or answer.status in (502, 503, 504):
                time.sleep(0.05)
                continue
            taken = set(answer.body["error"]["taken"]) if answer.status == 409 else set()
            self._shared.ledger.count("samples that another trainer has by now", by=len(taken))
            if answer.status not in (200, 409):
                self._shared.ledger.accuse("wrong", f"an ack is answered {answer.status}: {str(answer.body)[:160]}")
                return
            for sample in claim["samples"]:
                if sample["id"] not in taken:
                    self._trained.take(sample)
            return

    def _asked(self, call: str, space: str, body: Json) -> Answer | None:
        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        headers |= {"x-radix-namespace": space} if space else {}
        try:
            return ask(f"{self._url}/trajectories/{call}", body, headers)
        except GONE:
            return None
