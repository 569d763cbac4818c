#!/usr/bin/env bash
# Guess: OpenAI's stream helpers put an engine's own fields together as they do with content: lists and texts are
# joined, and a number that comes with each chunk is that number at the end.
# Instead (openai 3.57.0 for Python, openai 7.59.0 for JavaScript), `token_ids` in each choice, as vLLM sends them:
# Python keeps the ids of the first chunk, JavaScript those of the last. In a delta Python joins lists, *adds* numbers
# (version 7 twice is 14) and doubles repeated texts; JavaScript keeps the last, so `reasoning_content` is its last
# piece.
# Hurts: trainers that read ids, versions or reasoning out of the helper's final object: a part of the ids looks like
# all, a weight version is one that never was. Nothing is raised; only a count of tokens against `usage` shows it.
# Here: trainers fetch ids from the router (a session, or a retrieval), not from a client's stream.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check openai==3.57.0
npm install --silent --prefix "$tmp" openai@7.59.0 >"$tmp/npm.log" 2>&1 || { cat "$tmp/npm.log"; exit 1; }
cat >"$tmp/read.mjs" <<'JS'
import OpenAI from 'openai';
const client = new OpenAI({ baseURL: process.argv[2], apiKey: 'none' });
const stream = client.chat.completions.stream({ model: 'm', messages: [{ role: 'user', content: 'hi' }] });
console.log(JSON.stringify((await stream.finalChatCompletion()).choices[0]));
JS
"$tmp/venv/bin/python" - "$tmp/read.mjs" <<'PY'
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import openai


def event(delta, finish=None, **own):
    choice = {"index": 0, "delta": delta, "finish_reason": finish, **own}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return f"data: {json.dumps(chunk)}\n\n"


OWN = {"weight_version": 7, "weight_tag": "v7"}
EVENTS = (
    event({"role": "assistant", "content": "he", "reasoning_content": "be", "ids": [1, 2], **OWN}, token_ids=[1, 2]),
    event({"content": "llo", "reasoning_content": "cause", "ids": [3], **OWN}, token_ids=[3]),
    event({}, "stop"),
    "data: [DONE]\n\n",
)


class Engine(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write("".join(EVENTS).encode())

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
with openai.OpenAI(base_url=url, api_key="none").chat.completions.stream(
    model="m", messages=[{"role": "user", "content": "hi"}]
) as stream:
    python = stream.get_final_completion().choices[0].model_dump()
node = subprocess.run(["node", sys.argv[1], url], capture_output=True, text=True, check=True)
javascript = json.loads(node.stdout)


def read(choice):
    message = choice["message"]
    return choice["token_ids"], *(message[name] for name in ("content", "reasoning_content", "ids", *OWN))


print("openai", version("openai"), "and openai 7.59.0 (npm)")
print("fields     choice.token_ids, content, reasoning_content, ids, weight_version, weight_tag")
print("sent       [1, 2] [3], he llo, be cause, [1, 2] [3], 7 7, v7 v7")
print("Python    ", *read(python))
print("JavaScript", *read(javascript))
expected = ([1, 2], "hello", "because", [1, 2, 3], 14, "v7v7"), ([3], "hello", "cause", [3], 7, "v7")
sys.exit("changed" if (read(python), read(javascript)) != expected else 0)
PY
