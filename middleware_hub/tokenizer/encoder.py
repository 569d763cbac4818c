"""Text to ids: by Hugging Face's tokenizers, or ten times faster by fastokens if that gives the same ids.

`tokenizers` defines the ids that a worker makes of a text: SGLang loads it, and no other ids may be sent. fastokens (SGLang's
own `--tokenizer-backend fastokens`) reads the same tokenizer.json, and is checked against it in three ways. It is used only for
the kind of tokenizer it was made for: byte-level BPE, with plain added tokens. Both have to encode a few hundred awkward texts
alike. And while fastokens is used, every 1,024th text is encoded by both. After one difference or one error it is not used
again. A wrong encoding would not be a wrong sample (what was sent is what is remembered), but it would be another prompt than
the worker's own.
"""

from __future__ import annotations

import ctypes
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend

from middleware_hub.spans.chain import ID_BYTES, pack_ids
from middleware_hub.tokenizer.settings import KNOWN_PARTS, parts
from router.engines.form.limits import PROMPT_LIMITS, PromptLimits, TextTooLongError
from router.errors import BadRequestError

try:
    import fastokens
except ImportError:  # pragma: no cover - some platforms lack it
    fastokens = None

logger = logging.getLogger(__name__)

CHECK_EVERY = 1024
"""One of this many texts is encoded by both."""

_PROBES = 300
_AWKWARD = (
    *"a Z the hello World 1 23 4567 3.14 . ... !? 's 'LL ' \" {} () _x < | > <| |> im é ü ß ſ İ ﬁ 你好 日本語 안녕 ไทย".split(),
    *"שלום हिन्दी 🙂 👍🏽 𝒳 e\u0301 A\u030a \u1112\u1161\u11ab א\u05b0 \u200d \ufffd \ue000 \x00 \x02".split(" "),
    *(" the", " ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", " \n", "\u00a0", "\u3000", "def f(x):\n    return x\n"),
)

Encode = Callable[[str], bytes]
"""Returns a text's ids, packed as spans keep them, with nothing added before or after them."""


def encoder(backend: Backend, settings: dict[str, Any], choice: str, limits: PromptLimits = PROMPT_LIMITS) -> Encode:
    """Return the encoder of a tokenizer with the JSON `settings`; `choice` is `auto`, `huggingface` or `fastokens`.

    Raises BadRequestError if fastokens is demanded and unfit.
    """
    slow = _by_tokenizers(backend, limits)
    if choice == "huggingface":
        return slow
    try:
        fast = _by_fastokens(settings, limits)
        _compare(slow, fast, backend)
    except _UnfitError as error:
        if choice == "fastokens":
            raise BadRequestError(f"--tokenizer-backend fastokens: {error}") from error
        logger.info("Hugging Face's tokenizers encode texts, not fastokens: %s", error)
        return slow
    return FastEncoder(slow, fast)


class LateEncoder:
    """Encodes by `tokenizers`, and starts making the encoder that `encoder` chooses for `auto`. That takes a second or two.

    The work starts with the first text, in a thread. So neither the start of a router nor a request waits for it.
    """

    def __init__(
        self,
        backend: Backend,
        settings: dict[str, Any],
        limits: PromptLimits,
        *,
        run: Callable[[Callable[[], None]], object],
        use: Callable[[Encode], None],
    ) -> None:
        """`run` calls a function in a thread; `use` is called there with the encoder that takes the place of this one."""
        self._encode = _by_tokenizers(backend, limits)
        self._run = run
        self._use = use
        self._make: Callable[[], Encode] | None = partial(encoder, backend, settings, "auto", limits)

    def __call__(self, text: str) -> bytes:
        if self._make is not None:
            self._run(partial(self._replace, self._make))
            self._make = None
        return self._encode(text)

    def _replace(self, make: Callable[[], Encode]) -> None:
        try:
            made = make()
        except Exception:
            logger.exception("no faster encoder could be made: Hugging Face's tokenizers encode all texts")
            made = self._encode
        self._use(made)
        _give_back()


def _give_back() -> None:
    """Give freed memory back to the operating system. glibc keeps it: 300 MB after the encoders of a large vocabulary.

    Other C libraries have no such function, and need none.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class _UnfitError(Exception):
    """fastokens is not used for this tokenizer."""


class FastEncoder:
    """Encodes by fastokens as long as `slow` agrees. Several threads call it; they can race only on a count."""

    def __init__(self, slow: Encode, fast: Encode) -> None:
        self._slow = slow
        self._fast: Encode | None = fast
        self._count = 0

    def __call__(self, text: str) -> bytes:
        if self._fast is None:
            return self._slow(text)
        try:
            ids = self._fast(text)
        except TextTooLongError:
            raise
        except Exception:
            # Any error: the slow encoder can take over.
            logger.exception("fastokens failed on a text: from here on Hugging Face's tokenizers encode all of them")
            self._fast = None
            return self._slow(text)
        self._count += 1
        if self._count % CHECK_EVERY == 0:
            expected = self._slow(text)
            if ids != expected:
                logger.error("fastokens does not encode a text of %d characters as tokenizers does", len(text))
                self._fast = None
                return expected
        return ids


def _by_tokenizers(backend: Backend, limits: PromptLimits) -> Encode:
    def encode(text: str) -> bytes:
        encoding = backend.encode_batch_fast([text], add_special_tokens=False)[0]
        limits.check_tokens(len(encoding))  # before the list of ids is made
        return pack_ids(encoding.ids)

    return encode


def _by_fastokens(settings: dict[str, Any], limits: PromptLimits) -> Encode:
    if fastokens is None:
        raise _UnfitError("it is not installed")
    kinds = {part["type"] for key in ("normalizer", "pre_tokenizer") for part in parts(settings[key])}
    if settings["model"]["type"] != "BPE" or settings["model"].get("dropout") or "ByteLevel" not in kinds:
        raise _UnfitError("this is no byte-level BPE")
    if not kinds <= KNOWN_PARTS:
        raise _UnfitError(f"the tokenizer has {', '.join(sorted(kinds - KNOWN_PARTS))} in it")
    options = ("lstrip", "rstrip", "single_word")
    if any(token[option] for token in settings["added_tokens"] for option in options):
        raise _UnfitError(f"an added token is one of {', '.join(options)}")
    fast = _built(msgspec.json.encode({**settings, "post_processor": None}).decode())

    def encode(text: str) -> bytes:
        ids: bytes = fast.encode_batch_flat([text])[0]  # little-endian, like all machines for which fastokens is built
        limits.check_tokens(len(ids) // ID_BYTES)
        return ids

    return encode


@lru_cache(maxsize=4)
def _built(tokenizer_json: str) -> Any:
    """Build a fastokens tokenizer. That takes more than a second, and the result never changes."""
    try:
        return fastokens.Tokenizer.from_json_str(tokenizer_json)
    except Exception as error:
        raise _UnfitError(str(error)) from error


def _compare(slow: Encode, fast: Encode, backend: Backend) -> None:
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    rng = random.Random(0)
    for _ in range(_PROBES):
        pieces = (*_AWKWARD, *rng.sample(added, min(8, len(added))))
        text = "".join(rng.choices(pieces, k=rng.randrange(1, 40)))
        try:
            same = slow(text) == fast(text)
        except Exception as error:
            raise _UnfitError(str(error)) from error
        if not same:
            raise _UnfitError(f"it encodes {text!r} differently")
