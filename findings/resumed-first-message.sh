#!/usr/bin/env bash
# Guess: `qwen --continue` sends the conversation so far as it was sent before, and the new question behind it.
# Instead (@qwen-code/qwen-code 0.24.4): the first message of the user comes back without one of its parts. A reminder of
# today's date stood before the first question; after the resume it stands before the newest question only, and the first
# message has a part less, though system prompt, tools and day are the same.
# Hurts: everything behind the system prompt is another prefix: the engine's cache is lost from there on, and a rollout over
# a resume is two sequences, the second of which trains on a history that the model never saw.
# Here: such a request says `prefix_changed`, is a branch of its own, and both branches keep their sampled tokens.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
export HOME="$tmp/home" PATH="$tmp/node_modules/.bin:$PATH"
mkdir -p "$HOME" "$tmp/work"
npm install --silent --prefix "$tmp" node@24.21.0 @qwen-code/qwen-code@0.24.4 >"$tmp/npm.log" 2>&1 || { cat "$tmp/npm.log"; exit 1; }
cat >"$tmp/run.py" <<'PY'
import http.server
import json
import os
import subprocess
import sys
import threading

bodies = []


class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        delta = {"role": "assistant", "content": "Hi."}
        chunks = [{"delta": delta, "finish_reason": None}, {"delta": {}, "finish_reason": "stop"}]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for chunk in chunks:
            event = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [{"index": 0, **chunk}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
env = os.environ | {"OPENAI_BASE_URL": f"http://127.0.0.1:{server.server_address[1]}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "m"}
for words in (["First question"], ["Second question", "--continue"]):
    subprocess.run(["qwen", "-p", *words, "--auth-type", "openai"], env=env, stdin=subprocess.DEVNULL, check=True, timeout=120)


def parts(question):
    """The parts of the first user's message of the request that asks this, and the system prompt."""
    for body in bodies:
        last = body["messages"][-1]["content"]
        if question in (last if isinstance(last, str) else last[-1]["text"]):
            first = body["messages"][1]["content"]
            return [one["text"] for one in first], body["messages"][0]
    sys.exit(f"no request asks {question!r}")


(first, system), (second, other) = parts("First question"), parts("Second question")
gone = [one for one in first if one not in second]
print("@qwen-code/qwen-code 0.24.4: parts of the first message of the user:", len(first), "and, after the resume,", len(second))
print("the same system prompt:", system == other)
for one in gone:
    print("gone:", " ".join(one.split())[:60], "...")
alike = system == other and len(gone) == 1 and "The current date is" in gone[0] and [one for one in first if one not in gone] == second
sys.exit(0 if alike else "changed")
PY
cd "$tmp/work" && python3 "$tmp/run.py"
