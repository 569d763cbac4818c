#!/usr/bin/env bash
# Guess: a tool returns a mapping, and the model reads JSON, whatever framework runs the tool; what is no text at all in JSON,
# such as an object of pydantic, is JSON too.
# Instead: openai-agents 0.24.0, autogen-core 0.7.5 and inspect-ai 0.3.285 write Python: `{'ok': True, 'note': None}`. pydantic-ai
# 2.68.0, langgraph 1.2.24 and strands-agents 1.62.0 write JSON, the first without spaces. An object of pydantic is JSON in three,
# and `name='a' size=None` in the others; a list of such objects is `[Found(name='a', size=None)]` in all but pydantic-ai. None is
# `None`, `null` or an empty text.
# Hurts: a policy that was trained in one framework and runs in another, or on a set whose results are JSON: it reads other tokens
# for the same result, copies `True` and single quotes into the JSON of its next call, and cannot tell None from a text.
# Here: results come as text from the client's framework and stay as they are. Tools that return a text are the same everywhere.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check --no-compile pydantic-ai-slim==2.68.0 openai-agents==0.24.0 \
  autogen-core==0.7.5 langgraph==1.2.24 langgraph-prebuilt==1.1.3 strands-agents==1.62.0 inspect-ai==0.3.285
cd "$tmp"
"$tmp/venv/bin/python" -W ignore - <<'PY'
import asyncio
import sys
from importlib.metadata import version

import agents
import inspect_ai.model
import inspect_ai.tool
import pydantic_ai
import strands
from autogen_core import CancellationToken
from autogen_core.tools import FunctionTool
from langchain_core.messages import AIMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText
from pydantic import BaseModel
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import FunctionModel


class Found(BaseModel):
    name: str
    size: float | None = None


RESULTS = {
    "text": "a",
    "mapping": {"ok": True, "note": None},
    "none": None,
    "object": Found(name="a"),
    "objects": [Found(name="a")],
}


def tool_of(value):
    def look():
        """Look."""
        return value

    return look


def with_pydantic_ai(value):
    read = []

    def model(messages, info):
        last = messages[-1].parts[-1]
        if last.part_kind != "tool-return":
            return ModelResponse(parts=[ToolCallPart("look", {})])
        read.append(last.model_response_str())  # what its models of OpenAI's format send
        return ModelResponse(parts=[TextPart("done")])

    pydantic_ai.Agent(FunctionModel(model), tools=[tool_of(value)]).run_sync("hi")
    return read[0]


def with_openai_agents(value):
    read = []

    class Model(agents.Model):
        async def get_response(self, system_instructions, input, *more, **options):
            read.extend(item["output"] for item in input if item.get("type") == "function_call_output")
            text = ResponseOutputText(type="output_text", text="done", annotations=[])
            done = ResponseOutputMessage(id="m", type="message", role="assistant", status="completed", content=[text])
            call = ResponseFunctionToolCall(type="function_call", name="look", arguments="{}", call_id="c")
            return agents.ModelResponse(output=[done if read else call], usage=agents.Usage(), response_id=None)

        def stream_response(self, *more, **options):
            raise NotImplementedError

    agents.set_tracing_disabled(True)
    agents.Runner.run_sync(agents.Agent("a", tools=[agents.function_tool(tool_of(value))], model=Model()), "hi")
    return read[0]


def with_autogen(value):
    tool = FunctionTool(tool_of(value), "Look.")
    return tool.return_value_as_string(asyncio.run(tool.run_json({}, CancellationToken())))  # as its AssistantAgent does


def with_inspect(value):
    @inspect_ai.tool.tool
    def look():
        async def execute():
            """Look."""
            return value

        return execute

    call = inspect_ai.tool.ToolCall(id="c", function="look", arguments={})
    said = inspect_ai.model.ChatMessageAssistant(content="", tool_calls=[call])
    return asyncio.run(inspect_ai.model.execute_tools([said], [look()])).messages[0].content


def with_langgraph(value):
    graph = StateGraph(MessagesState)
    graph.add_node("tools", ToolNode([tool_of(value)]))
    graph.add_edge(START, "tools")
    said = AIMessage("", tool_calls=[{"name": "look", "args": {}, "id": "c", "type": "tool_call"}])
    return graph.compile().invoke({"messages": [said]})["messages"][-1].content


def with_strands(value):
    async def last():
        call = {"toolUseId": "c", "name": "look", "input": {}}
        return [event async for event in strands.tool(tool_of(value)).stream(call, {})][-1]

    [part] = asyncio.run(last())["tool_result"]["content"]
    return part["text"]


LISTED = "[Found(name='a', size=None)]"
PYTHON = ["a", "{'ok': True, 'note': None}", "None", "name='a' size=None", LISTED]
SEEN = {
    "pydantic-ai-slim": ["a", '{"ok":true,"note":null}', "", '{"name":"a","size":null}', '[{"name":"a","size":null}]'],
    "openai-agents": PYTHON,
    "autogen-core": [*PYTHON[:3], '{"name": "a", "size": null}', LISTED],
    "inspect-ai": PYTHON,
    "langgraph": ["a", '{"ok": true, "note": null}', "null", "name='a' size=None", LISTED],
    "strands-agents": ["a", '{"ok": true, "note": null}', "null", '{"name":"a","size":null}', LISTED],
}
WAYS = [with_pydantic_ai, with_openai_agents, with_autogen, with_inspect, with_langgraph, with_strands]
found = {}
for name, way in zip(SEEN, WAYS, strict=True):
    found[name] = [way(value) for value in RESULTS.values()]
    print(name, version(name))
    for kind, text in zip(RESULTS, found[name], strict=True):
        print(f"  {kind:8} {text!r}")
sys.exit("changed" if found != SEEN else 0)
PY
