"""What stands in for SGLang's scheduler and detokenizer: how ids come to be, when they stop, and what text they become.

No HTTP here; `fake_worker` puts this on the wire. It follows SGLang 0.5.23 (`schedule_batch.py`, `output_streamer.py`,
`detokenizer_manager.py`) step by step where the outcome can be seen, including what looks like a mistake there:

* text is decoded in chunks, each primed with what went before (five tokens of the prompt at first), and a chunk that
  ends in U+FFFD is not committed;
* stop strings are looked for in the last few *tokens*, spelled with their special tokens, and cut out of the text,
  which is without them: so a stop string can end a reply and still not be in its text.
"""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer
from transformers import AutoTokenizer

_PRIMING = 5  # INIT_INCREMENTAL_DETOKENIZATION_OFFSET
_FORCED_INTERVAL = 50  # SGLANG_FORCE_STREAM_INTERVAL: how often a reply that is not streamed is decoded

FinishReason = dict[str, Any]
Finish = Literal["eos", "length", "abort"]


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A tokenizer folder, loaded by itself: nothing of the code under test is used here."""

    tokenizer: Tokenizer
    eos_id: int
    eos_ids: frozenset[int]  # with those of generation_config.json, which SGLang heeds too
    size: int
    ordinary: tuple[int, ...]  # ids that are neither special nor added
    special: frozenset[int]
    crumbs: tuple[int, ...]  # ordinary ids of one to three ASCII letters or digits: what an encoder would have merged

    def encode(self, text: str) -> list[int]:
        """As the worker encodes a prompt: with whatever special tokens the tokenizer adds by itself."""
        return list(self.tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))


@lru_cache(maxsize=8)
def load_vocabulary(folder: str | Path) -> Vocabulary:
    """Load a Hugging Face tokenizer folder, once per process."""
    wrapper = AutoTokenizer.from_pretrained(str(folder))
    tokenizer: Tokenizer = wrapper.backend_tokenizer
    added = tokenizer.get_added_tokens_decoder()
    generation = Path(folder) / "generation_config.json"
    more = json.loads(generation.read_text()).get("eos_token_id", []) if generation.is_file() else []
    vocab = {token: number for token, number in tokenizer.get_vocab().items() if number not in added}
    return Vocabulary(
        tokenizer=tokenizer,
        eos_id=wrapper.eos_token_id,
        eos_ids=frozenset([wrapper.eos_token_id, *([more] if isinstance(more, int) else more)]),
        size=tokenizer.get_vocab_size(with_added_tokens=True),
        ordinary=tuple(sorted(vocab.values())),
        special=frozenset(number for number, token in added.items() if token.special),
        crumbs=tuple(sorted(number for token, number in vocab.items() if _is_crumb(token))),
    )


def _is_crumb(token: str) -> bool:
    return len(token) <= 3 and token.isascii() and token.isalnum()


def float32(value: float) -> float:
    """The nearest float32, as the double that its decimal form reads back as: what an engine's logprobs look like."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


@dataclass(frozen=True)
class Sampling:
    """`sampling_params`, as far as they show in a reply."""

    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1
    stream_interval: int | None = None

    @classmethod
    def parse(cls, params: dict[str, Any]) -> Sampling:
        """From JSON that has already been checked; null means the default, as in SGLang."""

        def get(name: str, default: Any) -> Any:
            value = params.get(name)
            return default if value is None else value

        def strings(name: str) -> tuple[str, ...]:
            value = get(name, ())
            return (value,) if isinstance(value, str) else tuple(value)

        return cls(
            max_new_tokens=get("max_new_tokens", 128),
            stop=strings("stop"),
            stop_regex=strings("stop_regex"),
            stop_token_ids=frozenset(get("stop_token_ids", ())),
            ignore_eos=get("ignore_eos", False),
            skip_special_tokens=get("skip_special_tokens", True),
            no_stop_trim=get("no_stop_trim", False),
            n=max(1, get("n", 1)),
            stream_interval=params.get("stream_interval"),
        )


@dataclass(frozen=True)
class Script:
    """What one reply shall be. `ids` are sampled first; then `finish` says how it ends, and None goes on at random."""

    ids: tuple[int, ...] = ()
    finish: Finish | None = None
    logprobs: tuple[float, ...] = ()
    fault: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # further keys at the top level of the reply
    extra_meta: dict[str, Any] = field(default_factory=dict)  # and in its meta_info


class Detokenizer:
    """SGLang's incremental detokenization of one reply (`DetokenizerManager._decode_batch_token_id_output`)."""

    def __init__(self, vocabulary: Vocabulary, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        self._vocabulary = vocabulary
        self._sampling = sampling
        self._ids = list(prompt_ids[-_PRIMING:])
        self._surr = 0  # where the priming begins
        self._read = len(self._ids)  # where what is not committed yet begins
        self._committed = ""
        self._sent = 0

    def push(self, ids: Sequence[int], finish: FinishReason | None) -> str:
        """Take more ids, and the finish reason with the last of them; return the text to be sent on."""
        self._ids.extend(ids)
        skip = self._sampling.skip_special_tokens
        pending = self._trim_token(self._ids[self._surr :], finish)
        primed = self._vocabulary.decode(self._ids[self._surr : self._read], skip_special_tokens=skip)
        new = self._vocabulary.decode(pending, skip_special_tokens=skip)[len(primed) :]
        already = self._sent - len(self._committed)
        if finish is not None:
            text = self._trim_string(self._committed + new, finish)
            out = text[self._sent :]
            self._sent = len(text)
            return out
        if new and not new.endswith("�"):
            self._committed += new
            self._surr, self._read = self._read, len(self._ids)
            self._sent = len(self._committed)
            return new[already:]
        printable = _printable(new)
        self._sent = len(self._committed) + len(printable)
        return printable[already:]

    def _trim_token(self, ids: list[int], finish: FinishReason | None) -> list[int]:
        if finish is None or not isinstance(finish.get("matched"), int) or self._sampling.no_stop_trim:
            return ids
        return ids[:-1]

    def _trim_string(self, text: str, finish: FinishReason) -> str:
        matched = finish.get("matched")
        if not isinstance(matched, str) or (at := text.find(matched)) < 0:
            return text
        return text[: at + len(matched)] if self._sampling.no_stop_trim else text[:at]


def _printable(text: str) -> str:
    """`sglang.utils.find_printable_text`: the whole words of a text that may still change at its end."""
    if text.endswith("\n") or (text and _is_cjk(text[-1])):
        return text
    if len(text) > 1 and _is_cjk(text[-2]):
        return text[:-1]
    return text[: text.rfind(" ") + 1]


def _is_cjk(character: str) -> bool:
    point = ord(character)
    blocks = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F))
    more = ((0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F))
    return any(low <= point <= high for low, high in blocks + more)


