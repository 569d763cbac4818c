"""The client for event loops: `AsyncClient`, and conversations and sessions with it.

`scripts/make_client.py` makes `sync.py` from this file: edit this one, and run `make client`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from middleware_hub.client import operations
from middleware_hub.client.claims import Claim, ClaimOptions
from middleware_hub.client.conversation import Talk, Transcript
from middleware_hub.client.errors import UnknownReplyError
from middleware_hub.client.images import Image
from middleware_hub.client.operations import ExportOptions, GenerateOptions, Prompt, RetrieveOptions, SessionOptions
from middleware_hub.client.scores import ScoreOptions, Scores
from middleware_hub.client.trajectory import Cover, Trajectory
from middleware_hub.client.transport import AsyncTransport
from middleware_hub.client.wire import ClientCall, Piece, Reply


class AsyncClient(AsyncTransport):
    """Talks to a router. See `AsyncTransport` for the arguments."""

    async def generate(
        self, prompt: Prompt, sampling_params: Mapping[str, Any] | None = None, **options: Unpack[GenerateOptions]
    ) -> Reply:
        """Return one reply to a text or to ids."""
        return await self.run(operations.generate(prompt, sampling_params, options))

    async def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Mapping[str, Any] | None = None,
        *,
        n: int = 1,
        **options: Unpack[GenerateOptions],
    ) -> list[list[Reply]]:
        """Return `n` replies to each prompt, in one request: a list for each prompt."""
        return await self.run(operations.generate_batch(prompts, sampling_params, n, options))

    def stream(
        self, prompt: Prompt, sampling_params: Mapping[str, Any] | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Piece, None]:
        """Yield a reply as it comes; the last piece has all of it. Raises IncompleteStreamError. Closing it ends the reply."""
        return self.pieces(operations.stream(prompt, sampling_params, options))

    async def retrieve(
        self,
        text: str,
        *,
        expect_request_ids: Sequence[str] | None = None,
        request_id: str | None = None,
        **options: Unpack[RetrieveOptions],
    ) -> Trajectory:
        """Return the exact sequence of a text. List all replies that you got: only then is a lost reply noticed."""
        return await self.run(operations.retrieve(text, expect_request_ids, request_id, options))

    async def cover(
        self,
        text: str,
        expect_request_ids: Sequence[str],
        *,
        request_id: str | None = None,
        **options: Unpack[RetrieveOptions],
    ) -> Cover:
        """Return the fewest sequences that hold all listed replies whole, the sequence of the text first."""
        return await self.run(operations.cover(text, expect_request_ids, request_id, options))

    async def explain(self, text: str, images: Sequence[Image] | None = None) -> dict[str, Any]:
        """Return where a text leaves the recorded texts."""
        return await self.run(operations.explain(text, images))

    async def media(self, digest: str) -> bytes:
        """Return the file of an image that this client's tenant has sent. Raises UnknownReplyError if it is not held."""
        return await self.run(operations.media(digest))

    async def claim(self, **options: Unpack[ClaimOptions]) -> Claim:
        """Take samples for a while; without any, `len(claim)` is 0. Acknowledge them, or they are handed out again."""
        return await self.run(operations.claim(options))

    async def acknowledge(self, claim: Claim | str) -> int:
        """Acknowledge samples that are trained on or kept: they are never handed out again. Returns how many.

        Raises RefusedError if the lease was over and others have some of them: `details["taken"]`.
        """
        found = await self.run(operations.settle("ack", claim))
        return int(found["acknowledged"])

    async def release(self, claim: Claim | str) -> int:
        """Give samples back; return how many."""
        found = await self.run(operations.settle("release", claim))
        return int(found["released"])

    async def renew(self, claim: Claim | str, lease_seconds: float = 600.0) -> None:
        """Begin the lease of a claim again. Raises RefusedError if it was over and others have some of the samples."""
        await self.run(operations.settle("renew", claim, lease_seconds=lease_seconds))

    async def reward(self, request_id: str, reward: float | None, info: Mapping[str, Any] | None = None) -> bool:
        """Give the reward of a rollout, which is named by its last reply and is complete now.

        Returns False if the router says that its store did not take it (yet): trainers at other routers do not know it.
        """
        return await self.run(operations.reward(request_id, reward, info))

    async def score(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int] | None = None, **options: Unpack[ScoreOptions]
    ) -> list[dict[str, Scores]]:
        """Return what scorers say of ids, by their names: for each sequence from its start on, at least 1, the default.

        Those of a trajectory are its `tokens` and its `prompt_length`. A scorer that failed may be asked again: the router goes
        on where it stopped.
        """
        return await self.run(operations.score_sequences(sequences, starts, options))

    async def workers(self) -> list[dict[str, Any]]:
        """Return the workers of the router."""
        answer = await self.run(operations.plain(ClientCall("GET", "/workers", again=True)))
        found: list[dict[str, Any]] = answer["workers"]
        return found

    async def to_workers(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Call all workers, for example `/update_weights_from_disk`. Raises RefusedError if one of them failed."""
        return await self.run(operations.to_workers(path, body))


class AsyncConversation(Talk):
    """A conversation with an `AsyncClient`."""

    def __init__(
        self,
        client: AsyncClient,
        prompt: str | Transcript,
        sampling_params: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> None:
        super().__init__(prompt, sampling_params, options)
        self.client = client

    async def say(self, sampling_params: Mapping[str, Any] | None = None, **options: Unpack[GenerateOptions]) -> Reply:
        """Let the model continue the text, add its reply, and return it. After an abort, call it again to continue."""
        params = {**self.sampling_params, **(sampling_params or {})}
        reply = await self.client.generate(self.text, params, **self.turn_options(options))
        self.transcript.take(reply)
        return reply

    async def retrieve(self, **options: Unpack[RetrieveOptions]) -> Trajectory:
        """Return the sequence that the last reply ends. A listed reply that is not in it makes it inexact."""
        names, asked = self.transcript.names, self.retrieval(options)
        try:
            return await self.client.retrieve(self.recorded, expect_request_ids=names, **self.named(), **asked)
        except UnknownReplyError:  # the last reply is lost: the rest shows that by itself
            return await self.client.retrieve(self.recorded, expect_request_ids=names, **asked)

    async def cover(self, **options: Unpack[RetrieveOptions]) -> Cover:
        """Return sequences that hold every reply whole, the sequence of the last reply first."""
        names, asked = self.transcript.names, self.retrieval(options)
        try:
            return await self.client.cover(self.recorded, names, **self.named(), **asked)
        except UnknownReplyError:
            return await self.client.cover(self.recorded, names, **asked)


class AsyncSession:
    """An agent session of an `AsyncClient`: made for a task, given to an agent as an address, and exported at the end.

    As a context it is deleted at the end.

    Attributes:
        id: its name.
        base_url: for OpenAI's SDKs.
        anthropic_base_url: for Anthropic's.
        google_base_url: for Google's.
        key: names the session at the router's own `/v1`, as the key of any SDK; None unless it was made with `as_key=True`.
        replies: the ids of the replies that `chat` got. An agent that talks by itself may add its own.
    """

    def __init__(self, client: AsyncClient, made: Mapping[str, Any]) -> None:
        self.client = client
        self.id: str = made["session_id"]
        self.base_url: str = made["base_url"]
        self.anthropic_base_url: str = made["anthropic_base_url"]
        # Earlier routers have no such field.
        self.google_base_url: str = made.get("google_base_url", made["anthropic_base_url"])
        self.key: str | None = made.get("session_key")
        self.replies: list[str] = []

    @classmethod
    async def create(cls, client: AsyncClient, **options: Unpack[SessionOptions]) -> Self:
        """Make a session at the router."""
        made = await client.run(operations.create_session(options))
        return cls(client, made)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.delete()

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], headers: Mapping[str, str] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Return a completion in OpenAI's form. `fields` are those of the request: `tools`, `temperature`, `n`, ..."""
        body = {"messages": list(messages), **fields}
        found: dict[str, Any] = await self.client.run(operations.chat(self.id, body, headers or {}))
        self.replies += [one["meta_info"]["generation_id"] for one in found["choices"] if "meta_info" in one]
        return found

    async def reward(self, reward_info: Mapping[str, Any], branch: str | None = None) -> bool:
        """Attach a reward to the session, or to a branch by the id of one of its replies.

        Returns False if the router says that its store did not take it (yet): trainers at other routers do not know it.
        """
        return await self.client.run(operations.reward_session(self.id, reward_info, branch))

    async def complete(self, reward_info: Mapping[str, Any] | None = None) -> bool:
        """Say that the agent is done, with the session's reward if it is known. Those who wait for the session go on.

        Returns False as `reward` does.
        """
        return await self.client.run(operations.complete_session(self.id, reward_info))

    async def finalize(self, **options: Unpack[ExportOptions]) -> Cover:
        """End it; return a trajectory for each branch. May be called again."""
        listed: ExportOptions = {"expect_request_ids": self.replies} if self.replies else {}
        return await self.client.run(operations.finalize(self.id, {**listed, **options}))

    async def trajectories(self, *, export_all_checkpoints: bool = False) -> tuple[Trajectory, ...]:
        """Return a trajectory for each branch so far, or for every reply, without ending the session."""
        call = operations.trajectories(self.id, export_all_checkpoints=export_all_checkpoints)
        return await self.client.run(call)

    async def score(self, *, roots: str = "all", **options: Unpack[ScoreOptions]) -> tuple[Trajectory, ...]:
        """Return the trajectories so far with what scorers say of them: `Trajectory.scores`. Nothing is ended.

        `roots`: `head` scores the task's alone. A scorer that failed may be asked again: the router goes on where it stopped.
        """
        return await self.client.run(operations.score_session(self.id, roots, options))

    async def tree(self, *, roots: str = "all", media: operations.Media = "ref") -> dict[str, Any]:
        """End it; return its tree, in which shared turns are once. See `middleware_hub.integrations.tree`.

        `roots`: `head` leaves out the requests that the agent made beside its task. `media`: as in `RetrieveOptions`.
        """
        asked = {"format": "tree", "roots": roots, "media": media}
        return await self.client.run(operations.in_session("POST", self.id, "/finalize", asked))

    async def delete(self) -> None:
        """Abort running generations, and forget everything."""
        await self.client.run(operations.delete_session(self.id))
