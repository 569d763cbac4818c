#!/usr/bin/env bash
# Guess: Anthropic's tool runner sends the whole conversation in each request, as the Messages API is stateless, so it
# works with any server of that API.
# Instead (anthropic 2.14.0 for Python, @anthropic-ai/sdk 1.14.0): by default it asks the server to hold the
# conversation (`thread`), and its second request has the results of the tools and nothing else: neither the question, nor
# the system prompt, nor the tools. A server that leaves out fields which it does not know answers that, with status 200.
# If the server refuses `thread` with the code `thread_unsupported_request`, the runner sends all messages.
# Hurts: whoever serves an open model under this API, and trains on what agents do there: from the second turn on the
# model is asked about results without a question, and no error says so.
# Here: the router refuses `thread` in these words, so the runner's loop is one conversation, token by token.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install -qq --disable-pip-version-check anthropic==2.14.0
npm install --silent --ignore-scripts --prefix "$tmp" @anthropic-ai/sdk@1.14.0 >"$tmp/npm.log" 2>&1 || { cat "$tmp/npm.log"; exit 1; }
cat >"$tmp/runner.mjs" <<'JS'
import Anthropic from '@anthropic-ai/sdk';
const look = {
  name: 'look',
  description: 'Looks somewhere.',
  input_schema: { type: 'object', properties: { where: { type: 'string' } } },
  run: async () => 'nothing',
  parse: (input) => input,
};
const client = new Anthropic({ apiKey: 'none', baseURL: process.argv[2] });
const messages = [{ role: 'user', content: 'Where is it?' }];
await client.beta.messages.toolRunner({ model: 'model', max_tokens: 9, system: 'Be brief.', tools: [look], messages }).runUntilDone();
JS
"$tmp/venv/bin/python" - "$tmp/runner.mjs" <<'PY'
import http.server
import json
import subprocess
import sys
import threading
from importlib.metadata import version

import anthropic

CALL = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"where": "there"}}
CODE = "thread_unsupported_request"
REFUSAL = {"type": "invalid_request_error", "message": "no threads", "details": {"error_code": CODE, "unsupported": []}}


class Model(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if refuses and body.get("thread"):
            return self.answer(400, {"type": "error", "error": REFUSAL})
        requests.append(body)
        content = [CALL] if len(requests) == 1 else [{"type": "text", "text": "nowhere"}]
        reason = "tool_use" if len(requests) == 1 else "end_turn"
        answer = {"id": f"msg_{len(requests)}", "type": "message", "role": "assistant", "model": "model"}
        usage = {"input_tokens": 1, "output_tokens": 1}
        return self.answer(200, answer | {"content": content, "stop_reason": reason, "stop_sequence": None, "usage": usage})

    def answer(self, status, body):
        found = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(found)))
        self.end_headers()
        self.wfile.write(found)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Model)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}"


@anthropic.beta_tool
def look(where: str) -> str:
    """Looks somewhere.

    Args:
        where: the place
    """
    return "nothing"


def python():
    client = anthropic.Anthropic(api_key="none", base_url=url)
    asked = [{"role": "user", "content": "Where is it?"}]
    runner = client.beta.messages.tool_runner(model="model", max_tokens=9, system="Be brief.", tools=[look], messages=asked)
    runner.until_done()


def node():
    subprocess.run(["node", sys.argv[1], url], check=True)


print("anthropic", version("anthropic"), "@anthropic-ai/sdk 1.14.0")
right = True
for name, client in (("Python", python), ("Node", node)):
    for refuses in (False, True):
        requests = []
        client()
        second = requests[1]
        roles = [one["role"] for one in second["messages"]]
        has = [field for field in ("thread", "system", "tools") if field in second]
        server_is = "refuses threads" if refuses else "knows no threads"
        print(f"{name:6} the server {server_is:16} the second request has the messages of {', '.join(roles)} and {', '.join(has)}")
        right &= (roles, has) == ((["user", "assistant", "user"], ["system", "tools"]) if refuses else (["user"], ["thread"]))
sys.exit(0 if right else "changed")
PY
