"""The tokenizer: texts to ids.

A text is encoded in one of two ways. A **start** is encoded as the worker itself would encode it: with BOS where the
tokenizer adds one, with SentencePiece's dummy space. A **tail** follows tokens that are there already and must not gain
what a start gains. It has a separate encoder, made from the JSON of the first with everything removed that only a start gains.
(To encode a sentinel before the tail and cut off its ids again fails if the text merges with the sentinel.)
"""

from __future__ import annotations

import asyncio
import codecs
import logging
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from middleware_hub.spans.chain import SpanFlag, TokenSpan, pack_ids, unpack_ids
from middleware_hub.spans.media import Encoded, Pictures, digests_in, keyed_ends, mark, plain_text
from middleware_hub.tokenizer import loaded
from middleware_hub.tokenizer.alignment import Alignment, align_context
from middleware_hub.tokenizer.encoder import Encode, FastEncoder, LateEncoder, encoder
from middleware_hub.tokenizer.settings import fingerprint, is_verbatim, parts, read_settings, tail_settings
from middleware_hub.tokenizer.vocabulary import Vocabulary
from router.config.radix import SpecialTokens, TokenizerBackend
from router.engines.form.limits import PROMPT_LIMITS, PromptLimits
from router.errors import BadRequestError

logger = logging.getLogger(__name__)

LONG_TEXT = 8_192
"""Longer texts are encoded in a thread: these take about 2 ms (200 to 320 us per 1,000 characters, measured)."""

LONG_FOR_FASTOKENS = 6 * LONG_TEXT
"""The same for the faster encoder."""

_VERBATIM = Alignment(SpanFlag.NONE)


