"""Several long prompts at once: how long they hold up everyone else, and how long their first tokens take.

`python -m benchmarks.scale.prompts` sends eight prompts of 128,000 tokens at the same moment, as text, through this router
and through smg, to the engine doubles of `engine.py`; and then the second turns of the same conversations, with 400 new tokens
each. Another process asks for `/liveness` two hundred times a second. The longest answer shows for how long the event loop
stood still.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import msgspec
import uvloop

from benchmarks import foreign_routers
from benchmarks.pages import spread, table
from benchmarks.processes import DidNotStartError
from benchmarks.scale.clients import events_of, open_stream, request
from benchmarks.scale.groups import Router, engines, free_ports, router
from benchmarks.scale.probe import Probe, probing
from benchmarks.scale.streams import Way, chats
from benchmarks.serving.conversations import NEW_TOKENS, Corpus
from benchmarks.serving.targets import add_options, versions, write

EVERY = 0.005  # seconds between two probes
PAUSE = 0.01  # seconds between two steps of an engine
TOKENS = 4  # of a reply
TURNS = 2


@dataclass(frozen=True)
class Turn:
    """One turn of all conversations. Seconds; `cpu` is of one prompt, `rss` what the router grew by, in bytes."""

    longest: float
    first: float
    last: float
    cpu: float
    rss: int


class Talk:
    """One conversation: as text, or as the messages of a chat."""

    def __init__(self, prompt: str, path: str, *, asks: bool) -> None:
        """`asks`: whether logprobs are asked for."""
        self._path = path
        self._asks = asks
        self._text = prompt
        self._messages = [{"role": "user", "content": prompt}]

    def request(self) -> bytes:
        if self._path != "/generate":
            body = {"model": "m", "messages": self._messages, "max_tokens": TOKENS, "stream": True}
        else:
            body = {"text": self._text, "sampling_params": {"max_new_tokens": TOKENS}, "stream": True}
            body |= {"return_logprob": True} if self._asks else {}
        return request(self._path, msgspec.json.encode(body))

    def heard(self, answer: bytes, new: str) -> None:
        """Append the reply of a stream, given with its head and its frames, and new text."""
        reply = ""
        for event in events_of(answer):
            reply += event["text"] if "text" in event else event["choices"][0]["delta"].get("content") or ""
        self._text += f"{reply}\nObservation: {new}"
        self._messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": new}]


async def _turn(target: Router, talks: Sequence[Talk], corpus: Corpus, probe: Probe) -> Turn:
    """Ask for the next turn of all conversations at once."""
    probe.latencies()
    before, used = target.memory(), target.cpu()
    clients = [await open_stream(*target.member(0).address, talk.request(), keep=True) for talk in talks]
    for client in clients:
        if wrong := await client.ended:
            raise SystemExit(f"{target.name}: {wrong}")
    await asyncio.sleep(0.2)
    firsts = [client.first or 0.0 for client in clients]
    for talk, client in zip(talks, clients, strict=True):
        talk.heard(client.kept, corpus.cut(NEW_TOKENS))
    return Turn(
        max(probe.latencies()),
        min(firsts),
        max(firsts),
        (target.cpu() - used) / len(talks),
        target.memory() - before,
    )


async def _conversations(target: Router, way: Way, prompts: Sequence[str], corpus: Corpus, probe: Probe) -> list[Turn]:
    paths = await chats(target, len(prompts)) if way.chat else ["/generate"] * len(prompts)
    talks = [Talk(prompt, path, asks=not target.keeps) for prompt, path in zip(prompts, paths, strict=True)]
    return [await _turn(target, talks, corpus, probe) for _ in range(TURNS)]


WAYS = (
    Way("smg, `/generate`", "smg"),
    Way("this router, `--middleware none`, `/generate`", "none"),
    Way("this router, `/generate`", "router"),
    Way("this router, a session's chat", "router", chat=True),
    Way("the same, `--tokenizer-backend huggingface`, `/generate`", "huggingface"),
    Way("the same, a session's chat", "huggingface", chat=True),
)
ROUTERS = list(dict.fromkeys(way.router for way in WAYS))
Rounds = dict[str, list[list[Turn]]]


def run(args: argparse.Namespace, corpus: Corpus) -> Rounds:
    """Measure all ways, in turns."""
    found: Rounds = {}
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(engines(corpus.replies(40), free_ports(args.workers), PAUSE))
        targets: dict[str, tuple[Router, Probe]] = {}
        for name in args.routers:
            try:
                one = stack.enter_context(router(name, group, args.router_flags))
                targets[name] = one, stack.enter_context(probing(one.member(0).url, EVERY))
            except (foreign_routers.NotInstalledError, DidNotStartError) as error:
                print(f"{name}: {error}", flush=True)
        for target, _ in targets.values():
            target.settle()
        for number in range(args.rounds + 1):
            for way in WAYS:
                if way.router not in targets:
                    continue
                target, probe = targets[way.router]
                prompts = [corpus.cut(args.tokens) for _ in range(args.prompts if number else 1)]
                turns = uvloop.run(_conversations(target, way, prompts, corpus, probe))
                if number:  # the first round warms up
                    found.setdefault(way.name, []).append(turns)
                    print(f"{number} {way.name:<56} {[f'{1000 * one.longest:.1f}' for one in turns]} ms", flush=True)
    return found


def rows(found: Rounds) -> Iterator[list[str]]:
    """Yield a row for each turn of each way."""
    for name, rounds in found.items():
        for number in range(TURNS):
            turns = [one[number] for one in rounds]
            times = (spread([1000 * getattr(turn, key) for turn in turns], 0) for key in ("first", "last", "cpu"))
            grown = spread([turn.rss / 1e6 for turn in turns], 0)
            yield [name, str(number + 1), spread([1000 * turn.longest for turn in turns], 1), *times, grown]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=5)
    parser.add_argument("--prompts", type=int, default=8, help="at once (%(default)s)")
    parser.add_argument("--tokens", type=int, default=128_000, help="of a prompt (%(default)s)")
    parser.add_argument("--workers", type=int, default=8, help="engine doubles (%(default)s)")
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=list(ROUTERS))
    parser.add_argument("--router-flags", nargs=argparse.REMAINDER, default=[], help="for this router (last)")
    args = parser.parse_args()
    found = run(args, Corpus())
    head = [
        *("through", "turn", "`/liveness` at most, ms", "first token of the first, ms", "of the last, ms"),
        *("CPU a prompt, ms", "memory grown, MB"),
    ]
    about = (
        f"{versions(args.routers)}. {args.prompts} prompts of {args.tokens:,} tokens at once; turn 2 adds {NEW_TOKENS}."
        " The median of the rounds (least-largest)."
    )
    data = {name: [[asdict(turn) for turn in turns] for turns in rounds] for name, rounds in found.items()}
    write(args, "long prompts", f"{about}\n\n{table(head, rows(found), words=2)}", data)


if __name__ == "__main__":
    main()
