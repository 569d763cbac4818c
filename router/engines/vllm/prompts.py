"""What a request asks for, as far as its reply depends on it."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from router.engines.engine import Call


class Prompt(msgspec.Struct, frozen=True):
    """What is asked for one prompt, and what its reply needs of that.

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
    """

    call: Call
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


class Asked(msgspec.Struct, frozen=True):
    """A whole body of `/generate`. `listed`: the reply is a list."""

    prompts: list[Prompt]
    listed: bool
    stream: bool
