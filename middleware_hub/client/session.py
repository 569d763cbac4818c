"""Agent sessions: made for a task, given to an agent as an address, and exported at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from middleware_hub.client import operations
from middleware_hub.client.asynchronous import AsyncClient
from middleware_hub.client.operations import ExportOptions, Operation, SessionOptions
from middleware_hub.client.trajectory import Cover


class SessionCalls:
    """The base of both sessions.

    Attributes:
        id: its name.
        base_url: for OpenAI's SDKs.
        anthropic_base_url: for Anthropic's.
        replies: the ids of the replies that `chat` got. An agent that talks by itself may add its own.
    """

    def __init__(self, made: Mapping[str, Any]) -> None:
        self.id: str = made["session_id"]
        self.base_url: str = made["base_url"]
        self.anthropic_base_url: str = made["anthropic_base_url"]
        self.replies: list[str] = []

    def chat_call(
        self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], headers: Mapping[str, str] | None
    ) -> Operation[dict[str, Any]]:
        return operations.chat(self.id, {"messages": list(messages), **fields}, headers or {})

    def took(self, found: dict[str, Any]) -> dict[str, Any]:
        self.replies += [one["meta_info"]["generation_id"] for one in found["choices"] if "meta_info" in one]
        return found

    def reward_call(self, reward_info: Mapping[str, Any], branch: str | None) -> Operation[bool]:
        return operations.reward_session(self.id, reward_info, branch)

    def finalize_call(self, options: ExportOptions) -> Operation[Cover]:
        listed: ExportOptions = {"expect_request_ids": self.replies} if self.replies else {}
        return operations.finalize(self.id, {**listed, **options})

    def tree_call(self, roots: str) -> Operation[dict[str, Any]]:
        return operations.in_session("POST", self.id, "/finalize", {"format": "tree", "roots": roots})


class AsyncSession(SessionCalls):
    """A session of an `AsyncClient`, made by `await AsyncSession.create(client)`. As a context it is deleted at the end."""

    def __init__(self, client: AsyncClient, made: Mapping[str, Any]) -> None:
        super().__init__(made)
        self.client = client

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
        return self.took(await self.client.run(self.chat_call(messages, fields, headers)))

    async def reward(self, reward_info: Mapping[str, Any], branch: str | None = None) -> bool:
        """Attach a reward to the session, or to a branch by the id of one of its replies.

        Returns False if the router says that its store did not take it (yet): trainers at other routers do not know it.
        """
        return await self.client.run(self.reward_call(reward_info, branch))

    async def finalize(self, **options: Unpack[ExportOptions]) -> Cover:
        """End it; return a trajectory for each branch. May be called again."""
        return await self.client.run(self.finalize_call(options))

    async def tree(self, *, roots: str = "all") -> dict[str, Any]:
        """End it; return its tree, in which shared turns are once. See `middleware_hub.integrations.tree`.

        `roots`: `head` leaves out what the agent asked beside its task.
        """
        return await self.client.run(self.tree_call(roots))

    async def delete(self) -> None:
        """Abort running generations, and forget everything."""
        await self.client.run(operations.delete_session(self.id))
