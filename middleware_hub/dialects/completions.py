"""OpenAI's `POST /v1/completions`: requests, which may also have SGLang's own fields, and replies (`text_completion`).

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
import re
from collections.abc import Sequence
from typing import Any, cast

import msgspec
from msgspec import Raw

from middleware_hub.chat.answer import Answer, ReplyHead, SampledTokens, TokenLogprob, answer_of
from middleware_hub.chat.errors import feed_event, unreadable
from middleware_hub.dialects.fields import (
    ANYTHING,
    BOOLEAN,
    MOST_SAMPLES,
    MOST_TOP_LOGPROBS,
    STREAM_OPTIONS,
    STRING,
    Fields,
    Kind,
    unsupported,
    wrong,
)
from middleware_hub.dialects.openai.replies import UNLIKELY, ending, token_name, usage
from middleware_hub.dialects.sampling import LARGEST, finish, read_sampling, schema_text
from middleware_hub.tokenizer.vocabulary import Vocabulary
from router.engines.form.fields import read_texts
from router.engines.form.limits import PROMPT_LIMITS, PromptLimits
from router.engines.form.reply import Reply, UnreadableReplyError, further_fields, read_fields, read_reply
from router.engines.form.stream import StreamedReply
from router.engines.json import JSON_ERRORS
from router.engines.json_cost import LIGHT
from router.errors import BadRequestError

# Requests ---------------------------------------------------------------------------------------------------------------

Prompts = list[str] | list[list[int]]


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request, parsed and checked.

    Attributes:
        prompts: texts, or lists of ids; none of them is empty.
        batch: whether they came as a list.
        samples: `n`, for each prompt.
        sampling: `sampling_params` for `/generate`, with `n` if it is more than 1.
        stream_usage: whether a stream ends with the token counts.
        logprobs: how many alternatives of each token the client wants; None for no logprobs.
        token_ids: whether the client wants the ids of prompt and reply.
        tokens_as_ids: whether logprobs name each token by its id, not by its text.
        echo: whether the reply's text begins with the prompt's.
        bare: whether a text gets no special tokens in front of it.
        extra: further top-level fields for the worker, raw (`lora_path`, `return_trajectory`, ...).
    """

    prompts: Prompts
    batch: bool = False
    samples: int = 1
    sampling: dict[str, Any]
    stream: bool = False
    stream_usage: bool = False
    logprobs: int | None = None
    echo: bool = False
    bare: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    model: str = ""
    extra: dict[str, Raw] = {}

    @property
    def replies(self) -> int:
        """The number of replies; those of one prompt are neighbours."""
        return len(self.prompts) * self.samples

    @property
    def listed(self) -> bool:
        return self.batch or self.samples > 1

    @property
    def skips_special(self) -> bool:
        """Whether the text leaves special tokens out."""
        return self.sampling.get("skip_special_tokens") is not False

    def generate(self, rid: str) -> bytes:
        """Return the body of the `/generate` that answers it. The worker uses `rid` only if there is one sample."""
        fields: dict[str, Any] = dict(self.extra)
        fields["text" if isinstance(self.prompts[0], str) else "input_ids"] = (
            self.prompts if self.batch else self.prompts[0]
        )
        fields["sampling_params"] = self.sampling
        fields["stream"] = self.stream
        if self.samples == 1:
            fields["rid"] = rid
        if self.token_ids:
            fields["return_prompt_token_ids"] = True
        if self.logprobs is not None:
            fields["return_logprob"] = True
            if self.logprobs:
                fields["top_logprobs_num"] = self.logprobs
        return msgspec.json.encode(fields)


DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""

_TEXTS = re.compile(rb'\s*(\[\s*)?"')
_PROMPT = "the prompt is `prompt`: a string, a list of strings, a list of token ids, or a list of such lists"
_REFUSED = {
    "text": _PROMPT,
    "input_ids": _PROMPT,
    "input_embeds": _PROMPT,
    "prompt_segments": "the prompt is `prompt`; segments are for /generate",
    "sampling_params": "write its fields at the top level",
    "messages": "they are for /v1/chat/completions",
}
"""Fields of other calls. Dropping them silently would surprise the client; sent on, some of them would be the prompt."""

_Listed = list[str | int | list[int]]
_WRITTEN: Kind[str | _Listed] = Kind(str | _Listed, _PROMPT.removeprefix("the prompt is `prompt`: "))
_SCHEMA: Kind[str | dict[str, Any]] = Kind(str | dict[str, Any], "a JSON schema, as an object or its text")


