"""A request to `/retrieve_from_text`, read from its body."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from middleware_hub.chat.answer import check_one
from middleware_hub.spans.per_token import ROW_FIELDS, TOP_P
from router.engines.form import media
from router.engines.form.fields import read_texts
from router.engines.form.limits import PROMPT_LIMITS, PromptLimits
from router.engines.json import JSON_ERRORS, decode_object, json_fault
from router.errors import BadRequestError


class RetrievalRequest(msgspec.Struct):
    """The body of `/retrieve_from_text`.

    Attributes:
        text: one, or several.
        return_logp: whether the answer has logprobs.
        strict: whether to answer 409 instead of anything that is not exact.
        request_id: names one of several replies with this text.
        max_staleness: count sampled tokens that are older than this many weight versions.
        kv_staleness: count those of a turn by its `kv_version`, too.
        lora_path: the adapter that the text was sampled with.
        expect_request_ids: the replies that the caller got; a list of lists if there are several texts.
        return_routed_experts, return_indexer_topk, return_top_p: whether the answer has this per-token data of the engine.
        cover: whether to answer with all chains that contain these replies, not only with the chain of the text.
        image_data: the pictures of the text's placeholders, in order; a list of lists if there are several texts.
        ignored: names of unknown fields. One of them may be misspelt, so the answer lists them.
    """

    text: str | list[str]
    return_logp: bool = True
    strict: bool = False
    request_id: str | None = None
    max_staleness: int | None = None
    lora_path: str | None = None
    expect_request_ids: list[str | list[str]] | None = None
    cover: bool = False
    return_routed_experts: bool = False
    return_indexer_topk: bool = False
    return_top_p: bool = False
    image_data: Raw = Raw(b"null")
    kv_staleness: bool = False
    ignored: tuple[str, ...] = ()

    @classmethod
    def parse(cls, body: bytes, limits: PromptLimits = PROMPT_LIMITS) -> RetrievalRequest:
        """Read a body. Raises BadRequestError with the field that is wrong; TextTooLongError."""
        try:
            fields = decode_object(body)
            texts, listed = read_texts(fields, "text", limits)
            if texts is not None:
                fields["text"] = Raw(b'""')  # it may be long, and is parsed already
            ignored = tuple(sorted(fields.keys() - _FIELDS))
            for name in ignored:
                del fields[name]
            request = msgspec.json.decode(msgspec.json.encode(fields), type=cls)
            request.ignored = ignored
            request.text = (texts if listed else texts[0]) if texts else request.text
        except JSON_ERRORS as error:
            raise BadRequestError(
                f"the body must be {{'text': a string or a list of strings, ...}}: {json_fault(body, error)}"
            ) from error
        if not request.text or not all(request.text):
            raise BadRequestError("`text` is empty, or has an empty text in it")
        limits.check_replies(len(texts or ""))
        if sum(1 if isinstance(one, str) else len(one) for one in request.expect_request_ids or ()) > limits.replies:
            raise BadRequestError(f"`expect_request_ids` has more than {limits.replies} request ids (--max-batch)")
        if request.max_staleness is not None and request.max_staleness < 0:
            raise BadRequestError(f"`max_staleness` must not be negative, got {request.max_staleness}")
        if request.kv_staleness and request.max_staleness is None:
            raise BadRequestError("`kv_staleness` needs `max_staleness`: how many weight versions are too many")
        request.check_expected()
        return request

    @property
    def wanted(self) -> list[str]:
        """Return the further per-token fields that the answer has."""
        asked = (self.return_routed_experts, self.return_indexer_topk, self.return_top_p)
        return [name for name, one in zip((*ROW_FIELDS, TOP_P), asked, strict=True) if one]

    def check_expected(self) -> None:
        expected = self.expect_request_ids
        if self.request_id is not None:
            check_one(self.request_id, "`request_id`")
        if self.cover and (expected is None or not isinstance(self.text, str)):
            raise BadRequestError("`cover` needs one `text`, and `expect_request_ids`: the replies of its rollout")
        if expected is None:
            return
        several = isinstance(self.text, list)
        if any(isinstance(one, list) is not several for one in expected) or (
            several and len(expected) != len(self.text)
        ):
            shape = "one list of request ids for each text" if several else "a list of request ids"
            raise BadRequestError(f"`expect_request_ids` must be {shape}")
        for one in expected:
            for name in [one] if isinstance(one, str) else one:
                if not name:
                    raise BadRequestError("`expect_request_ids` has an empty request id in it")
                check_one(name, "of `expect_request_ids`,")

    def images(self) -> list[list[str]] | None:
        """Return the pictures of each text, as they were given; None if there are none. Raises BadRequestError."""
        several = isinstance(self.text, list)
        return media.read({media.IMAGES: self.image_data}, len(self.text) if several else 1, batch=several)

    def expected(self, number: int) -> list[str]:
        found = self.expect_request_ids
        if found is None:
            return []
        one = found[number] if isinstance(self.text, list) else found
        return [name for name in one if isinstance(name, str)]


_FIELDS = frozenset(RetrievalRequest.__struct_fields__) - {"ignored"}
