"""slime: rollouts of text, and of agents, for `--custom-generate-function-path`. docs/trainers.md shows how it is set up.

    from middleware_hub.integrations.slime import text_rollout

    generate = text_rollout(act)          # in my_rollout.py; --custom-generate-function-path my_rollout.generate

slime takes one sample of a rollout, or always a list of them. `text_rollout` gives one sample, or a list with `tidy`, and
`agent_rollout` gives a list. slime centres rewards by the number of samples in a group, which is not fixed if a rollout gives a
list: then use `--custom-reward-post-process-path middleware_hub.integrations.slime.rewards_by_group`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from middleware_hub.integrations import samples
from middleware_hub.integrations.response import Replayed, Response
from middleware_hub.integrations.rollout import Act, RolloutGroup, Rules, client_for
from middleware_hub.integrations.samples import Agent, SampleJob
from middleware_hub.integrations.versions import require

require(
    "slime",
    [
        *(f"slime.utils.types:Sample.{name}" for name in samples.USED_OF_SAMPLE),
        "slime.utils.types:Sample.rollout_top_p_token_ids",
        "slime.utils.types:Sample.rollout_top_p_token_offsets",
        "slime.utils.types:Sample.session_id",
    ],
)


def text_rollout(
    act: Act,
    *,
    max_turns: int = 8,
    tidy: Callable[[str], str] | None = None,
    router: str | None = None,
    groups: str | None = None,
) -> Callable[..., Any]:
    """Return a generate function for slime: turns of text, until `act` returns None.

    Args:
        act: your environment: `act(turn, sample)`, awaited if necessary.
        max_turns: turns of the model.
        tidy: what your history keeps of a turn, if not all of it.
        router: its address; by default that of slime's router, `--sglang-router-ip` and `--sglang-router-port`.
        groups: the run's name, if trainers elsewhere claim the samples from the router: they are called NAME/NUMBER. Without it
            the router is told of no groups, because an unclaimed group stays in its memory.
    """

    async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
        job = _job(args, sample, sampling_params, evaluation, router, groups)
        rules = Rules(act, max_turns, tidy, count=lambda text: samples.count(_state(args).tokenizer, text))
        return await samples.text_rollout(job, rules)

    return generate


def agent_rollout(
    agent: Agent, *, router: str | None = None, groups: str | None = None, roots: str = "all"
) -> Callable[..., Any]:
    """Return a generate function for slime that runs an agent in a session, and returns a sample for each of its branches.

    Args:
        agent: `async agent(base_url, prompt, request_kwargs, metadata)`. It may return a dictionary: its `reward` is that of
            the samples, and the whole dictionary is added to their metadata. A `score` that was attached to a branch takes
            precedence.
        router: its address, if it is not slime's.
        groups: as in `text_rollout`.
        roots: `head` leaves out the requests that the agent makes beside its task (a title, a summary).
    """

    async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
        job = _job(args, sample, sampling_params, evaluation, router, groups)
        return await samples.agent_rollout(job, agent, one_reward=False, roots=roots)

    return generate


def rewards_by_group(args: Any, found: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Return raw rewards, and rewards centred within each prompt's group. A rollout counts once, however many samples it has.

    For `--custom-reward-post-process-path`.
    """
    raw = [one.get_reward_value(args) for one in found]
    centred = getattr(args, "rewards_normalization", True) and args.advantage_estimator in CENTRED
    if not centred:
        return raw, list(raw)
    groups: dict[Any, dict[Any, list[int]]] = {}
    for number, one in enumerate(found):
        rollout = one.rollout_id if one.rollout_id is not None else one.index
        groups.setdefault(one.group_index, {}).setdefault(rollout, []).append(number)
    made = [0.0] * len(raw)
    for rollouts in groups.values():
        means = {
            rollout: sum(raw[number] for number in numbers) / len(numbers) for rollout, numbers in rollouts.items()
        }
        mean = sum(means.values()) / len(means)
        spread = 1.0
        if args.advantage_estimator in SCALED and getattr(args, "grpo_std_normalization", False) and len(means) > 1:
            variance = sum((value - mean) ** 2 for value in means.values()) / (len(means) - 1)
            spread = variance**0.5 + 1e-6
        for numbers in rollouts.values():
            for number in numbers:
                made[number] = (raw[number] - mean) / spread
    return raw, made


CENTRED = frozenset({"grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"})
SCALED = frozenset({"grpo", "gspo", "cispo"})
"""The estimators whose rewards slime centres, and divides by their spread."""


def _job(
    args: Any, sample: Any, sampling: dict[str, Any], evaluation: bool, router: str | None, groups: str | None
) -> SampleJob:
    url = router or os.environ.get("TITO_ROUTER") or f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    return SampleJob(
        sample=sample,
        sampling=sampling,
        client=client_for(url, evaluation=evaluation),
        replayed=Replayed(
            top_p=getattr(args, "rollout_top_p", 1.0) != 1.0 and not evaluation,
            experts=samples.experts(args, evaluation=evaluation),
        ),
        routing_key=sample.session_id,
        one=bool(getattr(args, "partial_rollout", False)),
        mask_earlier=samples.masks_earlier(args),
        stopped=lambda: bool(_state(args).aborted),
        template=lambda messages: samples.chat_text(_state(args).tokenizer, messages),
        processor=lambda: _state(args).processor,
        put_extras=_put_extras,
        group=RolloutGroup.of(None if evaluation else groups, sample.group_index, args.n_samples_per_prompt),
    )


def _put_extras(sample: Any, made: Response) -> None:
    if made.top_p_offsets is not None and made.top_p_ids is not None:
        sample.rollout_top_p_token_ids = made.top_p_ids.tolist()
        sample.rollout_top_p_token_offsets = made.top_p_offsets.tolist()


def _state(args: Any) -> Any:
    # It loads the tokenizer once, as slime does anyway; a function that does not need it should not wait for it.
    from slime.rollout.sglang_rollout import GenerateState

    return GenerateState(args)
