"""The trainers, as the tests of their integrations use them: their own code where it is installed, else stand-ins.

The tests run on both. `TITO_TRAINERS` says that verl and TRL are installed, and names folders with checkouts of the others,
separated by colons; then `import slime` finds slime's own files, its own `Sample`, `generate_and_rm` and batch assembly, and
only what needs a GPU is stubbed. A trainer without a checkout is skipped. Without `TITO_TRAINERS` the stand-ins below hold what
was read there, at the commits that docs/trainers.md names.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

FOLDERS = [folder for folder in os.environ.get("TITO_TRAINERS", "").split(":") if folder]
REAL = "TITO_TRAINERS" in os.environ
STUBBED = ("sglang", "sglang_router")
"""Engines and their router: nothing of them runs here."""


class _Stub(ModuleType):
    """A module of which every name is a class that does nothing."""

    __path__: list[str] = []  # noqa: RUF012 - a package, to the import system
    __version__ = "0.5.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda *_args, **_options: None})


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, _path: Any = None, _target: Any = None) -> Any:
        if fullname.partition(".")[0] in STUBBED:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Counted:
    """`PrefixCacheInfo` and `SpecInfo`: sums over the replies of a sample."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    def add(self, meta_info: dict[str, Any]) -> None:
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)


@dataclass
class Sample:
    """`slime.utils.types.Sample` and that of miles: the fields of both."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    rollout_indexer_topk: Any = None
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None
    routing_key: str | None = None
    prefix_cache_info: Counted = field(default_factory=Counted)
    spec_info: Counted = field(default_factory=Counted)

    Status = Status
    PrefixCacheInfo = Counted

    def get_reward_value(self, args: Any) -> float:
        found: float = self.reward if not args.reward_key else self.reward[args.reward_key]
        return found

    def validate(self) -> None:
        """miles' own check, before a sample goes into a batch."""
        check_lengths(self)


def check_lengths(sample: Any) -> None:
    """What both trainers demand of each sample, and raise for a whole batch otherwise."""
    assert sample.loss_mask is None or len(sample.loss_mask) == sample.response_length
    assert sample.rollout_log_probs is not None
    assert len(sample.rollout_log_probs) == sample.response_length
    assert 0 < sample.response_length <= len(sample.tokens)
    if sample.rollout_routed_experts is not None:
        assert len(sample.rollout_routed_experts) == len(sample.tokens) - 1


