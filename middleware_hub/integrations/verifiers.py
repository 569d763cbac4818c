"""verifiers: a client whose rollouts are sessions, so that every turn has the ids and logprobs that the engine sampled.

    python -m middleware_hub.integrations.verifiers TASKSET --client.type train --client.base-url http://10.0.0.9:30000/v1 ...

is `vf-eval` with this client in the place of verifiers' own training client, which renders chats only, and needs vLLM. In a
package of an environment, or in a program, call `install()` before the first rollout.

A rollout's session has the name of its trace: what verifiers sends as `X-Session-ID`. Requests go to it as the harness wrote
them, in every dialect. `Response.tokens` is what the session recorded of the turn.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

from middleware_hub.client.asynchronous import AsyncClient, AsyncSession
from middleware_hub.client.errors import RefusedError, RouterClientError
from middleware_hub.client.trajectory import Trajectory, Turn
from middleware_hub.integrations.rollout import PATIENT, named_session
from middleware_hub.integrations.versions import require

require(
    "verifiers",
    [
        "verifiers.v1.interception.server:resolve_client",
        "verifiers.v1.clients.eval:EvalClient._request",
        "verifiers.v1.clients.eval:EvalClient._headers",
        "verifiers.v1.configs.client:TrainClientConfig",
        "verifiers.v1.dialects:Dialect.parse_response",
        "verifiers.v1.types:TurnTokens.completion_logprobs",
        "verifiers.v1.types:Response.tokens",
        "verifiers.v1.graph:PendingTurn",
        "verifiers.v1.trace:Trace.info",
    ],
)

from pydantic import ValidationError  # noqa: E402 - after the check of the version
from pydantic_core import from_json  # noqa: E402
from verifiers.v1.clients.base import join_url  # noqa: E402
from verifiers.v1.clients.client import resolve_client as _own_client  # noqa: E402
from verifiers.v1.clients.eval import EvalClient  # noqa: E402
from verifiers.v1.configs.client import TrainClientConfig  # noqa: E402
from verifiers.v1.errors import ProviderError, model_error  # noqa: E402
from verifiers.v1.interception import server  # noqa: E402
from verifiers.v1.types import TurnTokens  # noqa: E402

if TYPE_CHECKING:
    import httpx
    from verifiers.v1.clients.client import Client
    from verifiers.v1.configs.client import BaseClientConfig
    from verifiers.v1.dialects import Dialect
    from verifiers.v1.graph import PendingTurn
    from verifiers.v1.types import Response, SamplingConfig

logger = logging.getLogger(__name__)

INFO = "tito"
"""The key in `Trace.info` of what the router said of each turn: versions, and why a turn has no tokens."""
SESSION_TTL = 3600.0
"""Seconds after its last call that a rollout's session is kept: verifiers does not tell a client that the rollout has ended."""


