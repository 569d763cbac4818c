"""Stand-ins for what the functions of docs/trainers.md import from their trainers. `install` puts them in place.

Shapes and names are those of the trainers' sources (docs/trainers.md has them by commit). HTTP is real.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.client import call


async def post(url: str, payload: Any, max_retries: int = 60, headers: Any = None) -> Any:
    """Post as `slime.utils.http_utils.post` does, without its sixty attempts."""
    answer = await asyncio.to_thread(call, url, payload, headers=headers)
    assert answer.status == 200, answer.content
    return answer.json()


@dataclass
class Sample:
    """`slime.utils.types.Sample`; that of miles has `update_from_meta_info` as well."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"

    prompt: str
    response: str = ""
    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    weight_versions: list[str] = field(default_factory=list)
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    remove_sample: bool = False

    def update_from_meta_info(self, _args: Any, meta_info: dict[str, Any]) -> None:
        finished = {"stop": "COMPLETED", "length": "TRUNCATED", "abort": "ABORTED"}
        self.status = self.Status[finished[meta_info["finish_reason"]["type"]]]


@dataclass
class AgentLoopMetrics:
    generate_sequences: float = 0.0


@dataclass
class AgentLoopOutput:
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None
    num_turns: int
    metrics: AgentLoopMetrics
    extra_fields: dict[str, Any]


class AgentLoopBase:
    def __init__(self, config: Any, tokenizer: Any) -> None:
        self.config = config
        self.tokenizer = tokenizer


class Template:
    """A tokenizer, as far as prompts are made by it: ChatML, which the shipped one speaks."""

    def apply_chat_template(
        self, messages: Sequence[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        said = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)
        return said + "<|im_start|>assistant\n" * add_generation_prompt


@dataclass
class GenerateFnOutput:
    samples: Sample


def install(monkeypatch: pytest.MonkeyPatch, router: str, workers: Callable[[], list[str]]) -> None:
    """Make them importable, and set what the functions read from their surroundings."""

    def get_actor(name: str) -> Any:
        """Ray's: the servers under the names that verl gives them."""
        number = int(name.removeprefix("sglang_server_").removesuffix("_0"))
        if number >= len(workers()):
            raise ValueError(name)
        parts = urlsplit(workers()[number])
        return SimpleNamespace(get_server_address=SimpleNamespace(remote=lambda: _soon((parts.hostname, parts.port))))

    async def get_worker_urls(_args: Any) -> list[str]:
        return workers()

    http_utils = {"post": post}
    modules: dict[str, dict[str, Any]] = {
        "slime.utils.http_utils": http_utils,
        "slime.utils.types": {"Sample": Sample},
        "ray": {"get_actor": get_actor},
        "verl.experimental.agent_loop.agent_loop": {
            "AgentLoopBase": AgentLoopBase,
            "AgentLoopMetrics": AgentLoopMetrics,
            "AgentLoopOutput": AgentLoopOutput,
        },
        "miles.rollout.base_types": {"GenerateFnOutput": GenerateFnOutput},
        "miles.rollout.inference_rollout.inference_rollout_train": {"get_worker_urls": get_worker_urls},
        "miles.utils.http_utils": http_utils,
    }
    for path, names in modules.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            package = ".".join(parts[:depth])
            if package not in sys.modules or depth == len(parts):
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
        for name, value in names.items():
            setattr(sys.modules[path], name, value)
    monkeypatch.setenv("TITO_ROUTER", router)


async def _soon(value: Any) -> Any:
    return value
