"""How many functions run for an event of a stream: `python -m benchmarks.serving.calls`, with a token an event.

Times on a busy machine say little of a change that saves a microsecond. The calls of functions in the router's process, those
of Python and of C, are the same in every run. A short stream and a long one are asked for, and what the long one calls more is
divided by the events that it has more. Python's profiler counts.
"""

from __future__ import annotations

import argparse
import cProfile
import runpy
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import CodeType

import uvloop

from benchmarks.processes import ROOT, python, started
from benchmarks.serving.conversations import Corpus, tokenizer_folder
from benchmarks.serving.paced import AGENTS, CUMULATIVE, PLAIN, Way, agent_reply, one_stream
from benchmarks.serving.targets import Target, answers, serving
from tests.support import templates
from tests.support.engine_server import free_port

SHORT, LONG = 100, 400
"""Tokens of the two streams."""
OURS = f"{ROOT}/router", f"{ROOT}/middleware_hub"
PAUSE = 0.004
"""Seconds between two tokens, so that each is an event of its own."""
WAYS = {
    "none": PLAIN[1],
    "generate": PLAIN[3],
    "cumulative": CUMULATIVE[2],
    "chat": PLAIN[4],
    "agent": AGENTS[2],
}


def serve(path: Path, arguments: list[str]) -> None:
    """Run the router, and write the calls so far to this file at each SIGUSR1."""
    profile = cProfile.Profile()

    def write(*_: object) -> None:
        lines = []
        for entry in profile.getstats():
            code = entry.code
            name = f"{code.co_filename}:{code.co_qualname}" if isinstance(code, CodeType) else code
            lines.append(f"{entry.callcount}\t{name}\n")
        part = path.with_suffix(".part")
        part.write_text("".join(lines))
        part.rename(path)

    signal.signal(signal.SIGUSR1, write)
    sys.argv = ["router", *arguments]
    profile.enable()
    runpy.run_module("router", run_name="__main__")


def calls(target: Target, path: Path) -> Counter[str]:
    """Return how often each function has been called in a router."""
    path.unlink(missing_ok=True)
    target.process.send_signal(signal.SIGUSR1)
    while not path.exists():
        time.sleep(0.02)
    found = Counter[str]()
    for line in path.read_text().splitlines():
        count, _, name = line.partition("\t")
        found[name] += int(count)
    return found


def of_an_event(target: Target, way: Way, path: Path) -> Counter[str]:
    """Return how often each function is called for an event more, times a thousand. The engine has two replies, in turn."""
    corpus, found = Corpus(), []
    for _ in range(4):  # the first two fill caches
        before = calls(target, path)
        uvloop.run(one_stream(target, way, corpus, SHORT, 0))
        time.sleep(0.3)
        found.append(calls(target, path) - before)
    short, long = sorted(found[2:], key=Counter.total)
    return Counter({name: round(1000 * count / (LONG - SHORT)) for name, count in (long - short).items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=sorted(WAYS), default=list(WAYS))
    parser.add_argument("--each", action="store_true", help="print each function")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve, args.arguments)
    corpus = Corpus()
    print(f"{'way':<12}calls an event, of functions of Python, and of these our own")
    for name in args.ways:
        way = WAYS[name]
        two = [agent_reply(corpus, n) if way.tools else corpus.replies(n, count=1).strip() for n in (SHORT, LONG)]
        replies = b"\n".join(two)
        flags = ["--pause", str(PAUSE)] + ([] if name == "cumulative" else ["--incremental"])
        with ExitStack() as stack:
            engine = stack.enter_context(serving([], replies, flags))["direct"]
            port, folder = free_port(), stack.enter_context(tempfile.TemporaryDirectory())
            path, url = Path(folder, "calls"), f"http://127.0.0.1:{port}"
            own = ["--middleware", "none"] if way.target == "none" else ["--tokenizer-path", tokenizer_folder()]
            own += ["--chat-template", str(templates.folder() / "qwen3.jinja")] if way.target != "none" else []
            own += ["--worker-urls", engine.url, "--log-level", "warning", "--port", str(port)]
            command = python("benchmarks.serving.calls", "--serve", str(path), "--", *own)
            process = stack.enter_context(started(command, partial(answers, url)))
            target = Target(name, url, process, keeps=way.target != "none")
            found = of_an_event(target, way, path)
        python_calls = {one: count for one, count in found.items() if not one.startswith("<")}
        ours = [count for one, count in python_calls.items() if one.startswith(OURS)]
        counts = (sum(counted) / 1000 for counted in (found.values(), python_calls.values(), ours))
        print(f"{name:<12}{', '.join(f'{count:.1f}' for count in counts)}", flush=True)
        for one, count in found.most_common() if args.each else ():
            if count >= 20:
                print(f"    {count / 1000:7.2f}  {one.removeprefix(str(ROOT) + '/')}")
    return None


if __name__ == "__main__":
    main()
