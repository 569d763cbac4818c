#!/usr/bin/env bash
# Guess: after a reply without a text (the limit of tokens was reached while the model still thought), the next request
# of a chat has all that the user said, and perhaps an empty turn of the model.
# Instead (google-genai 3.6.1 for Python, @google/genai 2.32.0 for Node): the chat takes a reply whose content has no
# parts for a fault, and leaves the user's message before it out of all later requests, without an error or a log line. A
# reply with one empty text is kept.
# Hurts: whoever trains an agent on these clients: the prompt of the next turn lacks a message, so the conversation is
# another one from there on, and the tokens of the short reply were sampled for a prompt that never comes back.
# Here: the router's answers to Google's clients always have a part, an empty text if there is nothing else.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check google-genai==3.6.1
npm install --silent --ignore-scripts --prefix "$tmp" @google/genai@2.32.0 >"$tmp/npm.log" 2>&1 || { cat "$tmp/npm.log"; exit 1; }
cat >"$tmp/chat.mjs" <<'JS'
import { GoogleGenAI } from '@google/genai';
const client = new GoogleGenAI({ apiKey: 'none', httpOptions: { baseUrl: process.argv[2] } });
const chat = client.chats.create({ model: 'model' });
for (const message of ['one', 'two', 'three']) await chat.sendMessage({ message });
JS
"$tmp/venv/bin/python" - "$tmp/chat.mjs" <<'PY'
import http.server
import json
import subprocess
import sys
import threading
from importlib.metadata import version

from google import genai

WITHOUT = {"content": {"role": "model"}, "finishReason": "MAX_TOKENS", "index": 0}
EMPTY = {"content": {"role": "model", "parts": [{"text": ""}]}, "finishReason": "MAX_TOKENS", "index": 0}
SAID = {"content": {"role": "model", "parts": [{"text": "yes"}]}, "finishReason": "STOP", "index": 0}


class Model(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        requests.append([f"{one['role']} {''.join(part['text'] for part in one['parts'])!r}" for one in body["contents"]])
        answer = json.dumps({"candidates": [replies[len(requests) - 1]]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Model)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"


def python():
    connected = genai.Client(api_key="none", http_options={"base_url": url})
    chat = connected.chats.create(model="model")
    for message in ("one", "two", "three"):
        chat.send_message(message)


def node():
    subprocess.run(["node", sys.argv[1], url], check=True)


print("google-genai", version("google-genai"), "@google/genai 2.32.0")
right = True
for name, client in (("Python", python), ("Node", node)):
    for middle, lost in ((WITHOUT, True), (EMPTY, False)):
        replies, requests = [SAID, middle, SAID], []
        client()
        parts = "no parts" if lost else "an empty text"
        print(f"{name:6} the second reply has {parts}; the third request: {', '.join(requests[2])}")
        right &= ("user 'two'" not in requests[2]) is lost
sys.exit(0 if right else "changed")
PY