class Trainer:
    """slime or miles.

    Attributes:
        name: of its package.
        module: our integration of it.
        Sample: its class of samples.
        processor: the processor of images that its state has.
    """

    def __init__(self, name: str) -> None:
        if REAL and not any(Path(folder).name == name for folder in FOLDERS):
            pytest.skip(f"no checkout of {name}")
        self.name = name
        self.module = importlib.import_module(f"middleware_hub.integrations.{name}")
        self.Sample: Any = importlib.import_module(f"{name}.utils.types").Sample
        self.processor: Any = None

    def args(self, router: str, **more: Any) -> Any:
        """The flags that its functions and ours read."""
        parts = urlsplit(router)
        found: dict[str, Any] = {
            "sglang_router_ip": parts.hostname,
            "sglang_router_port": parts.port,
            "sglang_router_policy": None,
            "hf_checkpoint": os.environ.get("TITO_TEST_TOKENIZER", ""),
            "chat_template_path": None,
            "sglang_server_concurrency": 8,
            "rollout_num_gpus": 1,
            "rollout_num_gpus_per_engine": 1,
            "num_gpus_per_node": 1,
            "rollout_temperature": 1.0,
            "rollout_top_p": 1.0,
            "rollout_top_k": -1,
            "rollout_max_response_len": 400,
            "rollout_stop": None,
            "rollout_stop_token_ids": None,
            "rollout_skip_special_tokens": False,
            "sglang_dp_size": 1,
            "partial_rollout": False,
            "mask_offpolicy_in_partial_rollout": False,
            "group_rm": False,
            "custom_generate_function_path": "trainers_generate.generate",
            "custom_rm_path": "trainers_generate.reward",
            "rm_type": None,
            "reward_key": None,
            "advantage_estimator": "grpo",
            "rewards_normalization": True,
            "grpo_std_normalization": True,
            "n_samples_per_prompt": 2,
            "rollout_batch_size": 1,
            "use_rollout_routing_replay": False,
            "use_rollout_indexer_replay": False,
            "use_dynamic_global_batch_size": False,
            "disable_rollout_trim_samples": True,
            "sglang_speculative_algorithm": None,
            "num_layers": 2,
            "moe_router_topk": 3,
            "rollout_sample_hook_path": None,
            "rollout_external": False,
        }
        return SimpleNamespace(**{**found, **more})

    def generate(self, function: Any, args: Any, sample: Any, params: dict[str, Any], evaluation: bool = False) -> Any:
        """Let the trainer call a generate function, with its own code around it if it is here."""
        plugin = ModuleType("trainers_generate")
        plugin.__dict__.update(generate=function, reward=_reward)
        sys.modules["trainers_generate"] = plugin
        return asyncio.run(self._and_close(function, args, sample, params, evaluation))

    def forget(self) -> None:
        """Drop what slime keeps for its process: its state, with an earlier test's flags, and the functions it has loaded."""
        if REAL and self.name == "slime":
            misc = importlib.import_module("slime.utils.misc")
            misc.load_function.cache_clear()
            misc.SingletonMeta._instances.clear()

    async def _and_close(self, *given: Any) -> Any:
        try:
            return await self._generate(*given)
        finally:
            await importlib.import_module("middleware_hub.integrations.rollout").close_clients()

    async def _generate(self, function: Any, args: Any, sample: Any, params: dict[str, Any], evaluation: bool) -> Any:
        if not REAL:
            if self.name == "slime":
                sys.modules["slime.rollout.sglang_rollout"].GenerateState.processor = self.processor
                return await function(args, sample, dict(params), evaluation=evaluation)
            aborted = bool(getattr(args, "aborted", False))
            state = SimpleNamespace(args=args, tokenizer=Words(), processor=self.processor, aborted=aborted)
            given = sys.modules["miles.rollout.base_types"].GenerateFnInput(state, sample, dict(params), evaluation)
            return (await function(given)).samples
        if self.name == "slime":
            own = importlib.import_module("slime.rollout.sglang_rollout")
            self.forget()
            state = own.GenerateState(args)
            state.processor = self.processor
            state.aborted = bool(getattr(args, "aborted", False))
            if state.aborted:  # it is asked after the function has begun
                return await function(args, sample, dict(params), evaluation=evaluation)
            return await own.generate_and_rm(args, sample, dict(params), evaluation=evaluation)
        own = importlib.import_module("miles.rollout.inference_rollout.inference_rollout_common")
        state = own.GenerateState(args)
        state.processor = self.processor
        state.generate_function = function
        if getattr(args, "aborted", False):
            state.aborted = True
            types = importlib.import_module("miles.rollout.base_types")
            given = types.GenerateFnInput(state, sample, dict(params), evaluation)
            return (await function(given)).samples
        return await own.generate_and_rm(state, sample, dict(params), evaluation=evaluation)

    def batch(self, args: Any, samples: Sequence[Any]) -> dict[str, Any]:
        """Assemble a batch as the trainer does, with all of its checks."""
        flat = [one for sample in samples for one in (sample if isinstance(sample, list) else [sample])]
        for one in flat:
            one.reward = 1.0 if one.reward is None else one.reward
            check_lengths(one)
        if REAL and self.name == "slime":
            rollout = importlib.import_module("slime.ray.rollout")
            rollout.validate_rollout_id_annotated([list(samples)])
            own = rollout.RolloutManager.__ray_metadata__.modified_class
            self_like = SimpleNamespace(
                args=args,
                custom_convert_samples_to_train_data_func=None,
                custom_reward_post_process_func=self.module.rewards_by_group,
            )
            self_like._post_process_rewards = lambda found: own._post_process_rewards(self_like, found)
            made = own._convert_samples_to_train_data(self_like, flat)
            importlib.import_module("slime.observability.rollout_data_utils").tensorize_rollout_data_for_training(
                dict(made)
            )
            return dict(made)
        if REAL:
            own = importlib.import_module("miles.ray.rollout.rollout_data_conversion")
            given, metadata = own.postprocess_rollout_data(args, [list(samples)], {"dp_size": 1})
            convert = importlib.import_module("miles.ray.rollout.train_data_conversion").convert_samples_to_train_data
            return dict(convert(args, given, metadata, None, None))
        return _stand_in_batch(args, flat, self.name)


async def _reward(_args: Any, sample: Any, **_more: Any) -> Any:
    return [1.0 for _ in sample] if isinstance(sample, list) else 1.0


