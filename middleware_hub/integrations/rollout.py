"""What rollouts of all trainers have in common: the loop of one whose state is text, groups, and the clients of routers.

The loop says, acts and appends, until it is over or the budget is used up.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Final

from middleware_hub.client import operations
from middleware_hub.client.asynchronous import AsyncClient, AsyncConversation, AsyncSession
from middleware_hub.client.conversation import Transcript
from middleware_hub.client.errors import RefusedError
from middleware_hub.client.images import Image
from middleware_hub.client.operations import SessionOptions, check_options
from middleware_hub.client.wire import Reply, Retries

Observation = str | tuple[str, Sequence[Image]]
"""A text; or a text and the images of its placeholders, in order."""
Act = Callable[[str, Any], "Observation | Awaitable[Observation | None] | None"]
"""Your environment: takes the model's whole turn and the sample; returns the observation, or None at the end."""


@dataclass(frozen=True)
class Rules:
    """The settings of a rollout.

    Attributes:
        act: the environment.
        max_turns: turns of the model.
        tidy: returns what the history keeps of each turn (`str.strip`, a parser that prints again); None keeps the whole turn.
            With `tidy` the sampled tokens are spread over several sequences, and all of them are fetched.
        resume: whether an aborted turn goes on at once, instead of ending the rollout.
        count: returns the tokens of an observation, for the budget only. An image counts when its turn is answered.
    """

    act: Act
    max_turns: int = 8
    tidy: Callable[[str], str] | None = None
    resume: bool = False
    count: Callable[[str], int] | None = None


@dataclass
class RolloutProgress:
    """How far a rollout is. It can be saved with the sample when it is aborted, and resumed later.

    Attributes:
        transcript: the text and the replies.
        turns: the model's finished turns.
        first_prompt: tokens of the first prompt; 0 before the first reply.
        used: tokens after the first prompt.
        finish: `stop`, `length` or `abort`.
        rollout: its own name.
    """

    transcript: Transcript
    turns: int = 0
    first_prompt: int = 0
    used: int = 0
    finish: str = "abort"
    rollout: str = field(default_factory=lambda: uuid.uuid4().hex)

    def state(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**vars(self), "transcript": self.transcript.state()}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> RolloutProgress:
        """Return the rollout from which `state` was made."""
        return cls(**{**state, "transcript": Transcript.of(state["transcript"])})


async def talk(
    conversation: AsyncConversation, rules: Rules, at: RolloutProgress, sample: Any, heard: Callable[[Reply], None]
) -> RolloutProgress:
    """Continue until the rollout is over. `heard` gets each reply. `max_new_tokens` counts for the whole response."""
    limit = conversation.sampling_params.get("max_new_tokens")
    while at.turns < rules.max_turns:
        left = {} if limit is None else {"max_new_tokens": limit - at.used}
        if limit is not None and left["max_new_tokens"] <= 0:
            at.finish = "length"
            break
        reply = await conversation.say(left)
        heard(reply)
        if reply.output_ids:
            at.first_prompt = at.first_prompt or reply.prompt_tokens
            at.used = reply.prompt_tokens + reply.completion_tokens - at.first_prompt
        at.finish = reply.finish
        if at.finish == "abort" and rules.resume:
            continue  # a paused worker answers when it is resumed
        if at.finish != "stop":
            break
        at.turns += 1
        said = conversation.transcript.turn
        found = rules.act(said, sample)
        observation = await found if inspect.isawaitable(found) else found
        if observation is None or at.turns == rules.max_turns:
            break  # it ends with a reply, so that the whole text is recorded
        text, images = (observation, ()) if isinstance(observation, str) else observation
        at.used += rules.count(text) if rules.count is not None else 0
        if rules.tidy is not None:
            transcript = conversation.transcript
            transcript.text = transcript.text[: transcript.begin] + rules.tidy(said)
        conversation.append(text, images)
    return at


logger = logging.getLogger(__name__)

