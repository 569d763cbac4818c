"""Bodies of `POST /generate`, as the requests that a vLLM worker gets for them: one for each prompt.

A worker has two endpoints. `/v1/completions` is always there. `/inference/v1/generate` is there with `--enable-scale-out`,
and only it takes images, and reports the weight version of each token. It does not name the ids of other candidates.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
from msgspec import Raw

from router.engines.engine import EngineCall
from router.engines.form import media
from router.engines.form.fields import parse_object, typed
from router.engines.form.worker_request import new_rid
from router.engines.json import is_list, is_nested, is_null
from router.engines.vllm.images import NamedImage, NamedImages, content_parts, salted
from router.engines.vllm.parameters import Params, translated
from router.errors import BadRequestError

SCALE_OUT = "scale-out"
"""The ability of a worker that has `/inference/v1/generate`."""

DEV_MODE = "dev-mode"
"""The ability of a worker that was started with `VLLM_SERVER_DEV_MODE=1`: it takes the calls of the fleet."""

CONTEXT = "context-"
"""The beginning of the ability that says how many tokens a worker's context has."""

COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"
_PREFIXES = {COMPLETIONS: ("cmpl-", "-0"), GENERATE: ("generate-tokens-", "")}

_NO_IMAGES = "multimodal_unsupported"

_MOST_SAMPLES = 1 << 16
"""More than a worker runs at a time. `--max-batch` counts samples only in requests of the usual form; this is for any form."""

_UNSUPPORTED = {
    "input_embeds": "embeddings instead of tokens",
    "video_data": "videos",
    "audio_data": "sound",
    "session_params": "sessions of the engine",
    "return_hidden_states": "hidden states",
    "return_routed_experts": "routed experts",
    "custom_logit_processor": "code for logits in a request",
    "return_sampling_mask": "sampling masks",
    "return_indexer_topk": "the indexer's choices",
    "return_entropy": "entropies",
    "return_flat_raw_top_logprobs": "logprobs as flat arrays",
    "return_flat_raw_output_top_logprobs": "logprobs as flat arrays",
    "bootstrap_host": "a prefill elsewhere",
    "bootstrap_room": "a prefill elsewhere",
    "watermark": "watermarks",
    "positional_embed_overrides": "embeddings instead of tokens",
    "require_reasoning": "a grammar that waits for the end of the reasoning",
    "max_thinking_tokens": "a limit by this name (theirs is `thinking_token_budget` in `sampling_params`)",
}
"""Fields by which a client asks for something that vLLM's workers do not have here."""

_OBJECT = Raw(b"{}")
_OWN = ("cache_salt", "session_id", "kv_transfer_params", "ec_transfer_params")
"""vLLM's fields beside the sampling parameters. They pass unchanged."""


class VllmPrompt(msgspec.Struct, frozen=True):
    """The request for one prompt, and the parts of it that its reply needs.

    Attributes:
        call: the request.
        ids: the prompt as sent, raw; None if it is text.
        rids: the names of its generations, `n` of them.
        empty: no token is wanted, though vLLM samples one.
        logprobs: the client wants logprobs.
        prompt_from: where the logprobs of the prompt's own tokens begin; None for none.
        top: how many candidates of each token are wanted.
        token_ids: the ids whose logprobs are wanted at each token.
        texts: entries of logprobs have the token's text.
        shows_prompt: the client wants the prompt's ids back.
        can_be_told: the worker takes the version of its weights, and so knows it.
        images: the names of its pictures, in order.
        alone: those of them that the worker was sent without the bytes.
    """

    call: EngineCall
    ids: Raw | None
    rids: tuple[str, ...]
    empty: bool
    logprobs: bool
    prompt_from: int | None
    top: int
    token_ids: list[int] | None
    texts: bool
    shows_prompt: bool
    can_be_told: bool = False
    images: tuple[str, ...] = ()
    alone: frozenset[str] = frozenset()


