"""A rollout as a workflow author writes it, as a loop over text; and the trajectory that a trainer makes of the text.

The loop uses no tokens. It only keeps the `output_ids` of every reply, to compare the retrieved tokens with those that the
worker sampled: the router's own report would prove nothing.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, cycle, groupby, islice
from typing import Any
from urllib.parse import urlsplit

INSTRUCTION = "Answer the question. You may search and calculate."
TASKS = (
    (
        ("Question: Who wrote more plays, Shakespeare or Molière?\nThought:", 258),
        ("Action:", 22),
        ("Observation: About 37 plays are by Shakespeare, some of them with others.\nThought:", 1803),
        ("Action:", 78),
        ("Observation: Molière wrote about 31 plays, among them comedies with music.\nAnswer:", 9192),
    ),
    (
        ("Question: What is the capital of the country in which the river Han meets the sea?\nAction:", 3),
        ("Observation: The Han (한강) flows through Seoul. Another Han (汉江) meets the Yangtze.\nThought:", 4776),
        ("Answer:", 1057),
    ),
    (
        ('Question: Find a word that means the same as "quiet" and begins with S.\nThought:', 43570),
        ("Action:", 54),
        ("Observation: quiet (adjective): silent, still, calm, hushed, peaceful.\nThought:", 12981),
        ("Answer:", 9),
    ),
    (
        ("Question: Which of the two is longer, the Elbe or the Rhine?\nAction:", 2),
        ("Observation: The Rhine is about 1,230 km long, from the Alps to the North Sea.\nAction:", 214),
        ("Observation: The Elbe is about 1,094 km long. It passes Dresden and Hamburg.\nAnswer:", 10734),
    ),
    (
        ("Question: In which city is the oldest underground railway?\nThought:", 16644),
        ("Action:", 157),
        ("Observation: London, 1863; Budapest, 1896\nAnswer:", 36630),
    ),
    (
        ("Question: How old was the keeper in 1903, if he was born in 1871?\nAction:", 3038),
        ("Observation: 32\nThought:", 27141),
        ("Answer:", 9379),
    ),
    (
        ("Question: A book has 312 pages. I read 24 pages a day. On which day am I done?\nAction:", 1471),
        ("Observation: 13.0\nAnswer:", 3760),
    ),
    (
        ("Question: Which is the longest: harbour, lighthouse, keeper or timetable?\nAction:", 44),
        ("Observation: 10\nAnswer:", 3600),
    ),
)
"""The turns of each task: the text of the workflow, and the sampling seed of the line that the model adds to it.

The model looks back three tokens, so of all this it sees only the last word and its colon. The seeds were chosen for lines
that make sense there; with most seeds they do not. A rollout that has finished one task goes on with the next.
"""
RETRY_SECONDS = 60.0
RETRY_EVERY = 0.1
SAMPLING = {"max_new_tokens": 64, "temperature": 1.0, "stop": ["\n"]}


class CallError(RuntimeError):
    """A request failed, or the router answered it with an error; the message has the details."""


@dataclass
class Rollout:
    """One conversation between a workflow and the model.

    Attributes:
        text: all of it so far, as its author sees it.
        turns: the text of the workflow and the text of the model, turn by turn.
        sampled: the `output_ids` of each reply, as the worker sent them.
        prompt_tokens: how many tokens were sent to workers, all turns together.
        reused_tokens: how many of these were known already and not encoded again.
        trajectory: the answer of `/retrieve_from_text`, at the end.
        request_ids: the request id of each reply.
        sent_again: how many requests were sent again, because the router was gone.
    """

    text: str
    turns: list[tuple[str, str]] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    trajectory: dict[str, Any] = field(default_factory=dict)
    request_ids: list[str] = field(default_factory=list)
    sent_again: int = 0

    @property
    def exact(self) -> bool:
        """Whether the trajectory has exactly the sampled tokens, turn by turn, each with a logprob and a version.

        The text never shows the end of a reply that ran into a stop string, and nothing of a reply that did so at once.
        Unless that reply is the last one, these tokens are missing from the trajectory, and no others may be.
        """
        tokens, mask = self.trajectory["tokens"], self.trajectory["loss_mask"]
        by_mask = groupby(zip(mask, tokens, strict=True), key=lambda pair: pair[0] == 1)
        runs = [[token for _, token in run] for is_sampled, run in by_mask if is_sampled]
        last = len(self.turns) - 1
        visible = [
            ids
            for turn, (ids, (_, reply)) in enumerate(zip(self.sampled, self.turns, strict=True))
            if reply or turn == last
        ]
        kept = len(runs) == len(visible) and all(run == ids[: len(run)] for run, ids in zip(runs, visible, strict=True))
        last_is_whole = kept and runs[-1] == visible[-1]
        logprobs = [
            value for value, is_sampled in zip(self.trajectory["rollout_logp"], mask, strict=True) if is_sampled
        ]
        versioned = sum(run["end"] - run["start"] for run in self.trajectory["weight_versions"])
        known = all(value <= 0 for value in logprobs) and versioned == len(logprobs)
        return bool(self.trajectory["exact"]) and last_is_whole and known

    def call(
        self, url: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> tuple[dict[str, str], dict[str, Any]]:
        """Do as `call`; if the connection breaks or is refused, try again, as clients do while a router restarts."""
        deadline = time.monotonic() + RETRY_SECONDS
        again = 0
        while True:
            try:
                return call(url, path, body, headers)
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() > deadline:
                    raise CallError(f"{path}: {error!r}, for {RETRY_SECONDS:.0f} s") from error
            self.sent_again += not again
            again += 1
            time.sleep(RETRY_EVERY)


def play(url: str, number: int, turns: int, on_turn: Callable[[], None]) -> Rollout:
    """Play one rollout and retrieve its trajectory.

    Args:
        url: the router's.
        number: which rollout: it begins with the task of this number.
        turns: how many.
        on_turn: called after each turn.

    Raises:
        CallError: a request failed.
    """
    rollout = Rollout(INSTRUCTION)
    first = number % len(TASKS)
    prompts = chain.from_iterable(cycle(TASKS[first:] + TASKS[:first]))
    for prompt, seed in islice(prompts, turns):
        prompt = f"\n{prompt}"
        rollout.text += prompt
        parent = {"x-radix-parent": rollout.request_ids[-1]} if rollout.request_ids else {}
        body = {"text": rollout.text, "sampling_params": {**SAMPLING, "sampling_seed": seed}}
        headers, reply = rollout.call(url, "/generate", body, parent)
        rollout.text += reply["text"]
        rollout.turns.append((prompt, reply["text"]))
        rollout.sampled.append(reply["output_ids"])
        rollout.request_ids.append(reply["meta_info"]["id"])
        rollout.prompt_tokens += int(headers["x-radix-prompt-tokens"])
        rollout.reused_tokens += int(headers["x-radix-reused-tokens"])
        on_turn()
    names = rollout.request_ids
    body = {"text": rollout.text, "request_id": names[-1], "expect_request_ids": names}
    _, rollout.trajectory = rollout.call(url, "/retrieve_from_text", body)
    return rollout


def call(
    url: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> tuple[dict[str, str], dict[str, Any]]:
    """POST JSON; return the headers of the reply, with names in lower case, and its JSON.

    Raises:
        CallError: the status is not a success.
    """
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
