"""Replies of OpenAI's `POST /v1/completions`: `text_completion`, whole and in streams.

Fields that OpenAI does not have are in the same places as in a chat's replies: `matched_stop`, and `meta_info` of a choice.

Logprobs have the older form, four lists with an entry for each sampled token: `tokens`, `token_logprobs`, `top_logprobs` (an
object that contains the token itself as well; null if no alternatives were asked for) and `text_offset`, the place of the
character in which a token begins:

    text            h e y _ 😀 !
    tokens          hey  _  bytes:\\xf0\\x9f  bytes:\\x98\\x80  !  <|im_end|>
    text_offset     0    3  4                4                5  6

A token that is not text by itself is written as its bytes, like OpenAI does, because different tokens would look the same
otherwise. Tokens of a stop string that was cut off are placed after the end of the text.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from middleware_hub.chat.answer import Answer, ReplyHead, TokenLogprob
from middleware_hub.dialects.completion import CompletionRequest
from middleware_hub.dialects.openai.replies import UNLIKELY, ending, token_name, usage

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


class LegacyLogprobs:
    """Makes the four lists, for all tokens at once or as the tokens of a stream come.

    Args:
        start: the number of characters before the first token.
        hidden: ids whose tokens the text leaves out.
        top: whether alternatives were requested.
        as_ids: whether a token is named by its id, not by its text.
    """

    def __init__(self, start: int, hidden: frozenset[int], *, top: bool, as_ids: bool = False) -> None:
        self._at = start
        self._hidden = hidden
        self._top = top
        self._as_ids = as_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def lists(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._at)
            if token.token_id not in self._hidden:
                self._at += len(self._decoder.decode(token.spelled))
        return {
            "tokens": [self._written(token.token_id, token.spelled) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._alternatives(token) for token in tokens] if self._top else None,
            "text_offset": offsets,
        }

    def _alternatives(self, token: TokenLogprob) -> dict[str, float | None]:
        """Return the best alternatives and the token itself. If several are written alike, the first counts."""
        found: dict[str, float | None] = {self._written(token.token_id, token.spelled): _finite(token.logprob)}
        for token_id, spelled, logprob in token.top:
            found.setdefault(self._written(token_id, spelled), _finite(logprob))
        return found

    def _written(self, token_id: int, spelled: bytes) -> str:
        return token_name(token_id) if self._as_ids else _written(spelled)


class Choices:
    """The choices of one reply, in the order of the prompts and of the samples of each.

    Args:
        fronts: the texts of the prompts if they are echoed, else empty texts.
        hidden: ids whose tokens the text leaves out.
    """

    def __init__(
        self, head: ReplyHead, request: CompletionRequest, fronts: Sequence[str], hidden: frozenset[int]
    ) -> None:
        self._request = request
        self._head = {"id": head.id, "object": "text_completion", "created": head.created, "model": head.model}
        self._opening = b"data: " + _encode(self._head)[:-1] + b',"choices":['
        self._fronts = [front for front in fronts for _ in range(request.samples)]
        options = {"top": bool(request.logprobs), "as_ids": request.tokens_as_ids}
        self._logprobs = [LegacyLogprobs(len(front), hidden, **options) for front in self._fronts]

    def whole(self, answers: Sequence[Answer]) -> bytes:
        choices = [
            self._choice(index, answer.content, answer.logprobs, **ending(answer))
            for index, answer in enumerate(answers)
        ]
        return _encode({**self._head, "choices": choices, "usage": self._usage(answers)})

    def piece(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None = None, answer: Answer | None = None
    ) -> bytes:
        """Return a stream's next event: more text, the logprobs of the new tokens, and with `answer` how it ended."""
        end = {"finish_reason": None} if answer is None else ending(answer)
        return self._opening + _encode(self._choice(index, text, logprobs, **end)) + b"]}\n\n"

    def end(self, answers: Sequence[Answer]) -> bytes:
        """Return the end of a stream: the token counts, if they were asked for, and `[DONE]`."""
        if not self._request.stream_usage:
            return DONE
        return self._opening + b'],"usage":' + _encode(self._usage(answers)) + b"}\n\n" + DONE

    def _choice(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, **ending: Any) -> dict[str, Any]:
        front, self._fronts[index] = self._fronts[index], ""
        shown = None if logprobs is None else self._logprobs[index].lists(logprobs)
        return {"index": index, "text": front + text, "logprobs": shown, **ending}

    def _usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return usage(answers, answers[:: self._request.samples])


def _written(spelled: bytes) -> str:
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _finite(logprob: float | None) -> float | None:
    return logprob if logprob is None or math.isfinite(logprob) else UNLIKELY
