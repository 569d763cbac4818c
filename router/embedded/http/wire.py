"""Replies and stream events in the shapes of SGLang 0.5.23 (`TokenizerManager._handle_batch_output`)."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from router.embedded.engine.engine import Job, Progress
from router.embedded.engine.faults import BUSY_REASON, spoil
from router.embedded.engine.source import Scored
from router.embedded.models.vocabulary import Vocabulary

StreamStyle = Literal["cumulative", "incremental", "mixed"]

_LATENCY = 0.01  # seconds, of every reply


class Wire:
    """Makes JSON of jobs.

    Args:
        vocabulary: for `return_text_in_logprobs`.
        stream_style: cumulative (SGLang's default), incremental (`--incremental-streaming-output`), or mixed (up to 0.5.5:
            `output_ids` are deltas, the rest is cumulative).
        version_spans: False leaves `weight_versions` out, as before 0.5.19.
    """

    def __init__(self, vocabulary: Vocabulary, *, stream_style: StreamStyle, version_spans: bool) -> None:
        self.stream_style = stream_style
        self._vocabulary = vocabulary
        self.version_spans = version_spans

    def payload(
        self,
        job: Job,
        now: Progress,
        current: str,
        *,
        since: Progress | None = None,
        index: int | None = None,
        busy: bool = False,
    ) -> bytes:
        """A reply, or a stream's event if `since` is what was sent before it.

        Args:
            job: whose reply.
            now: as far as it has come.
            current: the present weight version.
            since: the event before; of the first one, `engine.NOTHING`.
            index: the reply's place in a batch that is streamed.
            busy: it is an abort with a status code, whatever became of it.
        """
        sample, count = job.sample, now.count
        style = "cumulative" if since is None else self.stream_style
        ids_from = rest_from = text_from = 0
        if since is not None and now.dequeued:
            # What ends a stream of deltas here is one id that was sent before, and all the rest.
            ids_from = max(0, count - 1) if style == "incremental" else 0
        elif since is not None:
            ids_from = 0 if style == "cumulative" else since.count
            rest_from, text_from = (since.count, len(since.text)) if style == "incremental" else (0, 0)
        logprobs = self._logprobs(job, rest_from, count) if sample.asked.logprobs else {}
        meta: dict[str, Any] = {"id": job.record.rid, "finish_reason": now.finish}
        if now.dequeued:
            meta |= {"weight_version": current, "e2e_latency": _LATENCY}
            self._add_versions(meta, job, current, count)
            meta |= {**logprobs, "completion_tokens": count}
        else:
            meta |= {
                "prompt_tokens": len(sample.prompt_ids),
                "weight_version": current,
                "num_retractions": 0,
                **logprobs,
                "reasoning_tokens": 0,
                "completion_tokens": count,
                "cached_tokens": 0,
            }
            if now.finish is not None:
                self._add_versions(meta, job, current, count)
            meta |= {"cached_tokens_details": None, "dp_rank": None}
            if now.finish is not None:
                meta["e2e_latency"] = _LATENCY
        if since is None or since.count == 0:
            meta["response_sent_to_client_ts"] = time.time()  # once per reply: of a stream, in its first event
        payload: dict[str, Any] = {
            "text": now.text[text_from:],
            "output_ids": sample.output_ids[ids_from:count],
            "meta_info": meta,
        }
        if sample.asked.prompt_ids:
            payload["prompt_token_ids"] = sample.prompt_ids
        if index is not None:
            payload["index"] = index
        payload.update(sample.script.extra)
        meta.update(sample.script.extra_meta)
        if busy:
            meta["finish_reason"] = BUSY_REASON
        if job.fault is not None:
            spoil(payload, job.fault)
        if job.fault == "nan_logprob":
            return json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode()  # msgspec writes null
        return msgspec.json.encode(payload)

    def _add_versions(self, meta: dict[str, Any], job: Job, current: str, count: int) -> None:
        if self.version_spans:
            meta["weight_versions"] = job.sample.versions.spans(current, count)
            meta["weight_version"] = meta["weight_versions"][-1]["version"]

    def _logprobs(self, job: Job, start: int, end: int) -> dict[str, Any]:
        """Of the prompt always all, and of the reply a part."""
        sample, asked, beside = job.sample, job.sample.asked, job.sample.beside
        outputs: list[Any] = sample.entries(start, end)
        found: dict[str, Any] = {
            "input_token_logprobs": self._entries(beside.prompt, texts=asked.texts),
            "output_token_logprobs": outputs
            if not asked.texts
            else [(logprob, token, self._text(token)) for logprob, token, _ in outputs],
            "output_token_logprobs_length": end,
        }
        for key, asked_for, inputs, output in (
            ("top_logprobs", asked.top, beside.prompt_top, beside.output_top),
            ("token_ids_logprobs", asked.chosen, beside.prompt_chosen, beside.output_chosen),
        ):
            if asked_for:
                found[f"input_{key}"] = [one and self._entries(one, texts=asked.texts) for one in inputs]
                found[f"output_{key}"] = [self._entries(one, texts=asked.texts) for one in output[start:end]]
        return found

    def _entries(self, scored: Sequence[Scored], *, texts: bool) -> list[tuple[float | None, int, str | None]]:
        return [(logprob, token, self._text(token) if texts else None) for logprob, token in scored]

    def _text(self, token: int) -> str:
        return self._vocabulary.decode([token], skip_special_tokens=False)
