#!/usr/bin/env bash
# Guess: if a reply ends at max_tokens inside a call's arguments, Anthropic's SDK raises an error or gives an empty
# input.
# Instead (anthropic 2.14.0 for Python, @anthropic-ai/sdk 1.14.0): the stream helpers repair the cut JSON. Fields that
# are whole stay, a cut field goes, and the input looks complete. Python even keeps a number that was cut (`{"n": 12`
# out of 1200 is 12), JavaScript does not. If the stream just ends early, Python's get_final_message returns the same
# without an error, with stop_reason None; JavaScript raises.
# Hurts: agents that run each tool_use without a look at stop_reason: a call that the model never finished is run with
# other arguments, and its result is rewarded. The repaired input, sent back, is not what was sampled.
# Here: a cut call goes out as text, not as a call, with stop_reason max_tokens; the ids of the turn stay as sampled.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check anthropic==2.14.0
npm install --silent --prefix "$tmp" @anthropic-ai/sdk@1.14.0 >"$tmp/npm.log" 2>&1 || { cat "$tmp/npm.log"; exit 1; }
cat >"$tmp/read.mjs" <<'JS'
import Anthropic from '@anthropic-ai/sdk';
const client = new Anthropic({ baseURL: process.argv[2], apiKey: 'none' });
const body = { model: 'm', max_tokens: 9, messages: [{ role: 'user', content: 'hi' }] };
try {
  const message = await client.messages.stream(body).finalMessage();
  console.log(JSON.stringify([message.content[0].input, message.stop_reason]));
} catch (error) {
  console.log(JSON.stringify(['error', null]));
}
JS
"$tmp/venv/bin/python" - "$tmp/read.mjs" <<'PY'
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import anthropic

MESSAGE = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None}
MESSAGE |= {"stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1}}


def events(cut, whole=True):
    yield {"type": "message_start", "message": MESSAGE}
    block = {"type": "tool_use", "id": "t", "name": "remove", "input": {}}
    yield {"type": "content_block_start", "index": 0, "content_block": block}
    yield {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": cut}}
    if whole:
        yield {"type": "content_block_stop", "index": 0}
        delta = {"stop_reason": "max_tokens", "stop_sequence": None}
        yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 9}}
        yield {"type": "message_stop"}


class Engine(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for event in self.server.events:
            self.wfile.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())

    def log_message(self, *_):
        pass


def read(*case):
    server.events = list(events(*case))
    client = anthropic.Anthropic(base_url=url, api_key="none")
    messages = [{"role": "user", "content": "hi"}]
    with client.messages.stream(model="m", max_tokens=9, messages=messages) as stream:
        message = stream.get_final_message()
    node = subprocess.run(["node", sys.argv[1], url], capture_output=True, text=True, check=True)
    return [message.content[0].input, message.stop_reason], json.loads(node.stdout)


server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
FOLDER = '{"path": "/a", "only_emp'
CASES = (FOLDER,), ('{"n": 12',), (FOLDER, False)
EXPECTED = [
    ([{"path": "/a"}, "max_tokens"], [{"path": "/a"}, "max_tokens"]),
    ([{"n": 12}, "max_tokens"], [{}, "max_tokens"]),
    ([{"path": "/a"}, None], ["error", None]),
]
print("anthropic", version("anthropic"), "and @anthropic-ai/sdk 1.14.0")
seen = [read(*case) for case in CASES]
for case, (python, javascript) in zip(CASES, seen):
    print(f"{case[0]:26} {'cut at max_tokens' if len(case) == 1 else 'the stream ends'}: Python {python}, JavaScript {javascript}")
sys.exit("changed" if seen != EXPECTED else 0)
PY
