"""The tokenizer seam: the only file that knows transformers and tokenizers.

A text is encoded in one of two ways. A **start** is encoded as the worker itself would encode it: with BOS where the
tokenizer adds one, with SentencePiece's dummy space. A **tail** goes behind tokens that are there already and must not gain
what a start gains. It has an encoder of its own, made from the first one's JSON with every source of a start's privileges
taken out. (Encoding a sentinel before the tail and cutting its ids off again fails where the text merges with it.)
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import cached_property
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedConfig

from middleware_hub.spans.chain import SpanFlag
from middleware_hub.tokenizer.alignment import Alignment, align_context
from middleware_hub.tokenizer.encoder import FastEncoder, encoder, is_verbatim, parts
from middleware_hub.tokenizer.vocabulary import Vocabulary
from router.config import SpecialTokens, TokenizerBackend
from router.engines.sglang.limits import PROMPT_LIMITS, PromptLimits
from router.errors import BadRequestError

logger = logging.getLogger(__name__)

LONG_TEXT = 8_192
"""Characters from which on a text is encoded in a thread: about 2 ms of an event loop (200 to 320 us a thousand, measured)."""

LONG_FOR_FASTOKENS = 6 * LONG_TEXT
"""The same for the faster encoder."""

_VERBATIM = Alignment(SpanFlag.NONE)
_PROBES = ("Hello world", " leading space", "naïve café 你好 🙂\n\n\tend", "x")


class Tokenizer:
    """Encodes texts and knows what ids spell.

    Args:
        backend: the tokenizer as `tokenizers` has it; used as it is for starts.
        add_special_tokens: `auto` adds a BOS unless the text spells it already, `always` adds it, `never` does not.
        vocabulary_size: the model's, if known: the limit for ids that clients send.
        encodes_by: see `encoder`.
        limits: for a text. Raised for one that is longer: TextTooLongError.
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
        tail = _without_privileges(settings)
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
        self.vocabulary = _vocabulary(backend, settings)
        self._limit = max(vocabulary_size or 0, len(self.vocabulary))
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
            BadRequestError: it cannot be loaded, or is of a kind whose tokens' text is not known here.
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

    @property
    def vocabulary_size(self) -> int:
        """Ids from this one on are not the model's, as far as is known."""
        return self._limit

    def learn(self, ids: Sequence[int]) -> None:
        """A worker sampled these, so they are good, whatever the tokenizer's folder says."""
        highest = max(ids, default=0)
        if highest >= self._limit:
            self._limit = highest + 1

    # Encoding ------------------------------------------------------------------------------------------------------------

    def encode_start(self, text: str) -> list[int]:
        """The ids the worker itself would make of this text, with nothing appended."""
        self._limits.check_text(text)
        ids = self._encode_start(text)
        if self._mode == "never" or (self._mode == "auto" and self.bos and ids[: len(self.bos)] == self.bos):
            return ids
        return self.bos + ids

    def encode_tail(self, text: str) -> list[int]:
        """The ids of a text that goes on behind tokens that are there already."""
        self._limits.check_text(text)
        return self._encode_tail(text)

    async def encode(self, text: str, *, start: bool) -> list[int]:
        """Either of the two; in a thread if the text is long, so that the event loop goes on."""
        encode = self.encode_start if start else self.encode_tail
        if len(text) < self._long:
            return encode(text)
        return await asyncio.get_running_loop().run_in_executor(self._threads, encode, text)

    async def encode_aligned(self, text: str, *, start: bool) -> tuple[list[int], Alignment]:
        """What `encode` gives, and how it lies over the text: a normalizer may make that as dear as encoding."""

        def both() -> tuple[list[int], Alignment]:
            ids = encode(text)
            if self._verbatim and text.isascii() and not (start and self.bos):
                return ids, _VERBATIM
            return ids, self.align(ids, text, start=start)

        encode = self.encode_start if start else self.encode_tail
        if len(text) < self._long:
            return both()
        return await asyncio.get_running_loop().run_in_executor(self._threads, both)

    def align(self, ids: Sequence[int], text: str, *, start: bool) -> Alignment:
        """How the ids of a context lie over its text."""

        def offsets() -> list[tuple[int, int]] | None:
            encoding = (self._untrimmed if start else self._tail).encode(text, add_special_tokens=False)
            lead = len(ids) - len(encoding.ids)
            return [(0, 0)] * lead + encoding.offsets if list(ids[lead:]) == encoding.ids else None

        return align_context(self.vocabulary, ids, text, bos=self.bos if start else (), offsets=offsets)

    @cached_property
    def _tail(self) -> Backend:
        """The encoder of a tail."""
        return Backend.from_str(_dump(_without_privileges(_settings(self._start))))

    @cached_property
    def _untrimmed(self) -> Backend:
        """The encoder of a start without its post-processor, which may trim spaces off the offsets."""
        if self._starts_plain:
            return self._tail
        return Backend.from_str(_dump({**_settings(self._start), "post_processor": None}))

    def spell_prompt(self, ids: Sequence[int]) -> str:
        """The text of ids that a client sent: special tokens spelled, without a leading BOS and the dummy space behind it."""
        led = bool(self.bos) and list(ids[: len(self.bos)]) == self.bos
        text = self.vocabulary.spell(ids[len(self.bos) :] if led else ids)
        return text[1:] if led and self._dummy_prefix and text[:1] == " " else text

    @property
    def _dummy_prefix(self) -> bool:
        """Whether a start gains a space: `x` at a start is not what it is behind something."""
        if not hasattr(self, "_gains_space"):
            first = self._start.encode("x", add_special_tokens=False).ids
            self._gains_space = self.vocabulary.spell(first).startswith(" ")
        return self._gains_space