class Sample:
    """One reply in the making: `step()` samples one token and looks whether it was the last."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        script: Script,
        rng: random.Random,
        pool: Sequence[int] | None,
        eos_share: float,
    ) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self.sampling = sampling
        self.script = script
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[str] = []
        self.finish: FinishReason | None = None
        self._vocabulary = vocabulary
        self._rng = rng
        self._pool = pool
        self._eos_share = eos_share
        if sampling.max_new_tokens == 0:
            self.finish = {"type": "length", "length": 0}

    def step(self, version: str) -> None:
        """Sample one token under `version`."""
        count = len(self.output_ids)
        self.output_ids.append(self._next())
        given = self.script.logprobs
        self.logprobs.append(given[count] if count < len(given) else float32(-self._rng.expovariate(0.7)))
        self.versions.append(version)
        self.finish = self._finished()

    def abort(self) -> None:
        """End it as SGLang ends a request that is already running."""
        self.finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}

    def version_spans(self, current: str) -> list[dict[str, Any]]:
        """`meta_info.weight_versions`: half-open spans of output tokens; never empty."""
        spans: list[dict[str, Any]] = []
        for number, version in enumerate(self.versions):
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = number + 1
            else:
                spans.append({"version": version, "start": number, "end": number + 1})
        return spans or [{"version": current, "start": 0, "end": 0}]

    def may_be_stopping(self) -> bool:
        """Is the end of the text the beginning of a stop string? Then a stream waits before it says more."""
        if not self.sampling.stop:
            return False
        tail = self._tail()
        return any(
            stop in tail or any(tail.endswith(stop[:size]) for size in range(1, len(stop) + 1))
            for stop in self.sampling.stop
            if stop
        )

    def _next(self) -> int:
        count, script = len(self.output_ids), self.script
        if count < len(script.ids):
            return script.ids[count]
        if script.finish == "eos" or self._rng.random() < self._eos_share:
            return self._vocabulary.eos_id
        if self._pool is not None:
            return self._rng.choice(self._pool)
        # Ids drawn evenly are long words, which re-encoding mostly finds again; crumbs between them it does not.
        crumb = self._rng.random() < 0.5
        return self._rng.choice(self._vocabulary.crumbs if crumb else self._vocabulary.ordinary)

    def _finished(self) -> FinishReason | None:
        # The order is SGLang's: stop strings, patterns, tokens, length.
        sampling, last, count = self.sampling, self.output_ids[-1], len(self.output_ids)
        tail = self._tail()
        for stop in sampling.stop:
            if stop in tail:
                return {"type": "stop", "matched": stop}
        for pattern in sampling.stop_regex:
            if re.search(pattern, tail):
                return {"type": "stop", "matched": pattern}
        if not sampling.ignore_eos and last in self._vocabulary.eos_ids | sampling.stop_token_ids:
            return {"type": "stop", "matched": last}
        if count >= sampling.max_new_tokens:
            return {"type": "length", "length": sampling.max_new_tokens}
        if count >= len(self.script.ids) and self.script.finish == "length":
            return {"type": "length", "length": count}
        if count >= len(self.script.ids) and self.script.finish == "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        return None

    def _tail(self) -> str:
        """The text of the last tokens, as many as the longest stop may have when it is encoded, and one more."""
        sampling = self.sampling
        if not sampling.stop and not sampling.stop_regex:
            return ""
        window = max(
            _longest(sampling.stop, lambda stop: _encoded_length(self._vocabulary, stop)),
            _longest(sampling.stop_regex, _pattern_length),
        )
        return self._vocabulary.decode(self.output_ids[-(window + 1) :], skip_special_tokens=False)


def _longest(items: Sequence[str], measure: Callable[[str], int]) -> int:
    return max((measure(item) for item in items), default=0)


@lru_cache(maxsize=256)
def _encoded_length(vocabulary: Vocabulary, text: str) -> int:
    return len(vocabulary.tokenizer.encode(text, add_special_tokens=False).ids)


@lru_cache(maxsize=256)
def _pattern_length(pattern: str) -> int:
    # SGLang measures a pattern by the longest text it can match; what has no longest gets a generous window.
    pieces = re.sub(r"\\.|\[[^]]*\]", "x", pattern)
    return 64 if re.search(r"[*+{]", pieces) else len(pieces)


def reply_interval(sampling: Sampling, *, stream: bool, default: int) -> int:
    """Every how many tokens a reply is decoded, and, if it is a stream, sent."""
    if not stream:
        return _FORCED_INTERVAL
    return sampling.stream_interval or default
