#!/usr/bin/env bash
# Guess: where a model calls a tool that there is not, an agent sends the call back as it was, with an error as its result.
# Instead (opencode-ai 1.18.33): the history has a call of a tool `invalid`, with arguments that the model never wrote: the name
# that it did call, and the text of an error. The id of the call stays.
# Hurts: the model reads in its own turn that it called `invalid`, a name that none of its tools explains, so it learns from a
# turn that it did not sample; whoever compares turns with what was sampled takes it for another conversation.
# Here: the request says `edited_turn`; all before that call keeps its ids, and the sampled call stays in its own branch.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
export HOME="$tmp/home" PATH="$tmp/node_modules/.bin:$PATH"
mkdir -p "$HOME" "$tmp/work"
npm install --silent --prefix "$tmp" opencode-ai@1.18.33 >"$tmp/npm.log" 2>&1 || { cat "$tmp/npm.log"; exit 1; }
cat >"$tmp/run.py" <<'PY'
import http.server
import json
import subprocess
import sys
import threading

bodies = []


class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        delta = {"role": "assistant", "content": "Done."}
        if body.get("tools"):  # a title is asked for without
            bodies.append(body)
            if len(bodies) == 1:
                function = {"name": "gaze", "arguments": '{"far": true}'}
                delta = {"role": "assistant", "tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}]}
        finish = "tool_calls" if "tool_calls" in delta else "stop"
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for choice in ({"delta": delta, "finish_reason": None}, {"delta": {}, "finish_reason": finish}):
            event = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [{"index": 0, **choice}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
options = {"baseURL": f"http://127.0.0.1:{server.server_address[1]}/v1", "apiKey": "none"}
provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"m": {"limit": {"context": 30000, "output": 2000}}}}
with open("opencode.json", "w") as file:
    json.dump({"provider": {"one": provider}, "autoupdate": False, "share": "disabled"}, file)
command = ["opencode", "run", "Gaze.", "--model", "one/m"]
subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, timeout=180)
(turn,) = [one for one in bodies[1]["messages"] if one["role"] == "assistant"]
(call,) = turn["tool_calls"]
offered = [one["function"]["name"] for one in bodies[1]["tools"]]
print("opencode-ai 1.18.33; the model called: gaze {\"far\": true}")
print("the next request says that it called:", call["function"]["name"], call["function"]["arguments"])
print("`invalid` is one of the tools that the request offers:", "invalid" in offered)
arguments = json.loads(call["function"]["arguments"])
same = call["function"]["name"] == "invalid" and call["id"] == "call_1" and sorted(arguments) == ["error", "tool"] and arguments["tool"] == "gaze"
sys.exit(0 if same else "changed")
PY
cd "$tmp/work" && python3 "$tmp/run.py"
