"""Replies and stream events in the shapes of vLLM 0.32.0 (`ServingTokens`, `OpenAIServingCompletion`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from worker.engine.engine import NOTHING, EngineJob, JobProgress
from worker.engine.source import Scored
from worker.vllm.request import VllmRequest
from worker.vocabulary import EngineVocabulary

_FLOOR = -9999.0
_FINGERPRINT = "vllm-0.32.0-embedded"


class VllmWire:
    """Makes JSON of jobs."""

    def __init__(self, vocabulary: EngineVocabulary, model: str) -> None:
        self._vocabulary = vocabulary
        self._model = model

    def whole(
        self,
        request: VllmRequest,
        jobs: Sequence[EngineJob],
        ends: Sequence[JobProgress],
        transfer: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the reply to a request. `transfer`: where another worker finds the cache of its prompt."""
        choices = [
            self._choice(request, job, number, NOTHING, end)
            for number, (job, end) in enumerate(zip(jobs, ends, strict=True))
        ]
        usage = self._usage(jobs, [end.count for end in ends])
        usage["completion_tokens_details"] = None
        if request.native:
            return {
                "request_id": request.name,
                "model": self._model,
                "created": int(time.time()),
                "usage": usage,
                "prompt_logprobs": None,
                "prompt_token_id_logprobs": None,
                "prompt_token_ids": jobs[0].sample.request.input_ids if request.ids else None,
                "mm_placeholders": _ranges(jobs[0]) if request.ids else None,
                **{"metrics": None, "kv_transfer_params": transfer, "ec_transfer_params": None},
                "output_mode": "text" if request.texts else "tokens",
                "choices": choices,
                **jobs[0].sample.request.script.extra,
            }
        for job, choice in zip(jobs, choices, strict=True):
            prompt = job.sample.request.input_ids if request.ids else None
            choice |= {"prompt_logprobs": None, "prompt_token_ids": prompt, "routed_experts": None}
        return {
            **self._head(request),
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": _FINGERPRINT,
            "usage": usage,
            **{"kv_transfer_params": transfer, "ec_transfer_params": None, "metrics": None},
        }

    def event(
        self, request: VllmRequest, job: EngineJob, number: int, since: JobProgress, now: JobProgress
    ) -> dict[str, Any] | None:
        """Return the new part of a choice; None if nothing is worth an event."""
        text = now.text[len(since.text) :] if request.texts else ""
        if now.count == since.count and now.finish is None and not text:
            return None
        if not request.native and not now.count and not text:
            return None  # vLLM leaves out even the end of a generation that has no token
        choice = self._choice(request, job, number, since, now)
        first, prompt = since is NOTHING, job.sample.request.input_ids
        if request.native:
            event: dict[str, Any] = {"request_id": request.name, "usage": None}
            if first and request.ids and number == 0:
                event["prompt_token_ids"] = prompt
                if ranges := _ranges(job):
                    event["mm_placeholders"] = ranges
                event |= job.sample.request.script.extra
            return {**event, "output_mode": "text" if request.texts else "tokens", "choices": [choice]}
        ids = choice.pop("token_ids")
        choice |= {"prompt_token_ids": prompt if first and request.ids else None, "token_ids": ids}
        event = {**self._head(request), "choices": [choice]}
        if now.finish is not None and not request.usage:
            event["system_fingerprint"] = _FINGERPRINT
        return event

    def usage(self, request: VllmRequest, jobs: Sequence[EngineJob]) -> dict[str, Any]:
        """Return the event with the numbers of tokens, which comes last."""
        usage = self._usage(jobs, [len(job.sample.output_ids) for job in jobs])
        details = usage["prompt_tokens_details"]
        usage["prompt_tokens_details"] = {"cached_tokens": details["cached_tokens"]}  # here vLLM leaves nulls out
        if request.native:
            mode = "text" if request.texts else "tokens"
            return {"request_id": request.name, "usage": usage, "output_mode": mode, "choices": []}
        return {**self._head(request), "choices": [], "usage": usage, "system_fingerprint": _FINGERPRINT}

    def _head(self, request: VllmRequest) -> dict[str, Any]:
        return {"id": request.name, "object": "text_completion", "created": int(time.time()), "model": self._model}

    def _usage(self, jobs: Sequence[EngineJob], counts: Sequence[int]) -> dict[str, Any]:
        samples = jobs[0].sample.request.sampling.n
        prompts = sum(len(job.sample.request.input_ids) for job in jobs[::samples])
        return {
            "prompt_tokens": prompts,
            "total_tokens": prompts + sum(counts),
            "completion_tokens": sum(counts),
            # With --enable-prompt-tokens-details.
            "prompt_tokens_details": {
                "cached_tokens": sum(job.cached for job in jobs[::samples]),
                "created_cache_tokens": None,
                "multimodal_tokens": None,
            },
        }

    def _choice(
        self, request: VllmRequest, job: EngineJob, number: int, since: JobProgress, now: JobProgress
    ) -> dict[str, Any]:
        sample, finish = job.sample, now.finish
        ids = sample.output_ids[since.count : now.count]
        text = now.text[len(since.text) :]
        reason = None if finish is None else finish["type"]
        matched = finish.get("matched") if finish is not None and reason == "stop" else None
        if matched == self._vocabulary.eos_id and matched not in sample.request.sampling.stop_token_ids:
            matched = None
        ends = {"finish_reason": reason, "stop_reason": matched}
        if not request.native:
            return {
                "index": number,
                "text": text,
                "logprobs": None if request.top is None else self._flat_logprobs(request, job, since, now),
                **ends,
                "token_ids": ids if request.ids else None,
            }
        spans = None
        if finish is not None:
            spans = sample.versions.spans("", now.count) if now.count else []
        choice = {"index": number, **ends, "token_ids": ids, "routed_experts": None, "sampling_mask": None}
        choice["weight_versions"] = spans
        if request.texts:
            choice["text"] = text
        choice["logprobs"] = None
        if request.top is not None:
            entries = range(since.count, now.count)
            choice["logprobs"] = {"content": [self._entry(request, job, at) for at in entries]}
        return choice

    def _entry(self, request: VllmRequest, job: EngineJob, at: int) -> dict[str, Any]:
        scored = self._scored(job, at)[: max(1, request.top or 0)]
        if request.texts:
            own, *_ = found = [self._spelled(one) for one in scored]
        else:
            found = [{"token_id": token, "logprob": logprob, "rank": 1} for logprob, token in scored]
            own = found[0]
        return {**own, "top_logprobs": found}

    def _spelled(self, scored: Scored) -> dict[str, Any]:
        text = self._text(scored[1])
        return {"token": text, "logprob": max(scored[0] or 0.0, _FLOOR), "bytes": list(text.encode())}

    def _flat_logprobs(
        self, request: VllmRequest, job: EngineJob, since: JobProgress, now: JobProgress
    ) -> dict[str, Any]:
        places = [self._scored(job, at) for at in range(since.count, now.count)]

        def spelled(token: int) -> str:
            return f"token_id:{token}" if request.placeholders else self._text(token)

        tokens = [spelled(scored[0][1]) for scored in places]
        begin = sum(len(spelled(token)) for token in job.sample.output_ids[: since.count])
        return {
            "text_offset": [begin + sum(map(len, tokens[:number])) for number in range(len(tokens))],
            "token_logprobs": [scored[0][0] for scored in places],
            "tokens": tokens,
            "top_logprobs": [{spelled(token): logprob for logprob, token in scored} for scored in places],
        }

    def _scored(self, job: EngineJob, at: int) -> list[Scored]:
        """Return the sampled token and the likeliest ones with their logprobs, the sampled one first and only once."""
        sample = job.sample
        own = (sample.logprobs[at], sample.output_ids[at])
        top = sample.details.output_top[at] if sample.details.output_top else []
        return [own, *(one for one in top if one[1] != own[1])]

    def _text(self, token: int) -> str:
        return self._vocabulary.decode([token], skip_special_tokens=False)


def _ranges(job: EngineJob) -> dict[str, Any] | None:
    """Return where the images are in the prompt."""
    images = job.sample.request.images
    return {"image": [{"offset": one.start, "length": one.length} for one in images]} if images else None
