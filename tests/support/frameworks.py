"""Agents of frameworks: `python -m tests.support.frameworks NAME BASE_URL ANTHROPIC_URL` prints the answer of one.

They are made as their own documentation makes them, and use a tool until they have an answer. Each runs in a process of its
own: what a framework leaves open, or sets for all of a process, stays there.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

from tests.support.agents import TOOLS

SYSTEM, QUESTION = "You look.", "Where is it?"


def found(where: str, times: int) -> str:
    return f"{where}: nothing, {times} times"


def openai_agents(base_url: str, _: str, *, stream: bool = False, responses: bool = False) -> Any:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    kind = OpenAIResponsesModel if responses else OpenAIChatCompletionsModel
    model = kind("m", AsyncOpenAI(base_url=base_url, api_key="none"))

    @function_tool
    def look(where: str, times: int) -> str:
        """Look somewhere."""
        return found(where, times)

    agent = Agent(name="one", instructions=SYSTEM, model=model, tools=[look])

    async def run() -> Any:
        if not stream:
            return (await Runner.run(agent, QUESTION)).final_output
        running = Runner.run_streamed(agent, QUESTION)
        async for _ in running.stream_events():
            pass
        return running.final_output

    return asyncio.run(run())


def openai_agents_streaming(base_url: str, other: str) -> Any:
    return openai_agents(base_url, other, stream=True)


def openai_agents_responses(base_url: str, other: str) -> Any:
    return openai_agents(base_url, other, responses=True)


def openai_agents_responses_streaming(base_url: str, other: str) -> Any:
    return openai_agents(base_url, other, stream=True, responses=True)


def pydantic_ai(model: Any) -> Any:
    from pydantic_ai import Agent

    agent = Agent(model, instructions=SYSTEM)

    @agent.tool_plain
    def look(where: str, times: int) -> str:
        """Look somewhere."""
        return found(where, times)

    return asyncio.run(agent.run(QUESTION)).output


def pydantic_ai_openai(base_url: str, _: str) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return pydantic_ai(OpenAIChatModel("m", provider=OpenAIProvider(base_url=base_url, api_key="none")))


def pydantic_ai_responses(base_url: str, _: str) -> Any:
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return pydantic_ai(OpenAIResponsesModel("m", provider=OpenAIProvider(base_url=base_url, api_key="none")))


def pydantic_ai_anthropic(_: str, base_url: str) -> Any:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    return pydantic_ai(AnthropicModel("m", provider=AnthropicProvider(base_url=base_url, api_key="none")))


def litellm(model: str, address: str, *, stream: bool) -> Any:
    import litellm

    litellm.suppress_debug_info = True
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    while True:
        reply = litellm.completion(
            model, messages, base_url=address, api_key="none", tools=TOOLS, max_tokens=200, stream=stream
        )
        if stream:
            reply = litellm.stream_chunk_builder(list(reply), messages=messages)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": call.function.arguments} for call in message.tool_calls
        ]


def litellm_openai(base_url: str, _: str) -> Any:
    return litellm("openai/m", base_url, stream=False)


def litellm_openai_streaming(base_url: str, _: str) -> Any:
    return litellm("openai/m", base_url, stream=True)


def litellm_anthropic(_: str, base_url: str) -> Any:
    return litellm("anthropic/m", base_url, stream=False)


def litellm_anthropic_streaming(_: str, base_url: str) -> Any:
    return litellm("anthropic/m", base_url, stream=True)


def langchain(model: Any) -> Any:
    from langchain.agents import create_agent
    from langchain_core.tools import tool

    @tool
    def look(where: str, times: int) -> str:
        """Look somewhere."""
        return found(where, times)

    agent = create_agent(model, [look], system_prompt=SYSTEM)
    return agent.invoke({"messages": [("user", QUESTION)]})["messages"][-1].text


def langchain_openai(base_url: str, _: str) -> Any:
    from langchain_openai import ChatOpenAI

    return langchain(ChatOpenAI(model="m", base_url=base_url, api_key="none"))


def langchain_responses(base_url: str, _: str) -> Any:
    from langchain_openai import ChatOpenAI

    return langchain(ChatOpenAI(model="m", base_url=base_url, api_key="none", use_responses_api=True))


def langchain_anthropic(_: str, base_url: str) -> Any:
    from langchain_anthropic import ChatAnthropic

    return langchain(ChatAnthropic(model="m", base_url=base_url, api_key="none", max_tokens=200))


AGENTS: dict[str, Callable[[str, str], Any]] = {
    one.__name__: one
    for one in (
        openai_agents,
        openai_agents_streaming,
        openai_agents_responses,
        openai_agents_responses_streaming,
        pydantic_ai_openai,
        pydantic_ai_responses,
        pydantic_ai_anthropic,
        litellm_openai,
        litellm_openai_streaming,
        litellm_anthropic,
        litellm_anthropic_streaming,
        langchain_openai,
        langchain_responses,
        langchain_anthropic,
    )
}


if __name__ == "__main__":
    name, *addresses = sys.argv[1:]
    print(AGENTS[name](*addresses))