KV_SALT: Final = os.environ.get("TITO_KV_SALT", "version") or None
"""Which requests share an engine's cache with those of rollouts (`x-kv-salt`); empty: as the router says.

The trainers use the rollout's own logprobs, so nothing may be sampled behind what older weights computed. Where an update
empties the cache in any case, as theirs do by default, that costs nothing.
"""


@dataclass(frozen=True)
class RolloutGroup:
    """The group of a prompt's samples, for trainers elsewhere that claim it (docs/http-api/claims.md).

    Only on demand: the trainers' own loops hold their groups themselves, and an unclaimed group stays in memory.

    Attributes:
        id: its name at the router; None if the router does not know it.
        size: how many samples there will be.
    """

    id: str | None = None
    size: int | None = None

    @classmethod
    def of(cls, run: str | None, number: object, size: int) -> RolloutGroup:
        """Return the group of a prompt, named by the run's name and the prompt's number. Without a run it has no name.

        Raises ValueError if the trainer gave the prompt no number.
        """
        if run is None:
            return cls()
        if number is None:
            raise ValueError("the trainer did not number the prompt's group, so `groups` cannot name it")
        return cls(f"{run}/{number}", size)

    async def end_text(self, client: AsyncClient, replies: Sequence[str], reward: object) -> None:
        """Report that a rollout is complete, with its reward if that is known already."""
        if self.id is None or not replies:
            return
        try:
            await client.reward(replies[-1], as_number(reward))
        except RefusedError as error:  # the trainer still has its sample
            logger.warning("a rollout of group %r is not complete for those who claim it: %s", self.id, error)


def as_number(reward: object) -> float | None:
    """Return a reward as a float, also one of numpy's; None if it is no number, or not finite."""
    return float(reward) if isinstance(reward, Real) and math.isfinite(reward) else None


async def result_of(work: object) -> Mapping[str, Any]:
    """Wait for an agent's work, and return its dictionary; empty for None.

    Raises what the agent raises, TypeError for a result of another type, and RuntimeError in place of `sys.exit`: an agent that
    ends its program must not end the trainer's.
    """
    try:
        found = await work if inspect.isawaitable(work) else work
    except SystemExit as error:
        raise RuntimeError(f"the agent ended its program: sys.exit({error.code!r})") from error
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise TypeError(f"an agent returns a dictionary, with its `reward`, and not {found!r:.100}")
    return found


def check_session_options(options: Mapping[str, Any]) -> None:
    """Raise TypeError for an unknown option, and for one that is the plug's own: it would have no effect, or a wrong one."""
    check_options(options, SessionOptions)
    for name in ("session_id", "sampling_params", "pin", "group_id", "group_size"):
        if name in options:
            raise TypeError(f"`{name}` cannot be given here: it is that of each rollout")


_CLIENTS: dict[tuple[str, str | None], AsyncClient] = {}
EVALUATION = "evaluation"
"""The namespace of evaluations, which training never continues."""
PATIENT = Retries(attempts=40, first=0.5, longest=10.0, resample=True)
"""Retries for as long as the trainers' own functions: a router may be restarted in the middle of a step."""


def client_for(url: str, *, evaluation: bool) -> AsyncClient:
    """Return the client of a router. Evaluations have a separate namespace, so that training never continues them."""
    key = url, EVALUATION if evaluation else None
    if key not in _CLIENTS:
        _CLIENTS[key] = AsyncClient(url.split(","), namespace=key[1], retries=PATIENT)
    return _CLIENTS[key]


async def named_session(client: AsyncClient, options: SessionOptions) -> AsyncSession:
    """Make a session, or return the one of this name: then an answer was lost before, if the name is the caller's own.

    So the call is repeated where a router is away for a while.
    """
    call = operations.create_session(options).call
    await client.run(operations.plain(replace(call, again=True, accepts=frozenset({201, 409}))))
    url = f"{client.url}/sessions/{options['session_id']}"
    names = {"session_id": options["session_id"], "base_url": f"{url}/v1", "anthropic_base_url": url}
    return AsyncSession(client, names)


async def close_clients() -> None:
    """Close the connections of the running loop. Otherwise they end with the trainer's process."""
    for client in _CLIENTS.values():
        await client.close()