def _stand_in_batch(args: Any, flat: Sequence[Any], name: str) -> dict[str, Any]:
    """What the trainers' conversions demand and make."""
    masks = [[0] * one.response_length if one.remove_sample else one.loss_mask for one in flat]
    if name == "slime" and args.rollout_top_p != 1.0:
        for one in flat:
            assert len(one.rollout_top_p_token_offsets) == one.response_length + 1
            assert one.rollout_top_p_token_offsets[-1] == len(one.rollout_top_p_token_ids)
    if args.use_rollout_routing_replay:
        for one in flat:
            rows = one.rollout_routed_experts
            assert rows.shape[1:] == (args.num_layers, args.moe_router_topk)
            assert (rows != 0).any(axis=(0, 2)).all()
            assert rows.min() >= 0
    return {"tokens": [one.tokens for one in flat], "loss_masks": masks, "raw_reward": [one.reward for one in flat]}


class Words:
    """A tokenizer, for budgets and templates only."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(range(len(text.split())))

    def apply_chat_template(self, messages: Any, **_options: Any) -> str:
        return "".join(f"{one['role']}: {one['content']}\n" for one in messages) + "assistant: "


@contextmanager
def installed() -> Iterator[None]:
    """Make the trainers importable: their own files, or the stand-ins."""
    before = dict(sys.modules)
    if REAL:
        sys.path[:0] = FOLDERS
        sys.meta_path.append(_Stubs())
        yield
        return
    modules: dict[str, dict[str, Any]] = {
        "slime.utils.types": {"Sample": Sample},
        "slime.rollout.sglang_rollout": {"GenerateState": GenerateState},
        "verl.experimental.agent_loop.agent_loop": {
            "AgentLoopBase": AgentLoopBase,
            "AgentLoopMetrics": AgentLoopMetrics,
            "AgentLoopOutput": AgentLoopOutput,
        },
        "trl.trainer.grpo_trainer": {"GRPOTrainer": type, "RolloutFunc": Any},
        "miles.utils.types": {"Sample": Sample},
        "miles.rollout.base_types": {"GenerateFnInput": GenerateFnInput, "GenerateFnOutput": GenerateFnOutput},
    }
    for path, names in modules.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            package = ".".join(parts[:depth])
            made = sys.modules.setdefault(package, ModuleType(package))
            made.__dict__.setdefault("__path__", [])
        sys.modules[path].__dict__.update(names)
    yield
    for name in set(sys.modules) - set(before):
        if name.partition(".")[0] in ("slime", "miles", "trl", "verl") or name.startswith(
            "middleware_hub.integrations"
        ):
            del sys.modules[name]


@dataclass
class AgentLoopMetrics:
    """`verl.experimental.agent_loop.agent_loop.AgentLoopMetrics`."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


@dataclass
class AgentLoopOutput:
    """`verl.experimental.agent_loop.agent_loop.AgentLoopOutput`."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: Any = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class AgentLoopBase:
    """What its constructor keeps for loops."""

    def __init__(self, trainer_config: Any, tokenizer: Any, data_config: Any, **_more: Any) -> None:
        self.config = trainer_config.config
        self.rollout_config = self.config["actor_rollout_ref"]["rollout"]
        self.tokenizer = tokenizer
        self.processor = _more.get("processor")
        self.mm_processor_kwargs: dict[str, Any] = {}
        self.apply_chat_template_kwargs = data_config.config.get("apply_chat_template_kwargs", {})

    async def process_multi_modal_info(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        parts = [part for one in messages if not isinstance(one["content"], str) for part in one["content"]]
        return {"images": [part["image"] for part in parts if part["type"] == "image"]}

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        raise NotImplementedError


class Config(dict[str, Any]):
    """A configuration with attributes, as omegaconf's."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@dataclass
class GenerateFnInput:
    state: Any
    sample: Any
    sampling_params: dict[str, Any]
    evaluation: bool

    @property
    def args(self) -> Any:
        return self.state.args


@dataclass
class GenerateFnOutput:
    samples: Any


class GenerateState:
    """`slime.rollout.sglang_rollout.GenerateState`."""

    processor: Any = None

    def __init__(self, args: Any) -> None:
        self.tokenizer = Words()
        self.aborted = bool(getattr(args, "aborted", False))


def tokenizer_folder(folder: Path) -> None:
    """Tell the trainers' own code where a tokenizer is."""
    os.environ["TITO_TEST_TOKENIZER"] = str(folder)
