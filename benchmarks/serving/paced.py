"""What a token of a stream costs if tokens come one at a time: `python -m benchmarks.serving.paced`.

Many streams are open at once, and each gets a token every 50 ms, one an event, as an engine samples them. `streams.py` reads
streams as fast as they can be read, where many events arrive together and share the cost of a read; here each event is a read,
a wake-up and a write of its own.

A figure is the CPU of the target's process, for all of the streams from their requests to their ends, divided by the number of
tokens. The targets take turns. All share the machine's few cores, so only ratios between the rows of one run count: the engine
and the client are kept cheap, and the streams are few enough to leave the cores idle for a part of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import uvloop

from benchmarks.pages import spread, table
from benchmarks.processes import cpu_seconds, settle
from benchmarks.serving.client import RawClient
from benchmarks.serving.conversations import VOCABULARY, Corpus
from benchmarks.serving.targets import Target, add_options, serving, versions, write
from tests.support import templates
from tests.support.vocabularies import load as vocabulary

PAUSE = 0.05
"""Seconds between two tokens of a stream."""
PROMPT = 100  # tokens
WARM = 20  # streams, and tokens of each, before the first round
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Run a command in a shell.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]


@dataclass(frozen=True)
class Way:
    """A way to ask for a stream: the target that is asked, and the path. A session is made for each stream of `/v1/...`."""

    name: str
    target: str
    path: str = "/generate"
    interval: int = 1
    tools: bool = False

    def body(self, prompt: str, tokens: int, *, asks: bool) -> bytes:
        """Return a request for a stream of this many tokens. `asks` is whether it asks for logprobs."""
        tools: dict[str, Any] = {}
        body: dict[str, Any]
        if self.path == "/generate":
            sampling: dict[str, Any] = {"max_new_tokens": tokens}
            if self.interval > 1:
                sampling["stream_interval"] = self.interval
            body = {"text": prompt, "sampling_params": sampling} | ({"return_logprob": True} if asks else {})
        elif self.path == "/v1/responses":
            if self.tools:
                tools = {"tools": [{"type": "function", **tool["function"]} for tool in TOOLS]}
            body = {"model": "m", "input": prompt, "max_output_tokens": tokens}
        else:
            if self.tools:
                anthropic = [
                    {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
                    for one in (tool["function"] for tool in TOOLS)
                ]
                tools = {"tools": anthropic if self.path == "/v1/messages" else TOOLS}
            body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}
        return msgspec.json.encode(body | tools | {"stream": True})


PARTS = "plain", "cumulative", "agents"
CHAT = "/v1/chat/completions"
PLAIN = (
    Way("smg, `/generate`", "smg"),
    Way("this router, `--middleware none`, `/generate`", "none"),
    Way("a proxy of uvloop and httptools that does nothing else", "floor"),
    Way("this router, `/generate`", "router"),
    Way("a session's chat", "router", CHAT),
    Way("a session's chat, an event for 8 tokens", "router", CHAT, 8),
)
CUMULATIVE = (
    Way("smg, `/generate`, cumulative", "smg"),
    Way("this router, `--middleware none`, `/generate`, cumulative", "none"),
    Way("this router, `/generate`, cumulative", "router"),
)
AGENTS = (
    Way("smg, `/generate`, of an agent", "smg"),
    Way("this router, `--middleware none`, `/generate`, of an agent", "none"),
    Way("a session's chat with reasoning and calls", "router", CHAT, tools=True),
    Way("a session's Messages with reasoning and calls", "router", "/v1/messages", tools=True),
    Way("a session's Responses with reasoning and calls", "router", "/v1/responses", tools=True),
)


def agent_reply(corpus: Corpus, tokens: int) -> bytes:
    """Return a reply as `instant_engine` reads it: half of it reasoning, then a short text and a call."""
    tokenizer = vocabulary(VOCABULARY)
    command = json.dumps({"command": corpus.cut(max(1, tokens // 2 - 40))})
    call = f'</think>\n\nI look.\n<tool_call>\n{{"name": "run", "arguments": {command}}}\n</tool_call>'
    text = f"<think>\n{corpus.cut(tokens // 2)}{call}"
    encoding = tokenizer.encode(text, add_special_tokens=False)
    pieces = [text[begin:end] for begin, end in encoding.offsets]
    eos = tokenizer.token_to_id("<|im_end|>")
    return msgspec.json.encode({"ids": [*encoding.ids, eos], "text": text, "eos": eos, "pieces": [*pieces, ""]})


async def one_stream(target: Target, way: Way, corpus: Corpus, tokens: int, wait: float) -> None:
    """Ask for one stream, in a session of its own if it is a chat, and read all of it."""
    await asyncio.sleep(wait)
    client = await RawClient.connect(target.url)
    path = way.path
    if path != "/generate":
        fields = {"sampling_params": {"stream_interval": way.interval}} if way.interval > 1 else {}
        made = await client.post("/sessions", msgspec.json.encode(fields))
        path = f"/sessions/{json.loads(made.body)['session_id']}{path}"
    answer = await client.post(path, way.body(corpus.cut(PROMPT), tokens, asks=not target.keeps))
    if answer.status != 200 or b"error" in answer.body[-400:] or answer.size < tokens * 10:
        raise SystemExit(f"{way.name}: {answer.status} {answer.body[-500:]!r}")
    if path != way.path:
        await client.delete(path.removesuffix(way.path))
    await client.close()


async def streams(target: Target, way: Way, corpus: Corpus, count: int, tokens: int, pause: float) -> None:
    """Have this many streams open at once, which begin one after the other within the pause between two tokens."""
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(one_stream(target, way, corpus, tokens, number * pause / count))


@dataclass(frozen=True)
class Sample:
    """One round: the CPU a token in microseconds, and the memory of the process in MB."""

    cpu: float
    rss: float


Rounds = dict[str, list[Sample]]


@dataclass(frozen=True)
class Load:
    """This many streams at once, with this pause between two tokens of each."""

    count: int
    pause: float
    incremental: bool = True


def measure(args: argparse.Namespace, ways: Sequence[Way], replies: bytes, load: Load) -> Rounds:
    """Measure all of these ways, in turns."""
    count, pause = load.count, load.pause
    flags = ["--incremental"] if load.incremental else []
    corpus, rounds = Corpus(), Rounds()
    names = list(dict.fromkeys(way.target for way in ways))
    length = len(json.loads(replies.partition(b"\n")[0])["ids"])
    with serving(names, replies, ("--pause", str(pause), *flags), args.router_flags) as targets:
        measured = [way for way in ways if way.target in targets]
        for way in measured:
            uvloop.run(streams(targets[way.target], way, corpus, WARM, length, pause))
        for name in names:
            if name in targets:
                settle(targets[name].process)
        for _ in range(args.rounds):
            for way in measured:
                process = targets[way.target].process
                before = cpu_seconds(process)
                uvloop.run(streams(targets[way.target], way, corpus, count, length, pause))
                used = cpu_seconds(process) - before
                found = Sample(1e6 * used / (count * length), process.memory_info().rss / 1e6)
                rounds.setdefault(way.name, []).append(found)
                print(f"{way.name:<60} {found.cpu:6.1f} us a token  {found.rss:6.0f} MB", flush=True)
    return rounds


def ratios(rounds: Rounds, name: str, base: str) -> str:
    """Return the ratios of two ways, round by round."""
    if base not in rounds or name not in rounds:
        return ""
    return spread([one.cpu / other.cpu for one, other in zip(rounds[name], rounds[base], strict=True)])


def rows(ways: Sequence[Way], rounds: Rounds) -> Iterator[list[str]]:
    """Yield a row for each way: CPU a token, as a ratio to the bare router's and to smg's, and memory."""
    for way in ways:
        if way.name in rounds:
            samples = rounds[way.name]
            yield [
                way.name,
                spread([one.cpu for one in samples], 0),
                ratios(rounds, way.name, ways[1].name),
                ratios(rounds, way.name, ways[0].name),
                spread([one.rss for one in samples], 0),
            ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=3)
    parser.add_argument("--streams", type=int, default=60, help="open at once (%(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="of a stream (%(default)s)")
    parser.add_argument("--cumulative-tokens", type=int, default=1000, help="of a cumulative stream (%(default)s)")
    parser.add_argument(
        "--parts", nargs="+", choices=("plain", "cumulative", "agents"), default=["plain", "cumulative", "agents"]
    )
    parser.add_argument("--router-flags", nargs=argparse.REMAINDER, default=[], help="for this router (last)")
    args = parser.parse_args()
    args.router_flags = ["--chat-template", str(templates.folder() / "qwen3.jinja"), *args.router_flags]
    corpus = Corpus()
    found: dict[str, tuple[Sequence[Way], Rounds]] = {}
    for part in args.parts:
        load = Load(args.streams, PAUSE)
        if part == "plain":
            replies, ways = corpus.replies(args.tokens), PLAIN
        elif part == "cumulative":
            # Fewer streams that are faster: as many events a second, and the engine prints no more than it can.
            replies, ways = corpus.replies(args.cumulative_tokens, count=4), CUMULATIVE
            load = Load(max(1, args.streams // 5), PAUSE / 5, incremental=False)
        else:
            replies, ways = agent_reply(corpus, args.tokens), AGENTS
        found[part] = ways, measure(args, ways, replies, load)
    lines = [row for ways, rounds in found.values() for row in rows(ways, rounds)]
    head = ["streams", "CPU a token, us", "of `--middleware none`", "of smg", "memory, MB"]
    about = (
        f"{versions(('smg',))}. {args.streams} streams of {args.tokens} tokens at once, a token every {1000 * PAUSE:.0f} ms;"
        f" cumulative: {max(1, args.streams // 5)} of {args.cumulative_tokens}, every {200 * PAUSE:.0f} ms."
        " The median of the rounds (least-largest)."
    )
    data: Mapping[str, Any] = {
        name: [asdict(one) for one in samples] for _, rounds in found.values() for name, samples in rounds.items()
    }
    write(args, "paced", f"{about}\n\n{table(head, lines)}", data)


if __name__ == "__main__":
    main()
