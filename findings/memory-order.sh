#!/usr/bin/env bash
# Guess: at its second step an agent of CAMEL sends the first step's messages in the order in which they were said.
# Instead (camel-ai 0.2.90, default memory): the answer of the first step stands before the step's second call, and the
# user's second question between that call's result and the third call: question, call 1, result 1, answer, call 2,
# result 2, question, call 3, result 3. Within one step the order is right.
# Hurts: the model reads its own answer before the calls that led to it; a rollout is no continuation of the step before,
# so the tokens from there on are read again and its second step trains on a history that never was.
# Here: such a request is a branch of its own behind call 1, with `edited_turn`; each step is kept exactly, and none is lost.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install --quiet --disable-pip-version-check camel-ai==0.2.90 'mcp==1.19.0' >"$tmp/pip.log" 2>&1 || { cat "$tmp/pip.log"; exit 1; }
cat >"$tmp/run.py" <<'PY'
import http.server
import json
import sys
import threading

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.toolkits import FunctionTool
from camel.types import ModelPlatformType
from camel.utils import BaseTokenCounter

bodies = []


class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        number = len(bodies)
        message = {"role": "assistant", "content": f"Answer {number}."}
        if number <= 3:
            function = {"name": "look", "arguments": json.dumps({"where": str(number)})}
            message = {"role": "assistant", "content": None, "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if number <= 3 else "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        reply = json.dumps({"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_):
        pass


class Counter(BaseTokenCounter):
    """The default one downloads a vocabulary."""

    def count_tokens_from_messages(self, messages):
        return len(str(messages)) // 4

    def encode(self, text):
        return list(range(len(text) // 4))

    def decode(self, token_ids):
        return ""


def look(where: str) -> str:
    """Look somewhere.

    Args:
        where: the place.
    """
    return f"nothing in {where}"


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
model = ModelFactory.create(
    ModelPlatformType.OPENAI_COMPATIBLE_MODEL, "m", url=f"http://127.0.0.1:{server.server_address[1]}/v1", api_key="none", token_counter=Counter()
)
agent = ChatAgent("You look.", model=model, tools=[FunctionTool(look)])
agent.step("Question 1")
agent.step("Question 2")


def told(message):
    calls = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    return f"{message['role']}: {' '.join(calls) or message['content']}"


within, after = ([told(one) for one in body["messages"][1:]] for body in bodies[-2:])
print("camel-ai 0.2.90, the last request of step 1:", *within, "the request of step 2:", *after, sep="\n  ")
whole = [*within, "assistant: Answer 4.", "user: Question 2"]
moved = [whole[0], *whole[1:3], whole[7], *whole[3:5], whole[8], *whole[5:7]]
sys.exit(0 if after == moved else "changed")
PY
"$tmp/venv/bin/python" "$tmp/run.py"
