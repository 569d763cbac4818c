#!/usr/bin/env bash
# Guess: LiteLLM's `anthropic/` route translates messages: the same content, in Anthropic's form.
# Instead (litellm 1.110.2): it also edits them. Thinking with an empty signature (what open models' servers give) is
# left out when the turn comes back. An empty message becomes a sentence in square brackets. A later system message
# becomes text in a user's message, behind a sentence about an operator.
# Hurts: the policy reads sentences that no task has, and its own reasoning is gone between a call and its result;
# each edited turn is another prefix than the one that was sampled.
# Here: a session recognises a turn without its reasoning and keeps its ids; it cannot know the inserted sentences.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check litellm==1.110.2
LITELLM_LOCAL_MODEL_COST_MAP=True "$tmp/venv/bin/python" -W ignore - <<'PY'
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import litellm

litellm.suppress_debug_info = True

CALL = {"type": "tool_use", "id": "call_1", "name": "look", "input": {"path": "/a"}}
THINKING = {"type": "thinking", "thinking": "Hm.", "signature": ""}
REPLY = {"id": "m", "type": "message", "role": "assistant", "model": "m", "stop_reason": "tool_use", "stop_sequence": None}
REPLY |= {"content": [THINKING, {"type": "text", "text": "I will look."}, CALL]}
REPLY |= {"usage": {"input_tokens": 1, "output_tokens": 1}}


class Engine(BaseHTTPRequestHandler):
    def do_POST(self):
        bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        body = json.dumps(REPLY).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


bodies = []
server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
threading.Thread(target=server.serve_forever, daemon=True).start()
path = {"type": "object", "properties": {"path": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": path}}]


def ask(messages):
    url = f"http://127.0.0.1:{server.server_port}"
    return litellm.completion("anthropic/m", messages=messages, tools=tools, api_base=url, api_key="none").choices[0].message


user = {"role": "user", "content": "hi"}
turn = ask([user])
result = {"role": "tool", "tool_call_id": "call_1", "content": "ok"}
rest = [{"role": "assistant", "content": ""}, {"role": "system", "content": "LATE"}, {"role": "user", "content": "go"}]
ask([user, turn, result, *rest])
seen = bodies[1]["messages"]
print("litellm", version("litellm"), "read the reasoning:", turn.reasoning_content)
for message in seen:
    print(json.dumps(message))
thinking = any(block["type"] == "thinking" for block in seen[1]["content"])
empty = seen[3]["content"][0]["text"].startswith("[System: ")
late = seen[4]["role"] == "user" and [block["text"] for block in seen[4]["content"]][1:] == ["LATE", "go"]
sys.exit(0 if turn.reasoning_content == "Hm." and not thinking and empty and late else "changed")
PY
