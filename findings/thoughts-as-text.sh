#!/usr/bin/env bash
# Guess: what a model answers over the Responses API, its thoughts and a call, comes back as these two items, in this order.
# Instead (@github/copilot 1.0.102): where an answer has thoughts and a call and no text, a message of the assistant stands
# between the two, whose text is the thoughts. So it is with thoughts in `content`, as open models have them; those in
# `summary`, as OpenAI's have them, come back as they were.
# Hurts: a chat template writes the thoughts twice, once as text that the model never wrote; the next turn is sampled behind
# that prompt, and a trainer that renders the history anew trains on it as a reply.
# Here: a message whose text is the thoughts of the sampled turn is that turn (docs/sessions.md, "When two messages are the
# same"), and the prompt goes on with its tokens.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
export HOME="$tmp/home" PATH="$tmp/node_modules/.bin:$PATH"
mkdir -p "$HOME" "$tmp/work"
for package in node@24.21.0 @github/copilot@1.0.102; do
  npm install --silent --prefix "$tmp" "$package" >"$tmp/npm.log" 2>&1 || { cat "$tmp/npm.log"; exit 1; }
done
cat >"$tmp/run.py" <<'PY'
import http.server
import json
import os
import subprocess
import sys
import threading

THOUGHT = "I look first."
bodies = []
kept_in = ""  # the field of a reasoning item that has the thoughts


def output(number):
    if number > 1:
        text = {"type": "output_text", "text": "Done.", "annotations": []}
        return [{"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [text]}]
    thought = {"type": "reasoning", "id": "rs_1", "status": "completed", "summary": [], "encrypted_content": "eA=="}
    kind = "reasoning_text" if kept_in == "content" else "summary_text"
    thought[kept_in] = [{"type": kind, "text": THOUGHT}]
    call = {"type": "function_call", "id": "fc_1", "status": "completed", "call_id": "call_1", "name": "bash"}
    return [thought, {**call, "arguments": '{"command": "echo a", "description": "Looks"}'}]


class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        response = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": "in_progress", "output": []}
        self.tell("response.created", response=response)
        for at, item in enumerate(items := output(len(bodies))):
            self.tell("response.output_item.added", output_index=at, item={**item, "status": "in_progress"})
            if item["type"] == "reasoning" and kept_in == "content":
                self.tell("response.reasoning_text.delta", output_index=at, item_id="rs_1", content_index=0, delta=THOUGHT)
            elif item["type"] == "reasoning":
                where = {"output_index": at, "item_id": "rs_1", "summary_index": 0}
                self.tell("response.reasoning_summary_part.added", **where, part={"type": "summary_text", "text": ""})
                self.tell("response.reasoning_summary_text.delta", **where, delta=THOUGHT)
            elif item["type"] == "function_call":
                self.tell("response.function_call_arguments.delta", output_index=at, item_id="fc_1", delta=item["arguments"])
            else:
                self.tell("response.output_text.delta", output_index=at, item_id="msg_1", content_index=0, delta="Done.")
            self.tell("response.output_item.done", output_index=at, item=item)
        usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
        usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        self.tell("response.completed", response={**response, "status": "completed", "output": items, "usage": usage})

    def tell(self, kind, **fields):
        self.wfile.write(f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode())

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
environment = os.environ | {
    "COPILOT_PROVIDER_BASE_URL": f"http://127.0.0.1:{server.server_address[1]}/v1",
    "COPILOT_PROVIDER_WIRE_API": "responses",
    "COPILOT_PROVIDER_API_KEY": "none",
    "COPILOT_MODEL": "m",
    "COPILOT_OFFLINE": "true",
}
print("@github/copilot 1.0.102; the model answered: reasoning, function_call")
same = True
for kept_in in ("content", "summary"):
    bodies.clear()
    command = ["copilot", "-p", "Look.", "--allow-all", "--silent"]
    subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True, timeout=180)
    items = bodies[1]["input"]
    end = next(at for at, one in enumerate(items) if one.get("type") == "function_call_output")
    begin = max(at for at, one in enumerate(items[:end]) if one.get("role") == "user") + 1
    told = [one.get("type", "message") for one in items[begin:end]]
    texts = [part["text"] for one in items[begin:end] if one.get("role") == "assistant" for part in one["content"]]
    print(f"thoughts in `{kept_in}`; the next request says: {', '.join(told)}; the message reads: {texts}")
    as_text = kept_in == "content"
    same = same and told == (["reasoning", "message", "function_call"] if as_text else ["reasoning", "function_call"])
    same = same and texts == ([THOUGHT] if as_text else [])
sys.exit(0 if same else "changed")
PY
cd "$tmp/work" && python3 "$tmp/run.py"
