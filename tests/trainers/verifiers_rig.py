"""An environment of verifiers, with a harness that talks by each of its dialects. verifiers' own process imports this file.

Without `verifiers_rig` on its path, verifiers finds neither: the name of the module is the id of both.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import anthropic
import openai
import verifiers.v1 as vf
from verifiers.v1.configs.harness import HarnessConfig

__all__ = ["QuestionTaskset", "Sdk"]


class QuestionTask(vf.Task[vf.TaskData]):
    """Wants the length of a river."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float("1,094" in (trace.nodes[-1].message.content or ""))


class QuestionTaskset(vf.Taskset[QuestionTask]):
    def load(self) -> Iterable[QuestionTask]:
        for ask in os.environ.get("ASK", "chat").split(","):
            yield QuestionTask(vf.TaskData(name=ask, prompt="How long is the Elbe?"), self.config.task)


class Sdk(vf.Harness[HarnessConfig]):
    """Asks until the model says `done`, and `Sure?` in between. A task's name is the dialect, and whether it streams.

    The SDKs repeat nothing: what is repeated is so by the client.
    """

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    SUPPORTS_RESUME = True

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
        tool_interception_url: Any = None,
    ) -> Any:
        ask, _, stream = data.name.partition("_")
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        for _ in range(8):
            said = await getattr(self, ask)(endpoint, secret, messages, bool(stream))
            messages.append({"role": "assistant", "content": said})
            if "done" in said:
                break
            messages.append({"role": "user", "content": "Sure?"})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def chat(self, endpoint: str, secret: str, messages: list[Any], stream: bool) -> str:
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            if not stream:
                answer = await client.chat.completions.create(model="m", messages=messages)
                return answer.choices[0].message.content or ""
            said = ""
            options = {"include_usage": True}
            async for piece in await client.chat.completions.create(
                model="m", messages=messages, stream=True, stream_options=options
            ):
                said += (piece.choices[0].delta.content or "") if piece.choices else ""
            return said

    async def responses(self, endpoint: str, secret: str, messages: list[Any], stream: bool) -> str:
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            if not stream:
                return (await client.responses.create(model="m", input=messages)).output_text
            async with client.responses.stream(model="m", input=messages) as found:
                return (await found.get_final_response()).output_text

    async def messages(self, endpoint: str, secret: str, messages: list[Any], stream: bool) -> str:
        root = endpoint.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=root, api_key=secret, max_retries=0) as client:
            if not stream:
                answer = await client.messages.create(model="m", max_tokens=100, messages=messages)
            else:
                async with client.messages.stream(model="m", max_tokens=100, messages=messages) as found:
                    answer = await found.get_final_message()
            return "".join(part.text for part in answer.content if part.type == "text")
