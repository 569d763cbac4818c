"""The `sampling_params` of a turn: the session's, overridden by the request's, with a limit that fits."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec

from middleware_hub.chat.errors import ContextLengthError
from middleware_hub.chat.messages import ChatRequest
from middleware_hub.sessions.prompt.composed_prompt import ComposedPrompt
from middleware_hub.sessions.session import Session
from middleware_hub.sessions.turn.plan import TurnPlan
from middleware_hub.tokenizer.vocabulary import Vocabulary
from router.engines.form.request import GenerateRequest
from router.errors import BadRequestError

_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag", "structured_outputs")
"""The `sampling_params` of which only one can hold for a reply."""
REMEMBERED = 1024
"""Sets of options that were found harmless: in a conversation they are the same at every turn."""
_SHORT = 1024
"""Bytes up to which options are remembered as they are. Of longer ones (a schema, a grammar) a digest is."""


class TurnSampling:
    """Works out the `sampling_params` of turns.

    Args:
        max_context: the tokens that the model takes; None if the worker is to decide.
        stream_interval: after how many tokens a stream has an event, if the session does not say; None if the worker is to
            decide.
    """

    def __init__(self, vocabulary: Vocabulary, *, max_context: int | None, stream_interval: int | None) -> None:
        self._vocabulary = vocabulary
        self._stream_interval = stream_interval
        self._max_context = max_context
        self._checked: set[bytes] = set()

    def of(self, session: Session, plan: TurnPlan, needed: dict[str, Any]) -> dict[str, Any]:
        """Return the `sampling_params` of a turn, with those that its parsers need. Raises BadRequestError."""
        request = plan.request
        sampling = session.defaults.sampling(request.sampling)
        # A stop string that the text shows would be there twice when the turn is continued.
        sampling.pop("no_stop_trim", None)
        # All tokens, as vLLM and Hugging Face spell it; a session's are not translated before.
        if sampling.get("top_k") == 0:
            sampling["top_k"] = -1
        if "structural_tag" in needed:  # the client's own were compared when they were read
            for other in _GRAMMARS:
                if sampling.get(other):
                    raise BadRequestError(
                        f"`tool_choice` needs a grammar of calls, and the session's `{other}` gives replies another form",
                        param="tool_choice",
                    )
        sampling.update(needed)
        if self._stream_interval is not None and request.stream:
            sampling.setdefault("stream_interval", self._stream_interval)
        self._check(request, sampling)
        wanted = sampling.get("max_new_tokens")
        limit = sampling["max_new_tokens"] = self._limit(session, wanted, plan)
        least = sampling.get("min_new_tokens")
        if limit is not None and limit != wanted and isinstance(least, int) and (wanted is None or least <= wanted):
            # The client's two limits were consistent. A request must not be refused because one of them was lowered here.
            sampling["min_new_tokens"] = min(least, limit)
        return sampling

    def _check(self, request: ChatRequest, sampling: dict[str, Any]) -> None:
        """Raise BadRequestError for options outside of the workers' valid range, as `/generate` does."""
        fields = {"input_ids": [0], "sampling_params": sampling, "return_logprob": True}
        if request.top_logprobs:
            fields["top_logprobs_num"] = request.top_logprobs
        options = msgspec.json.encode({**request.extra, **fields})
        known = options if len(options) <= _SHORT else blake2b(options).digest()
        if known in self._checked:
            return
        GenerateRequest.parse(options, vocabulary=self._vocabulary.size)
        if len(self._checked) >= REMEMBERED:
            self._checked.clear()
        self._checked.add(known)

    def _limit(self, session: Session, wanted: Any, plan: TurnPlan) -> int | None:
        limits, prompt = [wanted] if isinstance(wanted, int) else [], plan.prompt
        if self._max_context is not None:
            tokens = prompt.tokens
            if plan.media is not None:
                tokens += plan.media.still_unknown(session.tenant, prompt.media)
            room = self._max_context - tokens
            if room < 1:
                raise ContextLengthError(self._max_context, tokens)
            limits.append(room)
        if session.response_budget is not None:
            limits.append(max(0, session.response_budget - _response_tokens(prompt)))
        return min(limits, default=None)


def _response_tokens(prompt: ComposedPrompt) -> int:
    """Return the number of tokens after the first prompt of a branch."""
    if prompt.checkpoint is None:
        return 0
    first = list(prompt.checkpoint.lineage())[-1]
    return prompt.tokens - first.span.offset
