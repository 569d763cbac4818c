"""The drift study with a model that was really trained: how much of what it samples is lost if its text is encoded again.

    python -m benchmarks.drift.run [--quick] [--out FILE] [--page FOLDER] [--picture FILE]

Linux, no GPU; a quarter of an hour on two cores, and more beside other work, besides the first time: that installs an SGLang
(tests/sglang_cpu, 3.5 GB) and fetches Gemma 3 270M (see gemma.py; Gemma's terms of use apply), 245 MB, which it keeps in
~/.cache/tito-router.

For the trained model, then for the tiny random one, it starts SGLang and a router, samples rollouts of ten kinds of text at two
temperatures, plays the loops, and counts. Then it computes gradients. Sampling is not seeded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from benchmarks.drift.loops import LOOPS
from benchmarks.drift.prompts import PROMPTS
from benchmarks.drift.report import (
    RANDOM,
    TRAINED,
    by_kind,
    by_length,
    by_loop,
    gradients_table,
    kinds_table,
    loops_table,
)
from benchmarks.drift.sampling import Played, Rollout, conversations, rollouts
from benchmarks.pages import machine, put_between
from middleware_hub.client import AsyncClient
from tests.support import sglang_server
from tests.support.engine_server import Kit
from worker.demo.processes import Program

ROOT: Final = Path(__file__).resolve().parents[2]
GEMMA: Final = Path.home() / ".cache" / "tito-router" / "gemma-3-270m"
STEPS: Final = (
    "code + JSON",
    "German, French, Spanish + Russian",
    "tool calls + chat",
    "English + Chinese, Japanese",
)
"""The kinds of which each step takes a group."""


@dataclass(frozen=True)
class Plan:
    """How much is sampled, and the seconds after which nothing further begins."""

    rollouts: int
    length: int
    conversations: int
    rollout_seconds: float
    loop_seconds: float
    gradient_seconds: float
    steps: tuple[str, ...]


PLANS: Final = {
    (TRAINED, False): Plan(8, 128, 6, 300, 120, 150, STEPS),
    (RANDOM, False): Plan(8, 128, 0, 60, 0, 40, STEPS),
    (TRAINED, True): Plan(4, 64, 1, 60, 30, 30, STEPS[:1]),
    (RANDOM, True): Plan(4, 64, 0, 20, 0, 20, ()),
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def prepared() -> str:
    """Install the engine and make the model, if they are not there. Return a Python that has torch."""
    subprocess.run([str(sglang_server.SETUP)], check=True)
    python = sglang_server.python_with("torch")
    if python is None:
        raise RuntimeError("tests/sglang_cpu/setup.sh left no Python with torch")
    torch_part(python, "benchmarks.drift.gemma", str(GEMMA))
    return python


def torch_part(python: str, module: str, *flags: str) -> None:
    """Run a module of this folder by the Python that has torch."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    subprocess.run([python, "-m", module, *flags], cwd=ROOT, env=environment, check=True)


@contextlib.contextmanager
def served(model: Path, folder: Path, flags: Sequence[str]) -> Iterator[str]:
    """Run an engine with the model, and a router in front of it; yield the router's URL. `folder` is for their logs."""
    ours = sglang_server.KIT
    kit = Kit(ours.name, ours.folder, ours.version, ours.distribution, served=model)
    with kit.server(*flags, log_dir=folder) as engine:
        log = folder / f"router-{model.name}.log"
        router = Program(["--port", "0", "--tokenizer-path", str(model), "--worker-urls", engine.url], log)
        try:
            yield router.url()
        finally:
            router.stop()


def progress(name: str) -> Callable[[int], None]:
    """Return what tells every ten seconds how many tokens were sampled."""
    begun = told = time.monotonic()
    total = replies = 0

    def done(tokens: int) -> None:
        nonlocal told, total, replies
        total, replies, now = total + tokens, replies + 1, time.monotonic()
        if now - told > 10:
            told = now
            say(
                f"{name}: [{now - begun:4.0f}s] {replies} replies, {total:,} tokens, {total / (now - begun):.0f} a second"
            )

    return done


