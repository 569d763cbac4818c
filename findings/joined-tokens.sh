#!/usr/bin/env bash
# Guess: pydantic-ai writes the arguments of a turn that it sends back again, and leaves its text, and the results of tools, as
# they are.
# Instead (pydantic-ai-slim 2.68.0, OpenAI's dialects, each model that does not have the name of a closed one): texts, arguments
# and results get a zero-width joiner (U+200D) in whatever looks like a special token, behind its first character: `<|note|>`,
# `[INST]`. A zero-width character that the model itself wrote there is gone from its answer.
# Hurts: a server that encodes the history again gets other tokens than were sampled, wherever an agent works on texts with
# templates or their marks in them; and the model does not read what its tool said.
# Here: such an echo is the sampled turn, and keeps its ids. The profile's setting `may_tokenize_special_tokens_in_content=False`
# leaves texts as they are.
set -euo pipefail
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
python3 -m venv "$tmp/venv"
"$tmp/venv/bin/pip" install --quiet --disable-pip-version-check "pydantic-ai-slim[openai]==2.68.0" openai==3.57.0 >"$tmp/pip.log" 2>&1 || { cat "$tmp/pip.log"; exit 1; }
cat >"$tmp/run.py" <<'PY'
import http.server
import json
import sys
import threading

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.openai import OpenAIProvider

TEXT = "Write <|note|>, not [INST]."
bodies = []


class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        bodies.append(body)
        is_first = len(body["messages"]) == 1
        function = {"name": "look", "arguments": json.dumps({"where": "<|note|>"})}
        calls = {"tool_calls": [{"id": "call_1", "type": "function", "function": function}]} if is_first else {}
        message = {"role": "assistant", "content": TEXT if is_first else "A <\u200b|note|>.", **calls}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if is_first else "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        reply = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        reply = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
provider = OpenAIProvider(base_url=f"http://127.0.0.1:{server.server_address[1]}/v1", api_key="none")


def sent_back(**settings):
    """The text, the arguments and the result of the second request, and the answer in the end."""
    agent = Agent(OpenAIChatModel("m", provider=provider, **settings))

    @agent.tool_plain
    def look(where: str) -> str:
        """Look somewhere."""
        return f"nothing in {where}"

    output = agent.run_sync("Where is it?").output
    turn, result = bodies[-1]["messages"][1:3]
    return turn["content"], json.loads(turn["tool_calls"][0]["function"]["arguments"])["where"], result["content"], output


found = sent_back()
off = sent_back(profile=ModelProfile(may_tokenize_special_tokens_in_content=False))
print("pydantic-ai-slim 2.68.0; text, argument, result, final answer:")
print(" ", *map(ascii, found))
print("with may_tokenize_special_tokens_in_content=False:")
print(" ", *map(ascii, off))
joined = ("Write <\u200d|note|>, not [\u200dINST].", "<\u200d|note|>", "nothing in <\u200d|note|>", "A <|note|>.")
plain = (TEXT, "<|note|>", "nothing in <|note|>", "A <\u200b|note|>.")
sys.exit(0 if (found, off) == (joined, plain) else "changed")
PY
"$tmp/venv/bin/python" "$tmp/run.py"