def _quiet_their_handlers() -> None:
    """These libraries write to stderr by themselves; what they say is to be in the form of the log it stands in."""
    for name in ("transformers", "huggingface_hub"):
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True


def _model_vocabulary(path: str) -> int | None:
    """`vocab_size` of the model that the tokenizer came with. Models pad their vocabulary: it is the larger one."""
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


def _without_privileges(settings: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer of a tail: what only a start gains is taken out, through nested Sequences."""
    pre_tokenizer = deepcopy(settings["pre_tokenizer"])
    for part in parts(pre_tokenizer):
        if part["type"] == "Metaspace":
            part["prepend_scheme"] = "never"
            part.pop("add_prefix_space", None)
        elif part["type"] == "ByteLevel":
            part["add_prefix_space"] = False
    normalizer = _without_prepend(deepcopy(settings["normalizer"]))
    return {**settings, "post_processor": None, "pre_tokenizer": pre_tokenizer, "normalizer": normalizer}


def _without_prepend(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    if normalizer is None or normalizer["type"] == "Prepend":
        return None
    if normalizer["type"] == "Sequence":
        kept = [_without_prepend(part) for part in normalizer["normalizers"]]
        normalizer["normalizers"] = [part for part in kept if part is not None]
    return normalizer


def _vocabulary(backend: Backend, settings: dict[str, Any]) -> Vocabulary:
    added = backend.get_added_tokens_decoder()
    decoders = {part["type"] for part in parts(settings["decoder"])}
    if "ByteLevel" in decoders:
        alphabet = _byte_alphabet()
        byte_tokens: dict[str, int] = {}

        def piece(token: str) -> bytes:
            try:
                return bytes([alphabet[c] for c in token])
            except KeyError:
                return token.encode()
    elif decoders & {"Metaspace", "Replace", "ByteFallback"}:
        byte_tokens = {f"<0x{byte:02X}>": byte for byte in range(256)} if "ByteFallback" in decoders else {}

        def piece(token: str) -> bytes:
            return bytes([byte_tokens[token]]) if token in byte_tokens else token.replace("▁", " ").encode()
    else:
        raise BadRequestError(
            f"--tokenizer-path: a tokenizer that decodes by {sorted(decoders) or 'nothing'} is not supported; "
            "byte-level BPE and SentencePiece styles are"
        )
    vocabulary = backend.get_vocab(with_added_tokens=False)
    pieces = {i: piece(token) for token, i in vocabulary.items()}
    # Decoders treat added tokens like others (Gemma has `▁▁` among them), but what a text spells of a special one is its name.
    pieces |= {i: token.content.encode() if token.special else piece(token.content) for i, token in added.items()}
    return Vocabulary(
        pieces,
        special=[i for i, token in added.items() if token.special],
        boundaries=_boundaries(added, settings),
        added=added,
        byte_ids=[i for token, i in vocabulary.items() if token in byte_tokens and i not in added],
        strips_lead=_strips_lead(backend, pieces),
    )


def _strips_lead(backend: Backend, pieces: dict[int, bytes]) -> bool:
    """Whether the decoder takes a first space for SentencePiece's dummy one."""
    spaced = next((i for i, piece in pieces.items() if piece.startswith(b" ") and piece.strip().isalpha()), None)
    return spaced is not None and not backend.decode([spaced]).startswith(" ")


def _byte_alphabet() -> dict[str, int]:
    """Printable stand-in -> byte, as GPT-2's byte-level BPE has it: printable bytes stand for themselves, the rest follow."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    return alphabet


def _boundaries(added: dict[int, Any], settings: dict[str, Any]) -> list[int]:
    """Added tokens that split a text before anything else looks at it, and touch nothing on either side."""
    normalizer, pre_tokenizer = settings["normalizer"], settings["pre_tokenizer"]
    prefixed = any(part["type"] == "Prepend" for part in parts(normalizer)) or any(
        part.get("prepend_scheme") == "always" or part.get("add_prefix_space") is True for part in parts(pre_tokenizer)
    )
    if prefixed:  # every section between added tokens gains a dummy space: a start is not the sum of its sections
        return []
    # Not behind a token that a longer one could swallow when the text goes on: what is inside of another one, and what
    # another one overlaps that is looked for first (the normalized ones are looked for in what the others left).
    inside_of_others = "\0".join(token.content[:-1] for token in added.values())
    first = [token.content for token in added.values() if not token.normalized]
    beginnings = {content[:size] for content in first for size in range(1, len(content))}
    # A `single_word` token is looked for only where no word goes on, which an encoder of the rest alone cannot see.
    apart = any(token.single_word for token in added.values())
    return [
        i
        for i, token in added.items()
        if not (token.lstrip or token.rstrip or token.single_word)
        and not (token.normalized and normalizer is not None)
        and token.content not in inside_of_others
        and not (apart and re.search(r"\w\Z", token.content))
        and not (token.normalized and any(token.content[k:] in beginnings for k in range(1, len(token.content))))
    ]
