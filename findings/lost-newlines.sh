#!/usr/bin/env bash
# Guess: ChatGoogleGenerativeAI returns the text of a reply as it came, and the same text whether it was streamed or not.
# Instead (langchain-google-genai 4.4.3): of a reply in one piece the newlines at the end of its text are cut off; a stream
# keeps them. So `invoke` and `stream` give two messages for one reply.
# Hurts: sent back as history it is another message than the model sampled, and a file, a patch or a block that has to end with
# a newline lacks it, in runs that do not stream alone.
# Here: the reply to the next question says `edited_turn`; the sampled tokens have their mask in a trajectory of their own.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install --quiet --disable-pip-version-check langchain-google-genai==4.4.3 langchain-core==1.8.3 google-genai==3.6.1 >"$tmp/pip.log" 2>&1 || { cat "$tmp/pip.log"; exit 1; }
cat >"$tmp/run.py" <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from langchain_google_genai import ChatGoogleGenerativeAI

CHUNKS = ["def f():\n", "    return 1\n", "\nf()\n"]


def reply(text):
    return {"candidates": [{"content": {"role": "model", "parts": [{"text": text}]}, "index": 0, "finishReason": "STOP"}]}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        streamed = "streamGenerateContent" in self.path
        events = "".join(f"data: {json.dumps(reply(one))}\r\n\r\n" for one in CHUNKS)
        body = (events if streamed else json.dumps(reply("".join(CHUNKS)))).encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if streamed else "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
model = ChatGoogleGenerativeAI(model="m", google_api_key="none", base_url=f"http://127.0.0.1:{server.server_port}")
whole = model.invoke("hi").text
streamed = "".join(chunk.text for chunk in model.stream("hi"))
print("sampled: ", repr("".join(CHUNKS)))
print("whole:   ", repr(whole))
print("streamed:", repr(streamed))
if (whole, streamed) != ("def f():\n    return 1\n\nf()", "def f():\n    return 1\n\nf()\n"):
    raise SystemExit("changed")
PY
PYTHONWARNINGS=ignore "$tmp/venv/bin/python" "$tmp/run.py"