async def sample(url: str, name: str, plan: Plan) -> tuple[list[Rollout], list[Played]]:
    """Sample everything of one model."""
    async with AsyncClient([url]) as client:
        found = await rollouts(
            client, plan.rollouts, plan.length, time.monotonic() + plan.rollout_seconds, progress(f"{name}: rollouts")
        )
        played = await conversations(
            client, LOOPS, plan.conversations, time.monotonic() + plan.loop_seconds, progress(f"{name}: loops")
        )
    say(f"{name}: {len(found)} rollouts of {plan.rollouts * 2 * len(PROMPTS)}, {len(played)} conversations")
    return found, played


def study(name: str, model: Path, plan: Plan, python: str, folder: Path, flags: Sequence[str]) -> dict[str, Any]:
    """Return all figures of one model."""
    say(f"{name}: an engine starts, and a router")
    with served(model, folder, flags) as url:
        found, played = asyncio.run(sample(url, name, plan))
    (folder / f"{name}-loops.json").write_text(json.dumps(played))
    log, gradients = folder / f"{name}.json", folder / f"{name}-gradients.json"
    log.write_text(json.dumps(found))
    gradients.write_text("[]")
    say(f"{name}: gradients")
    if plan.steps:
        files = ("--model", str(model), "--rollouts", str(log), "--out", str(gradients))
        limits = ("--seconds", str(plan.gradient_seconds), "--steps", *plan.steps)
        torch_part(python, "benchmarks.drift.gradient", *files, *limits)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return {
        "sampled": sum(len(one["ids"]) for one in found) + sum(one["sampled"] for one in played),
        "kinds": by_kind(found, tokenizer),
        "lengths": by_length(found, tokenizer),
        "loops": by_loop(played, tokenizer),
        "gradients": json.loads(gradients.read_text()),
    }


def tables(figures: dict[str, Any]) -> dict[str, str]:
    """Return the tables by the names of their marks."""
    models = figures["models"]
    return {
        "drift kinds": kinds_table({name: one["kinds"] for name, one in models.items()}),
        "drift loops": loops_table(models[TRAINED]["loops"]),
        "drift gradients": gradients_table({name: one["gradients"] for name, one in models.items()}),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few minutes: shows that it runs")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="write the tables into the pages of this folder")
    parser.add_argument("--picture", type=Path, help="draw rollouts that change by length (needs matplotlib)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the rollouts and logs")
    parser.add_argument(
        "--figures", type=Path, metavar="FILE", help="measure nothing: take figures of an earlier --out"
    )
    parser.add_argument("--rollouts", type=int, help="of each kind and temperature (default: 8)")
    parser.add_argument("--length", type=int, help="the most tokens of a rollout (default: 128)")
    parser.add_argument("--seconds", type=float, help="until no rollout of the trained model begins (default: 300)")
    args = parser.parse_args()
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        if args.figures:
            figures = json.loads(args.figures.read_text())
        else:
            folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder.mkdir(parents=True, exist_ok=True)
            python = prepared()
            figures = {"machine": machine(), "sglang": sglang_server.KIT.version, "models": {}}
            for name, model in ((TRAINED, GEMMA), (RANDOM, sglang_server.model_path())):
                plan = PLANS[name, args.quick]
                plan = replace(plan, rollouts=args.rollouts or plan.rollouts, length=args.length or plan.length)
                if name == TRAINED and args.seconds:
                    plan = replace(plan, rollout_seconds=args.seconds)
                # The weights had 4 to 8 bits, and two cores sample twice as fast in bfloat16. Beside them the cache needs room.
                flags = ("--dtype", "bfloat16", "--mem-fraction-static", "0.5") if name == TRAINED else ()
                figures["models"][name] = study(name, model, plan, python, folder, flags)
    for mark, text in tables(figures).items():
        print(f"\n{mark}\n\n{text}")
        if args.page:
            page = "is-text-a-key.md" if mark == "drift loops" else "training-loop.md"
            put_between(args.page / page, mark, text)
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    if args.picture:
        from benchmarks.drift.picture import draw

        lengths = {name: one["lengths"] for name, one in figures["models"].items()}
        draw(lengths, args.picture, "Rollouts that change if their text is encoded again, by length")
    say(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
