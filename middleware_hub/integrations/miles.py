"""miles: rollouts of text, and of agents, for `--custom-generate-function-path`. docs/trainers.md shows how it is set up.

    from middleware_hub.integrations.miles import text_rollout

    generate = text_rollout(act)          # in my_rollout.py; --custom-generate-function-path my_rollout.generate

An agent function that was written for miles' own sessions works unchanged in `agent_rollout`. miles wants one reward for all
samples of a rollout, so rewards of single branches stay in `metadata["reward_info"]`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from middleware_hub.client.asynchronous import AsyncClient
from middleware_hub.client.operations import plain
from middleware_hub.client.wire import ClientCall
from middleware_hub.integrations import samples
from middleware_hub.integrations.response import Replayed, Response
from middleware_hub.integrations.rollout import Act, RolloutGroup, Rules, client_for
from middleware_hub.integrations.samples import Agent, SampleJob
from middleware_hub.integrations.versions import require

require(
    "miles",
    [
        *(f"miles.utils.types:Sample.{name}" for name in samples.USED_OF_SAMPLE),
        "miles.utils.types:Sample.rollout_indexer_topk",
        "miles.utils.types:Sample.routing_key",
        "miles.utils.types:Sample.validate",
        "miles.rollout.base_types:GenerateFnInput.sampling_params",
        "miles.rollout.base_types:GenerateFnInput.evaluation",
        "miles.rollout.base_types:GenerateFnOutput.samples",
    ],
)

from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput  # noqa: E402 - after the check of its version


def text_rollout(
    act: Act,
    *,
    max_turns: int = 8,
    tidy: Callable[[str], str] | None = None,
    router: str | None = None,
    groups: str | None = None,
) -> Callable[[GenerateFnInput], Any]:
    """Return a generate function for miles: turns of text, until `act` returns None.

    Args:
        act: your environment: `act(turn, sample)`, awaited if necessary.
        max_turns: turns of the model.
        tidy: what your history keeps of a turn, if not all of it.
        router: its address, if miles has its own router, whose workers are then also registered there. By default the one in
            the variable `TITO_ROUTER`, or the router of miles, `--sglang-router-ip` and `--sglang-router-port`.
        groups: the run's name, if trainers elsewhere claim the samples from the router: they are called NAME/NUMBER. Without it
            the router is told of no groups, because an unclaimed group stays in its memory.
    """

    async def generate(input: GenerateFnInput) -> GenerateFnOutput:
        job = await _job(input, router, groups)
        count = partial(samples.count, input.state.tokenizer)
        return _checked(await samples.text_rollout(job, Rules(act, max_turns, tidy, count=count)))

    return generate


def agent_rollout(
    agent: Agent, *, router: str | None = None, groups: str | None = None, roots: str = "all"
) -> Callable[[GenerateFnInput], Any]:
    """Return a generate function for miles that runs an agent in a session, and returns a sample for each of its branches.

    With `roots="head"` it leaves out the requests that the agent makes beside its task (a title, a summary).
    """

    async def generate(input: GenerateFnInput) -> GenerateFnOutput:
        job = await _job(input, router, groups)
        return _checked(await samples.agent_rollout(job, agent, one_reward=True, roots=roots))

    return generate


def _checked(made: Any) -> GenerateFnOutput:
    for one in made if isinstance(made, list) else [made]:
        if one.status is not one.Status.ABORTED:
            one.validate()
    return GenerateFnOutput(samples=made)


async def _job(input: GenerateFnInput, router: str | None, groups: str | None) -> SampleJob:
    args, sample = input.args, input.sample
    given = router or os.environ.get("TITO_ROUTER")
    client = client_for(
        given or f"http://{args.sglang_router_ip}:{args.sglang_router_port}", evaluation=input.evaluation
    )
    if given:
        await _add_workers(args, client)
    return SampleJob(
        sample=sample,
        sampling=input.sampling_params,
        client=client,
        replayed=Replayed(
            experts=samples.experts(args, evaluation=input.evaluation),
            indexer=not input.evaluation and bool(getattr(args, "use_rollout_indexer_replay", False)),
        ),
        routing_key=sample.routing_key,
        one=bool(getattr(args, "partial_rollout", False)),
        mask_earlier=samples.masks_earlier(args),
        stopped=lambda: bool(input.state.aborted),
        template=partial(samples.chat_text, input.state.tokenizer),
        processor=lambda: input.state.processor,
        put_extras=_put_extras,
        group=RolloutGroup.of(None if input.evaluation else groups, sample.group_index, args.n_samples_per_prompt),
    )


def _put_extras(sample: Any, made: Response) -> None:
    if made.indexer is not None:
        layers = sample.metadata.get("indexer_layers", 1)
        sample.rollout_indexer_topk = made.indexer.reshape(len(made.indexer), layers, -1)


async def _add_workers(args: Any, client: AsyncClient) -> None:
    """Register the workers of miles' own router; registering a worker again is no error."""
    from miles.rollout.inference_rollout.inference_rollout_train import get_worker_urls

    known = {one["url"] for one in await client.workers()}
    for url in await get_worker_urls(args):
        if url.rstrip("/") not in known:
            await client.run(plain(ClientCall("POST", "/add_worker", {"url": url}, again=True)))