class Tokenizer:
    """Encodes texts, and spells ids.

    Args:
        backend: the tokenizer as `tokenizers` has it; encodes starts.
        add_special_tokens: `auto` adds a BOS unless the text spells it already, `always` adds it, `never` does not.
        vocabulary_size: the model's, if known: the limit for ids that clients send.
        encodes_by: see `encoder`.
        limits: the limits of a text. A longer text raises TextTooLongError.
        tokenizer_json: the backend as text, if that is known: writing it takes a while.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        add_special_tokens: SpecialTokens = "auto",
        vocabulary_size: int | None = None,
        encodes_by: TokenizerBackend = "auto",
        limits: PromptLimits = PROMPT_LIMITS,
        tokenizer_json: str | None = None,
    ) -> None:
        self._limits = limits
        backend.no_truncation()
        backend.no_padding()
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="encode")
        settings = read_settings(tokenizer_json or backend.to_str())
        tail = tail_settings(settings)
        self._start = backend
        self._starts_plain = all(settings[key] == tail[key] for key in ("normalizer", "pre_tokenizer"))
        self._choose_encoder(backend, settings, encodes_by, self._use_for_starts)
        if not self._starts_plain:
            self._choose_encoder(self._tail, tail, encodes_by, self._use_for_tails)
        self._verbatim = is_verbatim(settings)
        self._mode = add_special_tokens
        probe = backend.encode(loaded.PROBES[0])
        added = probe.special_tokens_mask
        lead = next((i for i, flag in enumerate(added) if not flag), len(added))
        self.bos: list[int] = probe.ids[:lead]
        self._packed_bos = pack_ids(self.bos)
        self.vocabulary = read_vocabulary(backend, settings)
        self.vocabulary.size = max(vocabulary_size or 0, len(self.vocabulary))
        self.vocabulary.certain = vocabulary_size is not None
        self.chat_template: str | dict[str, str] | None = None  # if several, each has a name: `default`, `tool_use`
        self.special_tokens_map: dict[str, str] = {}

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
            BadRequestError: it cannot be loaded, or the text of its tokens is not known here.
        """
        found, backend = loaded.load(path, trust_remote_code=trust_remote_code)
        tokenizer = cls(
            backend,
            add_special_tokens=add_special_tokens,
            vocabulary_size=found.vocabulary_size,
            encodes_by=encodes_by,
            limits=limits,
            tokenizer_json=found.tokenizer_json,
        )
        tokenizer.chat_template = found.chat_template
        tokenizer.special_tokens_map = found.special_tokens_map
        tokenizer.fingerprint = found.fingerprint
        for text, expected in zip(loaded.PROBES, found.probes, strict=True):
            mine = tokenizer.bos + backend.encode(text, add_special_tokens=False).ids
            if add_special_tokens == "auto" and expected[: len(mine)] != mine:
                logger.warning("the tokenizer of %s encodes %r as %s, its backend as %s", path, text, expected, mine)
        return tokenizer

    def _choose_encoder(
        self, backend: Backend, settings: dict[str, Any], encodes_by: TokenizerBackend, use: Callable[[Encode], None]
    ) -> None:
        if encodes_by == "auto":
            use(LateEncoder(backend, settings, self._limits, run=self._threads.submit, use=use))
        else:
            use(encoder(backend, settings, encodes_by, self._limits))

    def _use_for_starts(self, encode: Encode) -> None:
        self._encode_start = encode
        self._long = LONG_FOR_FASTOKENS if isinstance(encode, FastEncoder) else LONG_TEXT
        if self._starts_plain:
            self._use_for_tails(encode)

    def _use_for_tails(self, encode: Encode) -> None:
        self._encode_tail = encode

    # Encoding ------------------------------------------------------------------------------------------------------------

    @property
    def adds_bos(self) -> bool:
        """Whether a start has tokens in front of its text."""
        return bool(self.bos) and self._mode != "never"

    def encode_start(self, text: str) -> list[int]:
        """Return the ids that the worker itself would make of this text, without anything appended."""
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
        """Return the ids of `encode`, packed as spans keep them."""
        encode = self._packed_start if start else self._packed_tail
        if len(text) < self._long:
            return encode(text)
        return await asyncio.get_running_loop().run_in_executor(self._threads, encode, text)

    async def encode_aligned(self, text: str, *, start: bool) -> tuple[bytes, Alignment]:
        """Return the ids of `encode_packed`, and how they lie over the text.

        With a normalizer, this may cost twice as much.
        """
        if len(text) < self._long:
            return self._aligned(text, start)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._aligned, text, start)

    async def encode_keyed(self, keyed: str, placeholder: str, *, start: bool) -> Encoded:
        """Return the compact ids of a text with the marks of pictures, and how they lie over it.

        The text is encoded with the placeholder in place of each mark, as an engine would encode it.
        """
        plain = plain_text(keyed, placeholder)
        ids, alignment = await self.encode_aligned(plain, start=start)
        places = np.flatnonzero(np.frombuffer(ids, dtype=np.int32) == self._start.token_to_id(placeholder)).tolist()
        pictures = tuple(zip(places, digests_in(keyed), strict=True))
        if alignment.flags & SpanFlag.WHOLE:
            return Encoded(ids, None, alignment.flags, pictures)
        span = TokenSpan(None, 0, 0, ids, len(plain), flags=alignment.flags, ends=alignment.ends)
        return Encoded(ids, keyed_ends(self.vocabulary.ends(span), keyed, placeholder), alignment.flags, pictures)

    def spell_keyed(self, ids: Sequence[int], pictures: Pictures) -> tuple[str, Encoded]:
        """Return the keyed text of compact ids, each placeholder of which is a picture's, and how they lie over it."""
        placeholder, plain = pictures.placeholder, self.spell_prompt(ids)
        alignment, packed = self.align(ids, plain, start=True), pack_ids(ids)
        span = TokenSpan(None, 0, 0, packed, len(plain), flags=alignment.flags, ends=alignment.ends)
        ends = self.vocabulary.ends(span)
        places = np.flatnonzero(np.frombuffer(packed, dtype=np.int32) == self._start.token_to_id(placeholder)).tolist()
        parts, begin = list[str](), 0
        for place, digest in zip(places, pictures.digests, strict=True):
            end = int(ends[place])
            parts += (plain[begin : end - len(placeholder)], mark(digest))
            begin = end
        keyed = "".join((*parts, plain[begin:]))
        moved = keyed_ends(ends, keyed, placeholder)
        flags = alignment.flags | SpanFlag.GIVEN
        return keyed, Encoded(packed, moved, flags, tuple(zip(places, pictures.digests, strict=True)))

    def _aligned(self, text: str, start: bool) -> tuple[bytes, Alignment]:
        ids = self._packed_start(text) if start else self._packed_tail(text)
        if self._verbatim and text.isascii() and not (start and self.bos):
            return ids, _VERBATIM
        return ids, self.align(unpack_ids(ids), text, start=start)

    def align(self, ids: Sequence[int], text: str, *, start: bool) -> Alignment:
        """Return how the ids of a context lie over its text."""

        def offsets() -> list[tuple[int, int]] | None:
            encoding = (self._untrimmed if start else self._tail).encode(text, add_special_tokens=False)
            lead = len(ids) - len(encoding.ids)
            return [(0, 0)] * lead + encoding.offsets if list(ids[lead:]) == encoding.ids else None

        return align_context(self.vocabulary, ids, text, bos=self.bos if start else (), offsets=offsets)

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(read_settings(self._start.to_str()))

    @cached_property
    def _tail(self) -> Backend:
        return Backend.from_str(_dump(tail_settings(read_settings(self._start.to_str()))))

    @cached_property
    def _untrimmed(self) -> Backend:
        """The encoder of a start without its post-processor, which may trim spaces off the offsets."""
        if self._starts_plain:
            return self._tail
        return Backend.from_str(_dump({**read_settings(self._start.to_str()), "post_processor": None}))

    def spell_prompt(self, ids: Sequence[int]) -> str:
        """Return the text of a client's ids: special tokens spelled, without a leading BOS and the dummy space after it."""
        led = bool(self.bos) and list(ids[: len(self.bos)]) == self.bos
        text = self.vocabulary.spell(ids[len(self.bos) :] if led else ids)
        return text[1:] if led and self._dummy_prefix and text[:1] == " " else text

    @cached_property
    def _dummy_prefix(self) -> bool:
        """Return whether a start gains a space, so that `x` at a start differs from `x` after other text."""
        first = self._start.encode("x", add_special_tokens=False).ids
        return self.vocabulary.spell(first).startswith(" ")


