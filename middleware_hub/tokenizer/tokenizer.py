"""The tokenizer: texts to ids. The only file of the hub's core that loads with transformers.

A text is encoded in one of two ways. A **start** is encoded as the worker itself would encode it: with BOS where the
tokenizer adds one, with SentencePiece's dummy space. A **tail** follows tokens that are there already and must not gain
what a start gains. It has an encoder of its own, made from the first one's JSON with everything removed that only a start
gains. (Encoding a sentinel before the tail and cutting its ids off again fails where the text merges with it.)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedConfig

from middleware_hub.spans.chain import SpanFlag, pack_ids, unpack_ids
from middleware_hub.tokenizer.alignment import Alignment, align_context
from middleware_hub.tokenizer.encoder import FastEncoder, encoder
from middleware_hub.tokenizer.settings import is_verbatim, tail_settings
from middleware_hub.tokenizer.spellings import read_vocabulary
from router.config.radix import SpecialTokens, TokenizerBackend
from router.engines.sglang.limits import PROMPT_LIMITS, PromptLimits
from router.errors import BadRequestError

logger = logging.getLogger(__name__)

LONG_TEXT = 8_192
"""Longer texts are encoded in a thread: these take about 2 ms (200 to 320 us per 1,000 characters, measured)."""

LONG_FOR_FASTOKENS = 6 * LONG_TEXT
"""The same for the faster encoder."""

_VERBATIM = Alignment(SpanFlag.NONE)
_PROBES = ("Hello world", " leading space", "naïve café 你好 🙂\n\n\tend", "x")


class Tokenizer:
    """Encodes texts and knows what ids spell.

    Args:
        backend: the tokenizer as `tokenizers` has it; encodes starts.
        add_special_tokens: `auto` adds a BOS unless the text spells it already, `always` adds it, `never` does not.
        vocabulary_size: the model's, if known: the limit for ids that clients send.
        encodes_by: see `encoder`.
        limits: of a text. A longer one raises TextTooLongError.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        add_special_tokens: SpecialTokens = "auto",
        vocabulary_size: int | None = None,
        encodes_by: TokenizerBackend = "auto",
        limits: PromptLimits = PROMPT_LIMITS,
    ) -> None:
        self._limits = limits
        backend.no_truncation()
        backend.no_padding()
        settings = _settings(backend)
        tail = tail_settings(settings)
        self._start = backend
        self._starts_plain = all(settings[key] == tail[key] for key in ("normalizer", "pre_tokenizer"))
        self._encode_start = encoder(backend, settings, encodes_by, limits)
        self._encode_tail = self._encode_start if self._starts_plain else encoder(self._tail, tail, encodes_by, limits)
        self._verbatim = is_verbatim(settings)
        self._long = LONG_FOR_FASTOKENS if isinstance(self._encode_start, FastEncoder) else LONG_TEXT
        self._mode = add_special_tokens
        probe = backend.encode(_PROBES[0])
        added = probe.special_tokens_mask
        lead = next((i for i, flag in enumerate(added) if not flag), len(added))
        self.bos: list[int] = probe.ids[:lead]
        self._packed_bos = pack_ids(self.bos)
        self.vocabulary = read_vocabulary(backend, settings)
        self.vocabulary.size = max(vocabulary_size or 0, len(self.vocabulary))
        self.chat_template: str | dict[str, str] | None = None  # of several, each has a name: `default`, `tool_use`
        self.special_tokens_map: dict[str, str] = {}
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="encode")

    @classmethod
    def load(
        cls,
        path: str,
        *,
        trust_remote_code: bool = False,
        add_special_tokens: SpecialTokens = "auto",
        encodes_by: TokenizerBackend = "auto",
        limits: PromptLimits = PROMPT_LIMITS,
    ) -> Tokenizer:
        """Load a tokenizer from a folder or a hub id.

        Raises:
            BadRequestError: it cannot be loaded, or it is of a kind whose tokens' text is not known here.
        """
        _quiet_their_handlers()
        try:
            loaded = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise BadRequestError(f"--tokenizer-path {path}: no tokenizer could be loaded from it: {error}") from error
        backend = getattr(loaded, "backend_tokenizer", None)
        if not isinstance(backend, Backend):
            raise BadRequestError(
                f"--tokenizer-path {path}: {type(loaded).__name__} is not a fast tokenizer; "
                "a folder with a tokenizer.json is needed (save_pretrained of a fast tokenizer writes one)"
            )
        tokenizer = cls(
            backend,
            add_special_tokens=add_special_tokens,
            vocabulary_size=_model_vocabulary(path),
            encodes_by=encodes_by,
            limits=limits,
        )
        tokenizer.chat_template = loaded.chat_template
        tokenizer.special_tokens_map = {
            name: token for name, token in loaded.special_tokens_map.items() if isinstance(token, str)
        }
        for text in _PROBES:
            expected = list(loaded(text)["input_ids"])
            mine = tokenizer.encode_start(text)
            if add_special_tokens == "auto" and expected[: len(mine)] != mine:
                logger.warning("the tokenizer of %s encodes %r as %s, its backend as %s", path, text, expected, mine)
        return tokenizer

    # Encoding ------------------------------------------------------------------------------------------------------------

    def encode_start(self, text: str) -> list[int]:
        """Return the ids that the worker itself would make of this text, with nothing appended."""
        return unpack_ids(self._packed_start(text))

    def encode_tail(self, text: str) -> list[int]:
        """Return the ids of a text that follows tokens that are there already."""
        return unpack_ids(self._packed_tail(text))

    def _packed_start(self, text: str) -> bytes:
        self._limits.check_text(text)
        ids = self._encode_start(text)
        if self._mode == "never" or (self._mode == "auto" and ids.startswith(self._packed_bos)):
            return ids
        return self._packed_bos + ids

    def _packed_tail(self, text: str) -> bytes:
        self._limits.check_text(text)
        return self._encode_tail(text)

    async def encode(self, text: str, *, start: bool) -> list[int]:
        """Encode a start or a tail; a long text in a thread, so that the event loop goes on."""
        return unpack_ids(await self.encode_packed(text, start=start))

    async def encode_packed(self, text: str, *, start: bool) -> bytes:
        """Return what `encode` returns, packed as spans keep it."""
        encode = self._packed_start if start else self._packed_tail
        if len(text) < self._long:
            return encode(text)
        return await asyncio.get_running_loop().run_in_executor(self._threads, encode, text)

    async def encode_aligned(self, text: str, *, start: bool) -> tuple[bytes, Alignment]:
        """Return what `encode_packed` returns, and how it lies over the text.

        With a normalizer, that may cost as much again.
        """

        def both() -> tuple[bytes, Alignment]:
            ids = encode(text)
            if self._verbatim and text.isascii() and not (start and self.bos):
                return ids, _VERBATIM
            return ids, self.align(unpack_ids(ids), text, start=start)

        encode = self._packed_start if start else self._packed_tail
        if len(text) < self._long:
            return both()
        return await asyncio.get_running_loop().run_in_executor(self._threads, both)

    def align(self, ids: Sequence[int], text: str, *, start: bool) -> Alignment:
        """Return how the ids of a context lie over its text."""

        def offsets() -> list[tuple[int, int]] | None:
            encoding = (self._untrimmed if start else self._tail).encode(text, add_special_tokens=False)
            lead = len(ids) - len(encoding.ids)
            return [(0, 0)] * lead + encoding.offsets if list(ids[lead:]) == encoding.ids else None

        return align_context(self.vocabulary, ids, text, bos=self.bos if start else (), offsets=offsets)

    @cached_property
    def _tail(self) -> Backend:
        return Backend.from_str(_dump(tail_settings(_settings(self._start))))

    @cached_property
    def _untrimmed(self) -> Backend:
        """The encoder of a start without its post-processor, which may trim spaces off the offsets."""
        if self._starts_plain:
            return self._tail
        return Backend.from_str(_dump({**_settings(self._start), "post_processor": None}))

    def spell_prompt(self, ids: Sequence[int]) -> str:
        """Return the text of a client's ids: special tokens spelled, without a leading BOS and the dummy space behind it."""
        led = bool(self.bos) and list(ids[: len(self.bos)]) == self.bos
        text = self.vocabulary.spell(ids[len(self.bos) :] if led else ids)
        return text[1:] if led and self._dummy_prefix and text[:1] == " " else text

    @cached_property
    def _dummy_prefix(self) -> bool:
        """Return whether a start gains a space, so that `x` at a start differs from `x` behind something."""
        first = self._start.encode("x", add_special_tokens=False).ids
        return self.vocabulary.spell(first).startswith(" ")


def _quiet_their_handlers() -> None:
    """Remove the handlers of libraries that write to stderr themselves, so that their messages take the form of our log."""
    for name in ("transformers", "huggingface_hub"):
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True


def _model_vocabulary(path: str) -> int | None:
    """Return `vocab_size` of the tokenizer's model, which may be larger than the tokenizer's: models pad their vocabulary."""
    try:
        settings, _ = PreTrainedConfig.get_config_dict(path)
    except OSError:
        return None
    for part in (settings, settings.get("text_config") or {}):
        if isinstance(part.get("vocab_size"), int):
            return int(part["vocab_size"])
    return None


def _settings(backend: Backend) -> dict[str, Any]:
    settings: dict[str, Any] = msgspec.json.decode(backend.to_str())
    return settings


def _dump(settings: dict[str, Any]) -> str:
    return msgspec.json.encode(settings).decode()
