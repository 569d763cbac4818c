"""What a workflow author writes: a loop over text. And what an RL user makes of the texts afterwards.

The loop knows nothing of tokens. `output_ids`, which a worker's reply carries anyway, are put aside, to compare what is
retrieved in the end with what was sampled: the router's own word for it would be no proof.
"""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any
from urllib.parse import urlsplit

QUESTIONS = (
    "How long is the Han, and which cities does it flow through?",
    "What is 17 * 23, and is the result a prime number?",
    "How much flour goes into a cake for twelve people?",
    "Which train from Berlin to Munich arrives before noon?",
    "Wie hoch ist die Zugspitze, und wie hoch ist der Fuji?",
    "What time is it in Seoul (서울) when it is noon in Berlin?",
    "Which files in the folder are older than a year?",
    "Translate 'good morning' into Chinese, please. 谢谢",
)
OBSERVATIONS = (
    "494 km; Chuncheon, Seoul.",
    "391",
    "no results",
    "file not found: notes.txt",
    "10:04, platform 3, on time",
    "2,962 m (Zugspitze), 3,776 m (Fuji)",
    "早上好 (zǎoshang hǎo)",
    "ok",
)
SAMPLING = {"max_new_tokens": 96, "temperature": 1.0, "stop": ["Observation:"]}


class CallError(RuntimeError):
    """The router answered with an error; the message has it."""


@dataclass
class Conversation:
    """One of the group.

    Attributes:
        text: all of it so far, as its author sees it.
        replies: what came of every turn, as text.
        sampled: and as `output_ids`, as the worker sent them.
        prompt_tokens: how many tokens were sent to workers, all turns together.
        reused_tokens: how many of these were known already and not encoded again.
        trajectory: the answer of `/retrieve_from_text`, at the end.
        names: the request id of every reply.
    """

    text: str
    replies: list[str] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    trajectory: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether what was retrieved is what was sampled, turn by turn, with a logprob and a version for each token.

        Of a reply that ran into a stop string nobody has read the end, and if it did so at once nobody has read any of it.
        Unless it is the last one, those tokens are missing, and no other ones may be.
        """
        tokens, mask = self.trajectory["tokens"], self.trajectory["loss_mask"]
        runs = [[token for _, token in run] for is_sampled, run in _runs(mask, tokens) if is_sampled]
        last = len(self.replies) - 1
        read = [
            ids for turn, (ids, text) in enumerate(zip(self.sampled, self.replies, strict=True)) if text or turn == last
        ]
        kept = len(runs) == len(read) and all(run == ids[: len(run)] for run, ids in zip(runs, read, strict=True))
        last_is_whole = kept and runs[-1] == read[-1]
        logprobs = [
            value for value, is_sampled in zip(self.trajectory["rollout_logp"], mask, strict=True) if is_sampled
        ]
        versioned = sum(run["end"] - run["start"] for run in self.trajectory["weight_versions"])
        known = all(value < 0 for value in logprobs) and versioned == len(logprobs)
        return bool(self.trajectory["exact"]) and last_is_whole and known


def _runs(mask: Sequence[int], tokens: Sequence[int]) -> Any:
    return groupby(zip(mask, tokens, strict=True), key=lambda pair: pair[0] == 1)


def play(url: str, number: int, turns: int, tell: Callable[[], None]) -> Conversation:
    """A conversation of so many turns, and its trajectory. Calls `tell` after each turn. Raises CallError."""
    rng = random.Random(number)
    question = QUESTIONS[number % len(QUESTIONS)]
    talk = Conversation(f"Answer the question. You may search and calculate.\nQuestion: {question}\n")
    for turn in range(turns):
        if turn:
            talk.text += f"\nObservation: {rng.choice(OBSERVATIONS)}\n"
        sampling = {**SAMPLING, "sampling_seed": 1000 * number + turn}  # the same for everybody who runs it
        parent = {"x-radix-parent": talk.names[-1]} if talk.names else {}
        headers, reply = call(url, "/generate", {"text": talk.text, "sampling_params": sampling}, parent)
        talk.text += reply["text"]
        talk.replies.append(reply["text"])
        talk.sampled.append(reply["output_ids"])
        talk.names.append(reply["meta_info"]["id"])
        talk.prompt_tokens += int(headers["x-radix-prompt-tokens"])
        talk.reused_tokens += int(headers["x-radix-reused-tokens"])
        tell()
    asked = {"text": talk.text, "request_id": talk.names[-1], "expect_request_ids": talk.names}
    _, talk.trajectory = call(url, "/retrieve_from_text", asked)
    return talk


def call(
    url: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[dict[str, str], dict[str, Any]]:
    """POST JSON. The reply's headers and its JSON. Raises CallError."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **(headers or {})})
        response = connection.getresponse()
        content = response.read()
        if not 200 <= response.status < 300:
            raise CallError(f"{path}: {response.status} {content.decode(errors='replace')[:500]}")
        return {name.lower(): value for name, value in response.getheaders()}, json.loads(content)
    finally:
        connection.close()