class Asked(msgspec.Struct, frozen=True):
    """A whole body of `/generate`. `listed`: the reply is a list."""

    prompts: list[VllmPrompt]
    listed: bool
    stream: bool


def context_in(abilities: frozenset[str]) -> int | None:
    """Return how many tokens a worker's context has, given its abilities; None if it has not said so."""
    return next((int(one.removeprefix(CONTEXT)) for one in abilities if one.startswith(CONTEXT)), None)


def engine_ids(rid: str) -> list[str]:
    """Return the names that a vLLM worker may have for the generation with this id, for an abort."""
    return [f"{before}{rid}{after}" for before, after in _PREFIXES.values()]


def read(body: bytes, abilities: frozenset[str], images: NamedImages, known: Container[str] = ()) -> Asked:
    """Return the prompts of a body as requests. Raise BadRequestError that names an option that vLLM's workers lack.

    `images` reads the pictures of the prompts. `known`: the names of those that the worker knows.
    """
    fields = parse_object(body)
    for key, what in _UNSUPPORTED.items():
        if key in fields and _asks(typed(fields, key, Any, "JSON")):
            raise BadRequestError(f"`{key}` is not supported with vLLM workers: they do not take or give {what} here")
    key = "text" if is_null(fields.get("input_ids")) else "input_ids"
    raw = fields.get(key)
    if raw is None or is_null(raw):
        raise BadRequestError("a prompt is missing: give `text` or `input_ids`")
    batch = (is_list if key == "text" else is_nested)(raw)
    prompts = typed(fields, key, list[Raw], "a list of prompts") if batch else [raw]
    if not prompts or any(bytes(one) in (b"[]", b'""') for one in prompts):
        raise BadRequestError(f"`{key}` is empty, or has an empty prompt in it")
    stream = typed(fields, "stream", bool, "true or false") is True
    shown = _shown(fields, images, len(prompts), batch=batch)
    if any(shown) and SCALE_OUT not in abilities:
        raise BadRequestError(
            "this vLLM worker takes no images with token ids: start it with --enable-scale-out", code=_NO_IMAGES
        )
    if stream and len(prompts) > 1:
        known = ()  # a prompt may be sent after events of others have gone out, and could not be sent again
    lists = _Lists(fields)
    asked: list[VllmPrompt] = []
    for number, (one, pictures) in enumerate(zip(prompts, shown, strict=True)):
        asked.append(_Reader(lists, number, batch=batch).prompt(one, stream, abilities, pictures, known))
        if len(asked[number].rids) != len(asked[0].rids):
            raise BadRequestError("`n` must be the same for all prompts of a batch")
    return Asked(asked, batch or len(asked[0].rids) > 1, stream)


def _shown(fields: dict[str, Raw], images: NamedImages, prompts: int, *, batch: bool) -> Sequence[Sequence[NamedImage]]:
    """Return the pictures of each prompt. Raises BadRequestError for any that the middleware has not named."""
    given = typed(fields, media.IMAGES, Any, "JSON")
    if not _asks(given):
        return [()] * prompts
    found = images.found(given if batch else [given])
    if found is None or len(found) != prompts:
        raise BadRequestError(
            f"`{media.IMAGES}` goes to vLLM workers only through this router's own middleware, for a model that is known to"
            " see: its files are in --tokenizer-path (docs/http-api/images.md)",
            code=_NO_IMAGES,
        )
    return found


def _asks(value: Any) -> bool:
    """Return whether a value asks for anything. `false`, null, an empty value and a list of only these do not."""
    waiting = [value]
    while waiting:  # a client may nest lists as deeply as the reader of JSON allows
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        elif one:
            return True
    return False


