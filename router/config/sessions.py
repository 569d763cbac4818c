"""Agent sessions: how long they last, and how messages become tokens and replies become messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from router.config.flag import SHARE, Section, at_least, flag
from router.config.token_budget import DEFAULT_BUDGET, token_budget

History = Literal["keep", "template"]
LateSystem = Literal["in_place", "merge", "refuse"]

CALL_PARSERS = (
    *("hermes", "qwen-coder", "llama3", "glm", "deepseek", "deepseek-v32", "kimi-k2", "minimax-m2", "mistral"),
    *("seed-oss", "lfm2", "pythonic", "harmony", "gemma4", "none"),
)
"""The parsers of tool calls to name in `--help`; `auto`, and the engines' own names for them, are understood as well."""
REASONING_PARSERS = ("think", "mistral", "seed-oss", "gemma4", "harmony", "none")


@dataclass(frozen=True)
class SessionsConfig(Section):
    """Agent sessions. Times are in seconds. A `max_context` of None leaves the limit to the worker."""

    TITLE = "agent sessions"

    implicit: bool = flag(
        "--implicit-sessions", False, "let an unknown `X-Session-Id` open a session; otherwise it only routes"
    )
    ttl: float = flag(
        "--session-ttl-secs", 21_600.0, "forget a session after this long without a request; its `ttl_s` overrules it"
    )
    max_tokens: int | None = flag(
        "--session-max-tokens",
        None,
        "most tokens in all sessions; one more turn gets 429 (with a store: others leave memory)",
        unset=DEFAULT_BUDGET,
    )
    match: str = flag(
        "--session-match",
        "canonical",
        "when two messages count as the same: canonical, strict, calls, or pkg.mod:function",
    )
    history: History = flag(
        "--history",
        "keep",
        "where a template renders earlier turns differently: keep what the model saw, or begin a branch with the new"
        " rendering, in which turns keep their ids where they can",
    )
    late_system: LateSystem = flag(
        "--late-system",
        "in_place",
        "what to do with a system message that is not the first, if the template does not write it where it stands: write"
        " it there as a marked message of the user's, join it to the first one, or refuse the request",
    )
    verify_rate: float = flag(
        "--verify-rate", 0.01, "share of turns to check against a rendering of the whole conversation", limit=SHARE
    )
    orphan_grace: float = flag(
        "--orphan-grace",
        30.0,
        "how long a turn outlives its client, so that a repeated request can adopt it",
        limit=at_least(0),
    )
    max_context: int | None = flag(
        "--max-context",
        None,
        "most tokens of prompt and reply, in chats and `prompt_segments`; more gets 400 before a worker is asked",
        unset="the worker decides",
    )
    stream_interval: int | None = flag(
        "--stream-interval",
        None,
        "tokens of each event of a streamed chat, after the first token; a session's `stream_interval` overrules it",
        limit=at_least(1),
        unset="the worker decides",
    )
    chat_template: str | None = flag(
        "--chat-template", None, "Jinja template to use instead of the tokenizer's own", metavar="FILE"
    )
    tool_call_parser: str = flag(
        "--tool-call-parser",
        "auto",
        f"how to read tool calls: {', '.join(CALL_PARSERS)}, or pkg.mod:Class; auto asks the template",
    )
    reasoning_parser: str = flag(
        "--reasoning-parser",
        "auto",
        f"how to separate reasoning from content: {', '.join(REASONING_PARSERS)}; auto asks the template",
    )

    @property
    def token_budget(self) -> int:
        """`max_tokens`, or as many as fit into a quarter of the memory."""
        return token_budget(self.max_tokens)