def _dump(settings: dict[str, Any]) -> str:
    return msgspec.json.encode(settings).decode()


def read_vocabulary(backend: Backend, settings: dict[str, Any]) -> Vocabulary:
    """Return the spelling of every id. Raises BadRequestError for a decoder that is not supported."""
    added = backend.get_added_tokens_decoder()
    decoders = {part["type"] for part in parts(settings["decoder"])}
    if "ByteLevel" in decoders:
        alphabet = {ord(stand_in): byte for stand_in, byte in _byte_alphabet().items()}
        byte_tokens: dict[str, int] = {}

        def piece(token: str) -> bytes:
            try:
                return codecs.charmap_encode(token, "strict", alphabet)[0]
            except UnicodeEncodeError:
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
    listed = settings["model"]["vocab"]  # a unigram model's is a list, with scores
    vocabulary = listed if isinstance(listed, dict) else backend.get_vocab(with_added_tokens=False)
    pieces = {i: piece(token) for token, i in vocabulary.items()}
    # Decoders treat added tokens like others (Gemma has `▁▁` among them), but a special token is spelled by its name.
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
    """Return whether the decoder takes a leading space for SentencePiece's dummy space."""
    spaced = next((i for i, piece in pieces.items() if piece.startswith(b" ") and piece.strip().isalpha()), None)
    return spaced is not None and not backend.decode([spaced]).startswith(" ")


def _byte_alphabet() -> dict[str, int]:
    """Return stand-in -> byte, as in GPT-2's byte-level BPE: printable bytes stand for themselves, the rest follow."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    return alphabet


def _boundaries(added: dict[int, Any], settings: dict[str, Any]) -> list[int]:
    """Return the added tokens that split a text before any other step, and touch nothing on either side."""
    normalizer, pre_tokenizer = settings["normalizer"], settings["pre_tokenizer"]
    prefixed = any(part["type"] == "Prepend" for part in parts(normalizer)) or any(
        part.get("prepend_scheme") == "always" or part.get("add_prefix_space") is True for part in parts(pre_tokenizer)
    )
    if prefixed:  # every section between added tokens gains a dummy space: a start is not the sum of its sections
        return []
    # Tokens that a longer token could swallow when the text goes on are left out: those inside another token, and those
    # overlapped by another token that is matched first (normalized tokens are matched in what the others left).
    inside_of_others = "\0".join(token.content[:-1] for token in added.values())
    first = [token.content for token in added.values() if not token.normalized]
    beginnings = {content[:size] for content in first for size in range(1, len(content))}
    # A `single_word` token matches only where no word goes on, which an encoder that has only the rest cannot see.
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
