"""The radix tree: its tokenizer, and how many tokens to remember for how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from router.config.flag import NOT_NEGATIVE, Section, flag
from router.config.token_budget import DEFAULT_BUDGET, token_budget

SpecialTokens = Literal["auto", "always", "never"]
TokenizerBackend = Literal["auto", "huggingface", "fastokens"]


@dataclass(frozen=True)
class RadixConfig(Section):
    """The memory of tokens. With `unretrieved_versions` None, replies that were never retrieved are evicted last."""

    TITLE = "the memory of tokens"

    tokenizer_path: str | None = flag(
        "--tokenizer-path",
        None,
        "the workers' tokenizer; required to remember tokens. That of demo workers is called demo, with images demo-images",
        metavar="DIR-or-hub-id",
    )
    tokenizer_backend: TokenizerBackend = flag(
        "--tokenizer-backend",
        "auto",
        "library that encodes texts: the workers' own (huggingface), or a faster one for byte-level BPE; auto is fastokens"
        " where both give the same ids",
    )
    max_text_tokens: int = flag(
        "--max-text-tokens", 512 * 1024, "most tokens of a text or prompt, and 8 characters for each; more gets 413"
    )
    trust_remote_code: bool = flag("--trust-remote-code", False, "run code that comes with the tokenizer")
    max_tokens: int | None = flag("--radix-max-tokens", None, "most tokens to remember", unset=DEFAULT_BUDGET)
    keep_versions: int = flag(
        "--radix-keep-versions", 5, "age in weight versions at which evictions count as `version`", limit=NOT_NEGATIVE
    )
    unretrieved_versions: int | None = flag(
        "--radix-unretrieved-versions",
        None,
        "evict a reply first that was neither retrieved nor used for this many weight versions",
        unset="never: it is evicted last",
    )
    force_logprobs: bool = flag(
        "--force-logprobs", True, "have workers always send logprobs; off leaves retrievals without unrequested ones"
    )
    add_special_tokens: SpecialTokens = flag(
        "--add-special-tokens",
        "auto",
        "special tokens before a text that continues nothing; auto adds what the tokenizer adds, but no second BOS to a text"
        " that spells one",
    )

    inspector: bool = flag(
        "--inspector", True, "serve /inspect: a page, and an API, that show recorded conversations token by token"
    )

    @property
    def token_budget(self) -> int:
        """`max_tokens`, or as many as fit into a quarter of the memory."""
        return token_budget(self.max_tokens)
