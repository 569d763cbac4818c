"""A recording proxy: every request's text and every reply's text and ids, per conversation.

`/NAME/generate` is passed on to an SGLang worker with three changes, none of which touches the text: the
grammar that holds the random model to its shape; a bias against `<|endoftext|>`, so that replies end as ChatML ones do;
and, if there are stop strings, one more that never occurs. SGLang looks for a stop string in as many of the last
tokens as the longest one has when encoded by the tokenizer; a random model spells `Observation` with more.
`/NAME/v1/...` are OpenAI's endpoints on top of it (chat.py).
"""

import dataclasses
import json
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import chat
import shapes

NEVER = "~never-said~" * 8


@dataclasses.dataclass
class Turn:
    """One request and its reply, as they went over the wire."""

    text: str
    reply: str
    output_ids: list[int]
    finish: dict[str, Any]
    shape: str


@dataclasses.dataclass
class Conversation:
    """What is known of a conversation in advance, and its turns so far."""

    name: str
    pick: shapes.Pick
    template: chat.Template | None = None
    turns: list[Turn] = dataclasses.field(default_factory=list)
    answered: list[chat.Message] = dataclasses.field(default_factory=list)
    """The assistant messages that a chat client was given."""
    echoes: list[bool] = dataclasses.field(default_factory=list)
    """For each next request of a chat client: whether its assistant messages equal those it was given."""


class Proxy:
    """Serves on a free port of 127.0.0.1 from the start of its `with` block to the end."""

    def __init__(self, upstream: str, endoftext: int) -> None:
        self.upstream, self.endoftext = upstream, endoftext
        self.conversations: dict[str, Conversation] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())

    def __enter__(self) -> "Proxy":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()

    def url(self, conversation: Conversation) -> str:
        """Register a conversation and return its base URL."""
        self.conversations[conversation.name] = conversation
        return f"http://127.0.0.1:{self._server.server_port}/{conversation.name}"

    def generate(self, conversation: Conversation, body: dict[str, Any]) -> dict[str, Any]:
        """Pass one `/generate` request on and record it with its reply."""
        shape = conversation.pick(len(conversation.turns))
        sampling = dict(body.get("sampling_params") or {})
        sampling["regex"], sampling["logit_bias"] = shape.regex, {str(self.endoftext): -100.0}
        if sampling.get("stop"):
            sampling["stop"] = [*sampling["stop"], NEVER]
        answer = post(self.upstream + "/generate", {**body, "sampling_params": sampling})
        finish = answer["meta_info"]["finish_reason"]
        conversation.turns.append(Turn(body["text"], answer["text"], answer["output_ids"], finish, shape.name))
        return answer

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                _, name, endpoint = self.path.split("/", 2)
                conversation = proxy.conversations[name]
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if endpoint == "generate":
                    answer = proxy.generate(conversation, body)
                else:
                    if "messages" in body and conversation.answered:
                        conversation.echoes.append(chat.echoes(body["messages"], conversation.answered))
                    answer = chat.serve(
                        endpoint, body, conversation.template, lambda b: proxy.generate(conversation, b)
                    )
                    if "messages" in body:
                        conversation.answered.append(answer["choices"][0]["message"])
                payload = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """POST JSON, get JSON."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        data = reply.read()
    return json.loads(data) if data.strip() else {}
