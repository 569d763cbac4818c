"""How much of what was sampled reaches the worker again.

`python -m benchmarks.serving.splicing` takes a minute (`--page docs/segments.md` writes its tables). It plays ten shapes of
conversations (`tests/support/shapes.py`) with six published chat templates and a scripted worker behind the router: in a
session, in a session with `--history template`, and without a session; and it computes what would be sent if every request
were rendered and encoded as a whole, as a worker's own chat endpoint does it. A cell is the share of ids of earlier replies
that stand unchanged in a prompt, and how many prompts begin with everything that the worker had read and sampled before: `100%
5/5`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.pages import put_between
from middleware_hub.hub import load
from router.config import RadixConfig
from tests.support.agents import AgentSession
from tests.support.chat_models import chat_model
from tests.support.shapes import SHAPES, ChatModel, Exchange, Kept, Message, Messages, converse, kept, understood
from tests.support.stack import Stack, stack

TEMPLATES = ("qwen3", "qwen3_5_think", "qwen2_5", "llama3_1", "glm4moe", "deepseekv3")
WITHOUT, SESSION, TEMPLATE, NAMELESS = "whole prompts", "session", "session, --history template", "no session"
WAYS = (WITHOUT, SESSION, TEMPLATE, NAMELESS)
RADIX = {"tokenizer_backend": "huggingface"}


def talk(model: ChatModel, served: Stack, path: Callable[[], str], shape: str) -> list[Exchange]:
    """Play one conversation over HTTP."""
    (worker,) = served.workers
    place = path()

    def ask(messages: Messages, tools: Any, options: Any, ids: list[int], stop: int) -> tuple[Message, list[int]]:
        worker.script(ids=[*ids, stop], finish=None)
        body: dict[str, Any] = {
            "model": "m",
            "messages": messages,
            "stop_token_ids": [stop],
            "skip_special_tokens": False,
        }
        body |= {"tools": tools} if tools else {}
        body |= {"chat_template_kwargs": options} if options else {}
        answer = served.post(place, body)
        if answer.status != 200:
            raise RuntimeError(f"{model.name}, {shape}: {answer.content[:500]!r}")
        return answer.json()["choices"][0]["message"], list(worker.log[-1].input_ids)

    return converse(model, SHAPES[shape], ask, opening=f"Hello, this is a {shape}")


def rendered(model: ChatModel) -> Callable[[Exchange], list[int]]:
    """Return a function for the ids that are sent if the whole conversation is rendered and encoded at every turn."""
    tokenizer = load(RadixConfig(tokenizer_path=str(chat_model(model.name)), tokenizer_backend="huggingface"))

    def sent(exchange: Exchange) -> list[int]:
        text = model.template.whole(understood(exchange.messages), exchange.tools, exchange.options)
        return tokenizer.encode_start(text)

    return sent


def measure(name: str) -> Iterator[tuple[str, str, Kept]]:
    """Yield the shape, the way and the result of each conversation with one template."""
    model = ChatModel(name)
    for history in ("keep", "template"):
        folder = chat_model(name)
        with stack("qwen", styles=("cumulative",), folder=folder, radix=RADIX, sessions={"history": history}) as made:

            def in_session(served: Stack = made) -> str:
                return f"{AgentSession.make(served).path}/v1/chat/completions"

            for shape in SHAPES:
                found = talk(model, made, in_session, shape)
                if history == "template":
                    yield shape, TEMPLATE, kept(found)
                    continue
                yield shape, WITHOUT, kept(found, rendered(model))
                yield shape, SESSION, kept(found)
                yield shape, NAMELESS, kept(talk(model, made, lambda: "/v1/chat/completions", shape))


def cell(found: Kept) -> str:
    return f"{100 * found.ids / found.earlier:.0f}% {found.prefixes}/{found.requests}"


def table(cells: dict[tuple[str, str, str], Kept]) -> str:
    """Return a table with a row for each shape. Ways with the same results share one."""
    tables: dict[tuple[str, ...], list[str]] = {}
    for way in WAYS:
        rows = tuple(" | ".join(cell(cells[name, shape, way]) for name in TEMPLATES) for shape in SHAPES)
        tables.setdefault(rows, []).append(f"{way[0].upper()}{way[1:]}")
    lines: list[str] = []
    for rows, ways in tables.items():
        lines += [f"**{'; '.join(ways)}**", "", f"| | {' | '.join(TEMPLATES)} |", f"|---{'|---' * len(TEMPLATES)}|"]
        lines += [f"| {shape} | {row} |" for shape, row in zip(SHAPES, rows, strict=True)]
        lines.append("")
    return "\n".join(lines).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where to write what was measured as JSON")
    parser.add_argument("--page", type=Path, help="a page with the marks between which the tables go")
    args = parser.parse_args()
    cells = {}
    for name in TEMPLATES:
        for shape, way, found in measure(name):
            cells[name, shape, way] = found
            print(f"{name:14} {shape:24} {way:28} {cell(found)}", flush=True)
    if args.out is not None:
        args.out.write_text(
            json.dumps([{"cell": key, **found._asdict()} for key, found in cells.items()], indent=1) + "\n"
        )
    if args.page is not None:
        put_between(args.page, "splicing", table(cells))


if __name__ == "__main__":
    main()