class RouterClient(EvalClient):
    """Sends each request of a rollout to its session, and reads there what was sampled.

    The class forwards requests as verifiers' `EvalClient` does. Its configuration is a `TrainClientConfig`, for which verifiers
    asks for whole responses, and makes streams of them for the harness. Streams therefore have tokens, too.
    """

    def __init__(self, config: BaseClientConfig) -> None:
        super().__init__(config)
        root = config.base_url.rstrip("/").removesuffix("/v1")
        key = None if self.api_key == "EMPTY" else self.api_key
        namespace = next((value for name, value in self.headers.items() if name.lower() == "x-radix-namespace"), None)
        self._router = AsyncClient(root, api_key=key, namespace=namespace, retries=PATIENT)
        self._sessions: dict[str, asyncio.Task[AsyncSession]] = {}

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        sampling: SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Return one turn with its tokens. Raises ProviderError, as `EvalClient` does.

        `Response.tokens` is None for a turn that must not be trained on; `Trace.info["tito"]` says why.
        """
        if session_id is None:
            return await super().get_response(dialect, body, sampling, session_id, turn, headers)
        try:
            session = await self._session(session_id)
            # The whole of a stream is wanted, so no stream is asked for.
            whole = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
            url = join_url(f"{self._router.url}/sessions/{session.id}/v1", dialect.upstream_path)
            response = await self._sample(dialect, url, whole, self._headers(dialect, headers, session_id))
            response.tokens = await self._tokens(session, response, turn)
        except RefusedError as error:
            raise model_error(str(error), status_code=error.status) from error
        except RouterClientError as error:
            raise model_error(str(error), status_code=503) from error
        return response

    async def _session(self, name: str) -> AsyncSession:
        """Return the session of a rollout; its first request makes it, and parallel ones wait for that."""
        task = self._sessions.get(name)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            made = named_session(self._router, {"session_id": name, "ttl_s": SESSION_TTL})
            task = self._sessions[name] = asyncio.ensure_future(made)
            while len(self._sessions) > 10_000:  # of the oldest rollouts; made again, a session is the same
                del self._sessions[next(iter(self._sessions))]
        return await asyncio.shield(task)

    async def _sample(self, dialect: Dialect, url: str, body: dict[str, Any], headers: httpx.Headers) -> Response:
        """Return a response. While the router is away, ask again; by the key it knows a turn that it has sampled before."""
        headers["idempotency-key"] = uuid.uuid4().hex
        for attempt in count(1):
            try:
                answer = await self._request(url, body, headers)
                break
            except ProviderError as error:
                if error.status_code != 503 or attempt >= PATIENT.attempts:
                    raise
                await asyncio.sleep(PATIENT.wait(attempt))
        try:
            raw = from_json(answer.content)
            response = dialect.parse_response(dialect.validate_response(raw))
        except (ValueError, ValidationError) as error:
            raise model_error(f"the router's answer is malformed: {error}", status_code=502) from error
        response.raw = raw
        return response

    async def _tokens(self, session: AsyncSession, response: Response, turn: PendingTurn | None) -> TurnTokens | None:
        name = _generation(response.raw or {})
        found = await session.trajectories()
        if all(one.details.get("branch") != name for one in found):  # a parallel request has continued it already
            found = await session.trajectories(export_all_checkpoints=True)
        told = next((one for one in found if one.details.get("branch") == name), None)
        at = None if told is None else next((one for one in told.turns if one.request_id == name), None)
        reasons = ["unknown_reply"] if told is None or at is None else _reasons(told, at)
        if turn is not None:
            info = turn.trace.info.setdefault(INFO, {"session_id": session.id, "turns": []})
            versions = [] if told is None or at is None else _versions(told, at)
            info["turns"].append({"generation_id": name, "weight_versions": versions, "reasons": reasons})
        if reasons or told is None or at is None or told.logprobs is None:
            logger.warning("turn %s of session %s has no tokens to train on: %s", name, session.id, ", ".join(reasons))
            return None
        return TurnTokens(
            prompt_ids=told.tokens[: at.start],
            completion_ids=told.tokens[at.start : at.end],
            completion_logprobs=told.logprobs[at.start : at.end],
        )

    async def close(self) -> None:
        """Close the connections. Sessions stay until their time is over."""
        await super().close()
        await self._router.close()


def _generation(raw: Mapping[str, Any]) -> str | None:
    """Return the name of a reply: of Anthropic's messages and of responses at the top, of a chat at its choice."""
    beside = raw if "generation_id" in raw else (raw.get("choices") or [{}])[0].get("meta_info") or {}
    found: str | None = beside.get("generation_id")
    return found


def _reasons(told: Trajectory, at: Turn) -> list[str]:
    """Return why a turn must not be trained on."""
    found = [] if told.exact else list(told.reasons) or ["inexact"]
    if told.logprobs is None:
        found.append("no_logprobs")
    if told.multi_modal_data.images:
        found.append("multimodal")  # verifiers wants placeholders of its own renderer, which did not run
    return found


def _versions(told: Trajectory, at: Turn) -> list[list[Any]]:
    """Return the runs of weight versions of a turn, `[version, start, end]` in offsets of its completion."""
    cut = [(run.version, max(run.start, at.start), min(run.end, at.end)) for run in told.versions]
    return [[version, low - at.start, high - at.start] for version, low, high in cut if low < high]


def resolve_client(config: BaseClientConfig) -> Client:
    """Return the client of a configuration: for `train` a `RouterClient`, else verifiers' own."""
    return RouterClient(config) if isinstance(config, TrainClientConfig) else _own_client(config)


def install() -> None:
    """Let the rollouts of this process use `RouterClient` where their client is of the type `train`."""
    server.resolve_client = resolve_client


if __name__ == "__main__":
    from verifiers.v1.cli.eval.main import main

    install()
    main()
