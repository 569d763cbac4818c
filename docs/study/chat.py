"""OpenAI's two endpoints, rendered to text: what stands between a chat client and `/generate`.

Rendering and parsing follow SGLang 0.5.23: tool-call arguments of the history are parsed before they reach the
template; `tojson` keeps non-ASCII letters; the reasoning parser cuts at `</think>` and strips nothing; the Qwen
tool-call parser strips the prose in front of the first call and prints the arguments again.
"""

import dataclasses
import json
import re
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]
Generate = Callable[[dict[str, Any]], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Template:
    """A chat template and the server's options for it."""

    path: Path
    parse_reasoning: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def render(self, messages: list[Message], tools: list[Any] | None) -> str:
        """The request's text, generation prompt included."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        source = re.sub(r"\{%-? (end)?generation -?%\}", "{#- -#}", self.path.read_text())
        return environment.from_string(source).render(
            messages=[_history(m) for m in messages], tools=tools, add_generation_prompt=True, **dict(self.options)
        )


def _history(message: Message) -> Message:
    message = json.loads(json.dumps(message))
    if isinstance(message.get("content"), list):
        message["content"] = "".join(part.get("text", "") for part in message["content"])
    for call in message.get("tool_calls") or []:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return message


def parse(reply: str, reasoning: bool, tools: bool) -> Message:
    """A reply's text as an assistant message."""
    message: Message = {"role": "assistant", "content": reply}
    if reasoning and "</think>" in reply:
        thought, _, rest = reply.removeprefix("<think>").partition("</think>")
        message |= {"reasoning_content": thought, "content": rest}
    prose, found, _ = message["content"].partition("<tool_call>\n")
    if tools and found:
        blocks = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", message["content"], re.DOTALL)
        message["content"] = prose.strip() or None
        message["tool_calls"] = [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": c["name"], "arguments": json.dumps(c["arguments"], ensure_ascii=False)},
            }
            for c in map(json.loads, blocks)
        ]
    return message


def echoes(messages: list[Message], answered: list[Message]) -> bool:
    """Return whether a request's assistant messages equal the answers, each one, in order.

    Compared as sessions compare: no content and empty content are equal, arguments are equal as JSON values, and
    reasoning that the client left out still matches.
    """

    def key(message: Message) -> tuple[Any, ...]:
        calls = [c["function"] for c in message.get("tool_calls") or []]
        return message.get("content") or "", [(c["name"], json.loads(c["arguments"])) for c in calls]

    return [key(m) for m in messages if m["role"] == "assistant"] == [key(m) for m in answered]


def serve(endpoint: str, body: dict[str, Any], template: Template | None, generate: Generate) -> dict[str, Any]:
    """Answer `v1/completions` or `v1/chat/completions` by one `/generate`."""
    stop = body.get("stop") or []
    sampling = {
        "max_new_tokens": 256,
        "temperature": 1.0,
        "stop": [stop] if isinstance(stop, str) else stop,
    }
    if endpoint == "v1/completions":
        prompt = body["prompt"]
        text = prompt if isinstance(prompt, str) else prompt[0]
    else:
        assert template is not None
        text = template.render(body["messages"], body.get("tools"))
    reply = generate({"text": text, "sampling_params": sampling})
    choice: dict[str, Any] = {"index": 0, "logprobs": None}
    choice["finish_reason"] = "length" if reply["meta_info"]["finish_reason"]["type"] == "length" else "stop"
    if endpoint == "v1/completions":
        choice["text"] = reply["text"]
    else:
        assert template is not None
        choice["message"] = parse(reply["text"], template.parse_reasoning, bool(body.get("tools")))
        if choice["message"].get("tool_calls"):
            choice["finish_reason"] = "tool_calls"
    return {
        "id": uuid.uuid4().hex,
        "object": "text_completion" if endpoint == "v1/completions" else "chat.completion",
        "created": int(time.time()),
        "model": body.get("model", "study"),
        "choices": [choice],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }
