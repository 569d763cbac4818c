"""A reply as vLLM ends and spells it: stop strings are looked for in its text, which never has half of a character."""

from __future__ import annotations

from tokenizers.decoders import DecodeStream

from worker.engine.generated_reply import GeneratedReply
from worker.engine.records import ABORTED, length, stop
from worker.engine.sample import ReplyRequest
from worker.engine.source import Source
from worker.vocabulary import EngineVocabulary


class VllmReply(GeneratedReply):
    """Decodes token by token, as vLLM's `FastIncrementalDetokenizer` does, primed with the whole prompt."""

    plain_interval = 1

    def __init__(self, vocabulary: EngineVocabulary, source: Source, request: ReplyRequest, seed: str) -> None:
        super().__init__(vocabulary, source, request, seed)
        sampling = request.sampling
        self._vocabulary = vocabulary
        self._stream = DecodeStream(ids=list(request.input_ids), skip_special_tokens=sampling.skip_special_tokens)
        self._stop_ids = frozenset() if sampling.ignore_eos else vocabulary.eos_ids
        self._stop_ids |= sampling.stop_token_ids
        self._held = max((len(text) - 1 for text in sampling.stop), default=0) if not sampling.no_stop_trim else 0
        self._whole = ""

    def advance(self, count: int, version: str) -> None:
        for _ in range(count):
            self._sample()
            self._end()
            if self.finish is not None:
                break
        self.versions.extend(version, len(self.output_ids))

    def text(self) -> str:
        if self.finish is None and self._held:
            return self._whole[: -self._held]
        return self._whole

    def holds_back(self) -> bool:
        return False

    def _end(self) -> None:
        """Spell the last token, and decide whether it ends the reply."""
        sampling, script, token, count = (
            self.request.sampling,
            self.request.script,
            self.output_ids[-1],
            len(self.output_ids),
        )
        enough = count >= sampling.min_new_tokens
        if enough and token in self._stop_ids:
            self.finish = stop(token)
        elif count >= sampling.max_new_tokens:
            self.finish = length(sampling.max_new_tokens)
        elif count >= len(script.ids) and script.finish == "length":
            self.finish = length(count)
        elif count >= len(script.ids) and script.finish == "abort":
            self.finish = dict(ABORTED)
        if self.finish is not None and self.finish["type"] == "stop" and not sampling.no_stop_trim:
            return  # its text is left out
        before = len(self._whole)
        self._whole += self._stream.step(self._vocabulary.tokenizer, token) or ""
        if count <= sampling.min_new_tokens and sampling.min_new_tokens:
            return
        found = [
            (at + len(text), at, text)
            for text in sampling.stop
            if (at := self._whole.find(text, max(0, before - len(text) + 1))) >= 0 and len(self._whole) > before
        ]
        if found:
            end, begin, text = min(found, key=lambda one: one[0])
            self.finish = stop(text)
            self._whole = self._whole[: end if sampling.no_stop_trim else begin]
