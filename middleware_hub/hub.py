"""What the middlewares of one router have in common: one tokenizer, one clock of weight versions, one judge of replies."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from middleware_hub.radix.recording import Judge
from middleware_hub.radix.tree import RadixTree
from middleware_hub.spans.versions import VersionClock
from middleware_hub.tokenizer.tokenizer import Tokenizer
from router.config import RadixConfig
from router.engines.sglang.limits import PromptLimits
from router.errors import BadRequestError
from router.plugins import MiddlewareContext


class Hub:
    """One for each application; its tokenizer may be that of others, too."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.clock = VersionClock()
        self.tree: RadixTree | None = None
        """The texts that are remembered, if there is a middleware that does so."""

    @classmethod
    def of(cls, context: MiddlewareContext) -> Hub:
        """The one of this application, made for whoever asks first.

        Raises BadRequestError without a usable `--tokenizer-path`.
        """
        found = context.shared.get(cls)
        if not isinstance(found, Hub):
            found = context.shared[cls] = cls(load(context.config.radix))
        return found

    @cached_property
    def judge(self) -> Judge:
        """Holds replies against what was asked."""
        return Judge(self.tokenizer, self.clock)

    def chat_template(self, path: str | None) -> str | None:
        """The template in a file (`--chat-template`), or the tokenizer's own; None if it has none. Raises BadRequestError."""
        if path is not None:
            try:
                return Path(path).read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise BadRequestError(f"--chat-template {path}: {error}") from error
        found = self.tokenizer.chat_template
        if isinstance(found, dict):
            # Named templates are of old; those for tools serve without tools, too.
            return found.get("tool_use") or found.get("default") or next(iter(found.values()), None)
        return found


def load(config: RadixConfig) -> Tokenizer:
    """The tokenizer as configured. Raises BadRequestError."""
    if config.tokenizer_path is None:
        raise BadRequestError("--tokenizer-path is missing: give the model's folder or hub id (or --middleware none)")
    return Tokenizer.load(
        config.tokenizer_path,
        trust_remote_code=config.trust_remote_code,
        add_special_tokens=config.add_special_tokens,
        encodes_by=config.tokenizer_backend,
        limits=PromptLimits(tokens=config.max_text_tokens),
    )
