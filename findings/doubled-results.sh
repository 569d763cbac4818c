#!/usr/bin/env bash
# Guess: an agent that resumes a conversation sends it as it was, and the new question behind it.
# Instead (@google/gemini-cli 0.61.0): each result of a tool stands there twice, with the id of the same call, and texts of the
# model lose the white space around them.
# Hurts: the model reads results that no tool gave a second time, and no sequence that is kept is continued behind the first of
# them: what was read so far is read again.
# Here: the same result of the same call within one content is taken once, so a resumed task stays one sequence.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
export HOME="$tmp/home" PATH="$tmp/node_modules/.bin:$PATH" GEMINI_API_KEY=none
mkdir -p "$HOME/.gemini" "$tmp/work"
npm install --silent --prefix "$tmp" @google/gemini-cli@0.61.0 >"$tmp/npm.log" 2>&1 || { cat "$tmp/npm.log"; exit 1; }
echo '{"security": {"auth": {"selectedType": "gemini-api-key"}}, "privacy": {"usageStatisticsEnabled": false}}' \
  >"$HOME/.gemini/settings.json"
cat >"$tmp/run.py" <<'PY'
import http.server
import json
import os
import subprocess
import sys
import threading

bodies = []
CALL = {"functionCall": {"id": "call_1", "name": "run_shell_command", "args": {"command": "echo there"}}}


class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        part = {"text": "  Done. "}
        if "streamGenerateContent" in self.path and body.get("tools"):
            bodies.append(body)
            part = CALL if len(bodies) == 1 else part
        candidate = {"index": 0, "content": {"role": "model", "parts": [part]}, "finishReason": "STOP"}
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(f"data: {json.dumps({'candidates': [candidate]})}\n\n".encode())

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["GOOGLE_GEMINI_BASE_URL"] = f"http://127.0.0.1:{server.server_address[1]}"
for more in ([], ["--resume", "latest"]):
    command = ["gemini", "-p", "Look.", *more, "-m", "m", "--yolo", "--skip-trust"]
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=180)


def results(body):
    parts = [part for content in body["contents"] for part in content["parts"]]
    return [part["functionResponse"]["id"] for part in parts if "functionResponse" in part]


print("@google/gemini-cli 0.61.0; results in the request behind the call:", results(bodies[1]))
print("in the first request of the resumed conversation:", results(bodies[2]))
texts = [part["text"] for content in bodies[2]["contents"] if content["role"] == "model" for part in content["parts"] if "text" in part]
print("the text '  Done. ' came back as:", texts)
same = results(bodies[1]) == ["call_1"] and results(bodies[2]) == ["call_1", "call_1"] and texts == ["Done."]
sys.exit(0 if same else "changed")
PY
cd "$tmp/work" && python3 "$tmp/run.py"