class _Lists:
    """The fields of a body. A list with an entry for each prompt is split once: a batch may have thousands of prompts."""

    def __init__(self, fields: Mapping[str, Raw]) -> None:
        self.fields = dict(fields)
        self._split: dict[str, list[Raw]] = {}

    def entries(self, key: str) -> list[Raw]:
        """Return the items of a list."""
        if key not in self._split:
            self._split[key] = typed(self.fields, key, list[Raw], "a list")
        return self._split[key]

    @cached_property
    def token_ids(self) -> list[int | list[int] | None]:
        """The ids whose logprobs are wanted."""
        expected = "a list of ids, or of such lists"
        return typed(self.fields, "token_ids_logprob", list[int | list[int] | None], expected) or []

    @cached_property
    def shared_token_ids(self) -> list[int] | None:
        """The ids, if they are one list for all prompts."""
        flat = [one for one in self.token_ids if isinstance(one, int)]
        return flat if flat and len(flat) == len(self.token_ids) else None


class _Reader:
    """Reads the fields of one prompt: its own where there is a list of them."""

    def __init__(self, lists: _Lists, number: int, *, batch: bool) -> None:
        self._lists = lists
        self._fields = lists.fields
        self._number = number
        self._batch = batch

    def prompt(
        self,
        prompt: Raw,
        stream: bool,
        abilities: frozenset[str],
        images: Sequence[NamedImage],
        known: Container[str],
    ) -> VllmPrompt:
        sampling = self._own("sampling_params", dict[str, Any], "an object") or {}
        params = translated(sampling)
        logprobs = self._own("return_logprob", bool, "true or false") is True
        top = (self._own("top_logprobs_num", int, "an integer") or 0) if logprobs else 0
        start = self._own("logprob_start_len", int, "an integer") if logprobs else None
        token_ids = self._token_ids() if logprobs else None
        texts = logprobs and typed(self._fields, "return_text_in_logprobs", bool, "true or false") is True
        prompt_from = None if start is None or start < 0 else start
        if stream and prompt_from is not None:
            raise BadRequestError(
                "`logprob_start_len` is not supported with vLLM workers in a stream: ask without `stream`"
            )
        if top and token_ids:
            raise BadRequestError("`top_logprobs_num` and `token_ids_logprob` exclude each other with vLLM workers")
        if token_ids and prompt_from is not None:
            raise BadRequestError(
                "`token_ids_logprob` and `logprob_start_len` exclude each other with vLLM workers, which score these ids at"
                " sampled tokens only"
            )
        if images and (top or token_ids):
            raise BadRequestError(
                "`top_logprobs_num` and `token_ids_logprob` are not supported with images at vLLM workers, which name other"
                " candidates than the sampled token only by their texts then"
            )
        rid = self._own("rid", str, "a string")
        plain = is_list(prompt) and not top and not token_ids and prompt_from is None and not texts
        native = bool(images) or (plain and SCALE_OUT in abilities)
        samples = params.get("n", 1)
        if not isinstance(samples, int) or not 1 <= samples <= _MOST_SAMPLES:
            raise BadRequestError(f"`n` must be 1 to {_MOST_SAMPLES}, not {samples!r}")
        body = self._common(stream, rid)
        if native:
            call = _generate(body, prompt, params, logprobs=logprobs, prompt_logprobs=prompt_from is not None)
            if images:
                salt = body.get("cache_salt")
                images = salted(images, self._own("cache_salt", str, "a string") if isinstance(salt, Raw) else salt)
                call["content_parts"] = content_parts(images, known)
        else:
            if params["max_tokens"] is None:  # here null means 16, and more than there is room for is cut to it
                params["max_tokens"] = context_in(abilities)
            call = _completions(body, prompt, params, logprobs=logprobs, top=top, token_ids=token_ids, texts=texts)
            if prompt_from is not None:
                call["prompt_logprobs"] = top
        names = tuple(name for name, _ in images)
        return VllmPrompt(
            EngineCall("POST", GENERATE if native else COMPLETIONS, msgspec.json.encode(call)),
            prompt if is_list(prompt) else None,
            tuple(new_rid() for _ in range(samples)) if rid is None or samples > 1 else (rid,),
            sampling.get("max_new_tokens") == 0,
            logprobs,
            prompt_from,
            top,
            token_ids,
            texts,
            typed(self._fields, "return_prompt_token_ids", bool, "true or false") is True,
            DEV_MODE in abilities,
            names,
            frozenset(name for name in names if name in known),
        )

    def _common(self, stream: bool, rid: str | None) -> Params:
        """Return the fields that both endpoints have."""
        out: Params = {key: self._fields[key] for key in _OWN if not is_null(self._fields.get(key))}
        if "cache_salt" in out and is_list(out["cache_salt"]):  # a list with one for each prompt is the router's own
            out["cache_salt"] = self._own("cache_salt", str, "a string")
        if is_list(out.get("kv_transfer_params", _OBJECT)):
            out["kv_transfer_params"] = self._own("kv_transfer_params", Raw, "an object")
        if stream:
            out["stream"] = True
            out["stream_options"] = {"include_usage": True}
        out["return_token_ids"] = True
        if rid is not None:
            out["request_id"] = rid
        lora = self._own("lora_path", str, "a string")
        if lora:
            out["model"] = lora
        priority = self._own("priority", int, "an integer")
        if priority:
            out["priority"] = -priority  # the smallest number goes first at vLLM, the largest at SGLang
        salt = self._own("extra_key", str, "a string")
        if salt:
            out.setdefault("cache_salt", salt)
        return out

    def _own(self, key: str, kind: Any, expected: str) -> Any:
        raw = self._fields.get(key)
        if raw is None or is_null(raw):
            return None
        if not is_list(raw):
            return typed(self._fields, key, kind, expected)
        entries = self._lists.entries(key)
        if not self._batch or self._number >= len(entries):
            raise BadRequestError(f"`{key}` is a list of {len(entries)}, which does not fit the prompts")
        return typed({key: entries[self._number]}, key, kind, expected)

    def _token_ids(self) -> list[int] | None:
        """Return the ids for this prompt: of a batch its own list, or the one list that all share."""
        if self._lists.shared_token_ids is not None:
            return self._lists.shared_token_ids
        found = self._lists.token_ids
        own = found[self._number] if self._number < len(found) else None
        return own if isinstance(own, list) else None


