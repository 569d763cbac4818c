#!/usr/bin/env bash
# Guess: the second turn of a conversation repeats the messages of the first as they were, and adds the new question.
# Instead (verifiers 0.4.0, harness `bash`): the second turn of an interaction has the system prompt twice, one behind the other.
# Hurts: no token behind the system prompt has the place that it had, so an engine's cache is of no use, and a trainer gets two
# sequences of one conversation, of which the second reads all of the first again.
# Here: the request says `prefix_changed`; what was sampled before keeps its ids and is trained on in its own trajectory.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python=${PYTHON:-python3.12}
"$python" -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install --quiet --disable-pip-version-check uv==0.13.9
"$tmp/venv/bin/uv" pip install --quiet --python "$tmp/venv/bin/python" verifiers==0.4.0
cat >"$tmp/run.py" <<'PY'
import asyncio
import http.server
import json
import os
import sys
import threading

from verifiers.v1 import AgentConfig, Task, TaskData, make_agent

bodies = []


class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        said = {"role": "assistant", "content": "Done."}
        for choice in ({"delta": said, "finish_reason": None}, {"delta": {}, "finish_reason": "stop"}):
            event = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [{"index": 0, **choice}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["KEY"] = "none"
client = {"type": "eval", "base_url": f"http://127.0.0.1:{server.server_address[1]}/v1", "api_key_var": "KEY"}


async def main():
    config = AgentConfig(harness={"id": "bash"}, runtime={"type": "subprocess"}, model="m", client=client)
    async with make_agent(config) as agent, agent.interaction(Task(TaskData())) as talk:
        for question in ("Where is it?", "Are you sure?"):
            await talk.turn(question)


asyncio.run(main())
first, second = ([(one["role"], one["content"]) for one in body["messages"]] for body in bodies)
print("verifiers 0.4.0; messages of the first request:")
print(*(f"  {role}: {content[:60]}" for role, content in first), sep="\n")
print("of the second:")
print(*(f"  {role}: {content[:60]}" for role, content in second), sep="\n")
same = [role for role, _ in second] == ["system", "system", "user", "assistant", "user"] and second[0] == second[1] == first[0]
sys.exit(0 if same else "changed")
PY
cd "$tmp" && PATH="$tmp/venv/bin:$PATH" "$tmp/venv/bin/python" "$tmp/run.py"
