"""The loop of a rollout whose state is text: say, act, append, until it is over or the budget is used up."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from middleware_hub.client.asynchronous import AsyncConversation
from middleware_hub.client.conversation import Transcript
from middleware_hub.client.wire import Reply

Act = Callable[[str, Any], "str | Awaitable[str | None] | None"]
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
        count: returns the tokens of an observation, for the budget only.
    """

    act: Act
    max_turns: int = 8
    tidy: Callable[[str], str] | None = None
    resume: bool = False
    count: Callable[[str], int] | None = None


@dataclass
class Progress:
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
    def of(cls, state: Mapping[str, Any]) -> Progress:
        """Return the rollout from which `state` was made."""
        return cls(**{**state, "transcript": Transcript.of(state["transcript"])})


async def talk(
    conversation: AsyncConversation, rules: Rules, at: Progress, sample: Any, heard: Callable[[Reply], None]
) -> Progress:
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
        at.used += rules.count(observation) if rules.count is not None else 0
        if rules.tidy is not None:
            transcript = conversation.transcript
            transcript.text = transcript.text[: transcript.begin] + rules.tidy(said)
        conversation.append(observation)
    return at
