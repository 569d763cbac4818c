"""A request for completions, whatever the form of its body."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

Prompts = list[str] | list[list[int]]


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request, parsed and checked.

    Attributes:
        prompts: texts, or lists of ids; none of them is empty.
        batch: whether they came as a list.
        samples: `n`, for each prompt.
        sampling: `sampling_params` for `/generate`, with `n` if it is more than 1.
        stream_usage: whether a stream ends with the token counts.
        logprobs: how many alternatives of each token the client wants; None for no logprobs.
        token_ids: whether the client wants the ids of prompt and reply.
        tokens_as_ids: whether logprobs name each token by its id, not by its text.
        echo: whether the reply's text begins with the prompt's.
        extra: further top-level fields for the worker, raw (`lora_path`, `return_trajectory`, ...).
    """

    prompts: Prompts
    batch: bool = False
    samples: int = 1
    sampling: dict[str, Any]
    stream: bool = False
    stream_usage: bool = False
    logprobs: int | None = None
    echo: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    model: str = ""
    extra: dict[str, Raw] = {}

    @property
    def replies(self) -> int:
        """The number of replies; those of one prompt are neighbours."""
        return len(self.prompts) * self.samples

    @property
    def listed(self) -> bool:
        return self.batch or self.samples > 1

    @property
    def skips_special(self) -> bool:
        """Whether the text leaves special tokens out."""
        return self.sampling.get("skip_special_tokens") is not False

    def generate(self, rid: str) -> bytes:
        """Return the body of the `/generate` that answers it. The worker uses `rid` only if there is one sample."""
        fields: dict[str, Any] = dict(self.extra)
        fields["text" if isinstance(self.prompts[0], str) else "input_ids"] = (
            self.prompts if self.batch else self.prompts[0]
        )
        fields["sampling_params"] = self.sampling
        fields["stream"] = self.stream
        if self.samples == 1:
            fields["rid"] = rid
        if self.token_ids:
            fields["return_prompt_token_ids"] = True
        if self.logprobs is not None:
            fields["return_logprob"] = True
            if self.logprobs:
                fields["top_logprobs_num"] = self.logprobs
        return msgspec.json.encode(fields)
