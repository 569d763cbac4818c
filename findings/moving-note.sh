#!/usr/bin/env bash
# Guess: the next request of an agent has the messages of the last one, and goes on behind them.
# Instead (@aaif/goose 0.20.1): each request has one note with the time and the use of the context. It stands before the last turn
# of the model, so it is no longer where it was in the request before; the text of that turn stands on its other side than its calls.
# Hurts: no request begins with the one before it, so an engine computes the history again at each turn, and a task of N turns is
# N sequences, for a trainer, too.
# Here: each turn is exact, in a trajectory of its own; the request says `prefix_changed` where it can be told.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
export HOME="$tmp/home" PATH="$tmp/node_modules/.bin:$PATH" GOOSE_PROVIDER=openai GOOSE_MODEL=m GOOSE_MODE=auto
export GOOSE_DISABLE_KEYRING=1 OPENAI_API_KEY=none
mkdir -p "$HOME" "$tmp/work"
npm install --silent --prefix "$tmp" @aaif/goose@0.20.1 >"$tmp/npm.log" 2>&1 || { cat "$tmp/npm.log"; exit 1; }
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
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        deltas = [{"role": "assistant", "content": "I look."}]
        if body.get("tools"):
            bodies.append(body)
            if len(bodies) == 1:
                function = {"name": "shell", "arguments": '{"command": "echo there"}'}
                deltas.append({"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}]})
        finish = "tool_calls" if len(deltas) > 1 else "stop"
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for choice in (*({"delta": one, "finish_reason": None} for one in deltas), {"delta": {}, "finish_reason": finish}):
            event = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [{"index": 0, **choice}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["OPENAI_HOST"] = f"http://127.0.0.1:{server.server_address[1]}"
command = ["goose", "run", "--quiet", "--no-profile", "--with-builtin", "developer", "--no-session", "--text", "Where is it?"]
subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=180)


def outline(body):
    """Who says what, in a word or two."""
    for message in body["messages"][1:]:
        text = message.get("content") or ""
        said = ["the note"] if "<info-msg>" in text else []
        said += [text.split("</info-msg>")[-1].strip()] if text.split("</info-msg>")[-1].strip() else []
        yield f"{message['role']}: {', '.join(said + ['a call'] * len(message.get('tool_calls') or ()))}"


first, second = (list(outline(body)) for body in bodies[:2])
print("@aaif/goose 0.20.1; behind the system prompt of the first request:", *first, sep="\n  ")
print("of the second:", *second, sep="\n  ")
same = first == ["user: the note, Where is it?"] and second[:4] == ["user: Where is it?", "assistant: I look.", "user: the note", "assistant: a call"]
sys.exit(0 if same else "changed")
PY
cd "$tmp/work" && python3 "$tmp/run.py"