def _generate(body: Params, prompt: Raw, params: Params, *, logprobs: bool, prompt_logprobs: bool) -> Params:
    sampling = dict(params)
    extra = sampling.pop("vllm_xargs", None)
    if extra:
        sampling["extra_args"] = extra
    if sampling["max_tokens"] is None:
        del sampling["max_tokens"]  # a null would mean the same as nothing only in some versions
    if logprobs:
        sampling["logprobs"] = 0
    if prompt_logprobs:
        sampling["prompt_logprobs"] = 0
    form = sampling.get("structured_outputs")
    if isinstance(form, dict) and "structural_tag" in form:
        # Else a worker with `--reasoning-parser` applies the tag only behind the reasoning, which the tag itself lets through.
        body = {**body, "reasoning_ended": True}
    return {**body, "token_ids": prompt, "sampling_params": sampling, "output_mode": "text"}


def _completions(
    body: Params,
    prompt: Raw,
    params: Params,
    *,
    logprobs: bool,
    top: int,
    token_ids: list[int] | None,
    texts: bool,
) -> Params:
    out = {**body, "prompt": prompt, **params}
    if logprobs:
        out["logprobs"] = max(top, 1 if token_ids else 0)
        if token_ids:
            out["logprob_token_ids"] = token_ids
        if texts or top or token_ids:  # a worker with `--return-tokens-as-token-ids` names ids unless told not to
            out["return_tokens_as_token_ids"] = not texts
        if (top or token_ids) and texts:
            raise BadRequestError(
                "`return_text_in_logprobs` is not supported with vLLM workers for other candidates than the sampled token"
            )
    return out