def parse(body: bytes, limits: PromptLimits = PROMPT_LIMITS) -> CompletionRequest:
    """Parse a body. Raises BadRequestError, whose `param` names the field, and TextTooLongError."""
    fields = Fields(body)
    for key, reason in _REFUSED.items():
        if key in fields and fields.take(key, ANYTHING) is not None:
            raise BadRequestError(f"`{key}` cannot be used here: {reason}", param=key)
    texts, listed = _long_texts(fields, limits)
    written = (texts if listed else texts[0]) if texts else fields.need("prompt", _WRITTEN)
    prompts, batch = _prompts(cast(str | _Listed, written))
    samples = fields.take_within("n", 1, MOST_SAMPLES) or 1
    best_of = fields.take_within("best_of", 1, MOST_SAMPLES)
    if best_of is not None and best_of != samples:
        raise wrong("best_of", best_of, f"the same as `n` ({samples}): all that is sampled is given back")
    if fields.take("suffix", STRING):
        raise unsupported("`suffix` is not supported: nothing can be put between two texts here", "suffix")
    logprobs = fields.take_within("logprobs", 0, MOST_TOP_LOGPROBS)
    echo = fields.take("echo", BOOLEAN) or False
    if echo and logprobs is not None:
        raise unsupported(
            "`echo` together with `logprobs` is not supported: a prompt's logprobs are /generate's, with `logprob_start_len`",
            "echo",
        )
    options = fields.take("stream_options", STREAM_OPTIONS)
    fields.drop(("user", "separate_reasoning", "include_reasoning"))  # a completion's text is not parsed
    return CompletionRequest(
        prompts=prompts,
        batch=batch,
        samples=samples,
        sampling=_sampling(fields, samples),
        stream=fields.take("stream", BOOLEAN) or False,
        stream_usage=bool(options is not None and options.include_usage),
        logprobs=logprobs,
        echo=echo,
        bare=fields.take("add_special_tokens", BOOLEAN) is False,
        token_ids=fields.take("return_token_ids", BOOLEAN) or False,
        tokens_as_ids=fields.take("return_tokens_as_token_ids", BOOLEAN) or False,
        model=fields.take("model", STRING) or "",
        extra=fields.rest(),
    )


def _long_texts(fields: Fields, limits: PromptLimits) -> tuple[list[str] | None, bool]:
    """Take the texts of a long prompt, and whether they are a list. Any other prompt is left, and None returned."""
    raw = fields.raw("prompt")
    if raw is None or len(raw) <= LIGHT or not _TEXTS.match(raw):
        return None, False
    fields.drop(("prompt",))
    return read_texts({"prompt": raw}, "prompt", limits)


def _prompts(written: str | _Listed) -> tuple[Prompts, bool]:
    """Return the prompts, and whether they are a batch: a list of ids is one prompt."""
    if isinstance(written, str):
        if not written:
            raise BadRequestError("`prompt` is empty: give at least one character", param="prompt")
        return [written], False
    if not written:
        raise BadRequestError("`prompt` is an empty list: give at least one prompt", param="prompt")
    kinds = {type(one) for one in written}
    if len(kinds) > 1:
        raise BadRequestError(
            "`prompt` is a list of several kinds: give strings, token ids, or lists of ids", param="prompt"
        )
    if kinds == {int}:
        return [cast(list[int], written)], False
    for number, one in enumerate(written):
        if not one:
            raise BadRequestError(
                f"`prompt[{number}]` is empty: give at least one character, or one id", param="prompt"
            )
    return cast(Prompts, written), True


def _sampling(fields: Fields, samples: int) -> dict[str, Any]:
    sampling = read_sampling(fields)
    schema = fields.take("json_schema", _SCHEMA)
    if schema:
        if "json_schema" in sampling:
            raise BadRequestError(
                "`json_schema` and `response_format` are both there: give one of them", param="json_schema"
            )
        sampling["json_schema"] = schema if isinstance(schema, str) else schema_text("json_schema", schema)
    limit = fields.take_within("max_tokens", 0, LARGEST)
    finish(sampling, sampling.get("max_new_tokens", DEFAULT_MAX_TOKENS) if limit is None else limit)
    return {**sampling, "n": samples} if samples > 1 else sampling


# Replies ----------------------------------------------------------------------------------------------------------------


class CompletionAnswer:
    """Reads one generation, whole or as its stream comes. Raises UpstreamError for anything but a reply of `/generate`."""

    def __init__(self, request: CompletionRequest, vocabulary: Vocabulary) -> None:
        self._tokens = SampledTokens(vocabulary.piece, request.logprobs)
        self._streamed = StreamedReply(added=[])
        self._alternatives = bool(request.logprobs)
        self._token_ids = request.token_ids
        self.answer: Answer | None = None
        """The answer; for a stream, without the text and the logprobs that were sent before."""

    def whole(self, raw: bytes | Raw) -> Answer:
        try:
            reply, short = read_reply(raw)
            if self._alternatives:
                self._tokens.take_tops(read_fields(raw)[1], len(reply.ids))
            return self._answer(reply, *read_fields(short.body), content=reply.text, logprobs=self._tokens.all(reply))
        except (UnreadableReplyError, *JSON_ERRORS) as error:
            raise unreadable(error) from error

    def event(self, data: bytes) -> str:
        """Return the text that an event of the stream adds; the last event sets `answer`.

        Raises RouterError for an event that says why there is no reply.
        """
        streamed = self._streamed
        feed_event(streamed, data)
        try:
            text = self._tokens.event(streamed)
            if streamed.finished and self.answer is None:
                reply = streamed.reply()
                assert reply is not None, "there was an event"
                self.answer = self._answer(reply, streamed.last_fields, streamed.last_meta)
        except (UnreadableReplyError, *JSON_ERRORS) as error:
            raise unreadable(error) from error
        return text

    def news(self) -> Sequence[TokenLogprob] | None:
        """Return the logprobs of the stream's tokens since the last call; None if unwanted, or if there are none."""
        return self._tokens.news(self._streamed) or None

    def _answer(self, reply: Reply, fields: dict[str, Raw], meta: dict[str, Raw], **known: Any) -> Answer:
        extra = further_fields(fields, meta)
        if self._token_ids:
            known |= {"ids": [*reply.ids], "prompt_ids": extra.pop("prompt_token_ids", None)}
        return answer_of(reply, meta, extra=extra, **known)


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
