#!/usr/bin/env bash
# Guess: an agent framework sends an assistant's turn back as it got it: the same text, the same arguments, the
# reasoning in the field in which it came.
# Instead (smolagents 1.26.0, inspect-ai 0.3.285, langchain-openai 1.7.4, pydantic-ai-slim 2.68.0, openai-agents
# 0.24.0): smolagents turns the call into text with a Python dict in it, and the result into a user's message.
# inspect-ai puts a newline before the text if there was reasoning. langchain and openai-agents drop the reasoning.
# pydantic-ai, langchain and inspect-ai write the arguments again, in two ways. Of the five none sends back what it
# got.
# Hurts: each turn is another text, so the next prompt is encoded anew and no trajectory holds the sampled ids;
# between a call and its result the policy has lost the reasoning that made the call.
# Here: a session knows the turn by what the model would see and keeps its ids; smolagents' is an edited turn, of
# which the ids before the edit are kept.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check smolagents==1.26.0 inspect-ai==0.3.285 langchain-openai==1.7.4 \
    "pydantic-ai-slim[openai]==2.68.0" openai-agents==0.24.0 openai==3.57.0
cat >"$tmp/run.py" <<'PY'  # a file: smolagents reads the source of tools
import asyncio
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

ARGUMENTS = '{"path":"/a",  "n": 1.0}'
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": ARGUMENTS}}
TURN = {"role": "assistant", "content": "I will look.", "reasoning_content": "Hm.", "tool_calls": [CALL]}
DONE = {"id": "call_2", "type": "function", "function": {"name": "final_answer", "arguments": '{"answer": "Done."}'}}


class Engine(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        bodies.append(body)
        last = {"role": "assistant", "content": "Done."}
        if any(tool["function"]["name"] == "final_answer" for tool in body.get("tools", [])):
            last["tool_calls"] = [DONE]  # smolagents ends with a call
        message = TURN if len(bodies) == 1 else last
        choice = {"index": 0, "finish_reason": "tool_calls" if "tool_calls" in message else "stop", "message": message}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        reply = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def look(path: str, n: float = 1.0) -> str:
    """Look.

    Args:
        path: where
        n: how often
    """
    return "ok"


def smolagents():
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel("m", api_base=url, api_key="none")
    ToolCallingAgent(tools=[tool(look)], model=model, max_steps=3, verbosity_level=0).run("hi")


def inspect_ai():
    from inspect_ai.model import ChatMessageTool, ChatMessageUser, get_model
    from inspect_ai.tool import ToolInfo, ToolParams

    async def two_turns():
        model = get_model("openai-api/local/m", base_url=url, api_key="none")
        tools = [ToolInfo(name="look", description="Look.", parameters=ToolParams())]
        messages = [ChatMessageUser(content="hi")]
        turn = (await model.generate(messages, tools=tools)).message
        await model.generate([*messages, turn, ChatMessageTool(content="ok", tool_call_id="call_1", function="look")])

    asyncio.run(two_turns())


def langchain_openai():
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="m", base_url=url, api_key="none").bind_tools([look])
    turn = model.invoke([HumanMessage("hi")])
    model.invoke([HumanMessage("hi"), turn, ToolMessage("ok", tool_call_id="call_1")])


def pydantic_ai_slim():
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    Agent(OpenAIChatModel("m", provider=OpenAIProvider(base_url=url, api_key="none")), tools=[look]).run_sync("hi")


def openai_agents():
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool
    from openai import AsyncOpenAI

    model = OpenAIChatCompletionsModel("m", AsyncOpenAI(base_url=url, api_key="none"))
    Runner.run_sync(Agent(name="agent", tools=[function_tool(look)], model=model), "hi")


def came_back():
    turn = next(message for message in bodies[1]["messages"] if message["role"] == "assistant")
    content = turn.get("content")
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    calls = turn.get("tool_calls")
    return text, turn.get("reasoning_content"), calls[0]["function"]["arguments"] if calls else None


server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
SPACED, DENSE = '{"path": "/a", "n": 1.0}', '{"path":"/a","n":1.0}'
PYTHON = "I will look.\nCalling tools:\n[{'id': 'call_1', 'type': 'function', 'function': "
PYTHON += "{'name': 'look', 'arguments': {'path': '/a', 'n': 1.0}}}]"
EXPECTED = {
    smolagents: (PYTHON, None, None),
    inspect_ai: ("\nI will look.", "Hm.", SPACED),
    langchain_openai: ("I will look.", None, SPACED),
    pydantic_ai_slim: ("I will look.", "Hm.", DENSE),
    openai_agents: ("I will look.", None, ARGUMENTS),
}
print(f"{'sent':24} {('I will look.', 'Hm.', ARGUMENTS)}")
right = True
for run, expected in EXPECTED.items():
    bodies = []
    run()
    name = run.__name__.replace("_", "-")
    print(f"{name + ' ' + version(name):24} {came_back()}")
    right &= came_back() == expected
sys.exit(0 if right else "changed")
PY
OPENAI_AGENTS_DISABLE_TRACING=1 "$tmp/venv/bin/python" -W ignore "$tmp/run.py"
