#!/usr/bin/env bash
# Guess: SDKs send a POST again only if no answer came, and with an Idempotency-Key, so that a server can tell.
# Instead (openai 3.57.0 and anthropic 2.14.0 for Python): an answer with status 200 whose body is cut (a proxy, a
# closed connection) is asked for again, without an Idempotency-Key; only `x-stainless-retry-count: 1` differs. The
# packages for JavaScript (openai 7.59.0, @anthropic-ai/sdk 1.14.0) do not retry it: they let fetch's own TypeError
# out, which is not their APIError.
# Hurts: one turn is sampled twice, and whoever records at the server trains on both; the agent went on from one of
# them. In JavaScript, a handler for the SDK's errors lets the run end.
# Here: the same body with a retry count above 0 gets the reply that is kept, for two minutes.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check openai==3.57.0 anthropic==2.14.0
npm install --silent --prefix "$tmp" openai@7.59.0 @anthropic-ai/sdk@1.14.0 >"$tmp/npm.log" 2>&1 || { cat "$tmp/npm.log"; exit 1; }
cat >"$tmp/ask.mjs" <<'JS'
import OpenAI from 'openai';
import Anthropic from '@anthropic-ai/sdk';
const [url, kind] = process.argv.slice(2);
const body = { model: 'm', max_tokens: 9, messages: [{ role: 'user', content: 'hi' }] };
try {
  if (kind === 'openai') await new OpenAI({ baseURL: url, apiKey: 'none' }).chat.completions.create(body);
  else await new Anthropic({ baseURL: url, apiKey: 'none' }).messages.create(body);
  console.log('answered');
} catch (error) {
  console.log(error.constructor.name, error instanceof (kind === 'openai' ? OpenAI : Anthropic).APIError);
}
JS
"$tmp/venv/bin/python" - "$tmp/ask.mjs" <<'PY'
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import anthropic
import openai

CHOICE = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}
CHAT = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [CHOICE]}
MESSAGE = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [{"type": "text", "text": "hello"}]}
MESSAGE |= {"stop_reason": "end_turn", "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1}}


class Engine(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps(CHAT if "chat" in self.path else MESSAGE).encode()
        seen.append((self.headers["x-stainless-retry-count"], self.headers["idempotency-key"]))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:-9] if len(seen) == 1 else body)
        self.close_connection = True

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"
body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
print("openai", version("openai"), "anthropic", version("anthropic"), "openai 7.59.0 (npm) @anthropic-ai/sdk 1.14.0")
asks = {
    "openai, Python": lambda: openai.OpenAI(base_url=url, api_key="none").chat.completions.create(**body) and "answered",
    "anthropic, Python": lambda: anthropic.Anthropic(base_url=url, api_key="none").messages.create(**body) and "answered",
}
for kind in "openai", "anthropic":
    command = ["node", sys.argv[1], url + ("/v1" if kind == "openai" else ""), kind]
    asks[f"{kind}, JavaScript"] = lambda command=command: subprocess.check_output(command, text=True).strip()
got = []
for name, ask in asks.items():
    seen = []
    result = ask()
    got.append((result, seen))
    print(f"{name:22} {result}; {len(seen)} requests (retry count, idempotency key): {seen}")
twice = ("answered", [("0", None), ("1", None)])
once = ("TypeError false", [("0", None)])
sys.exit("changed" if got != [twice, twice, once, once] else 0)
PY
