"""`tito-router demo`, once its flags are read: the rollouts and their table, or a router that is left running."""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from tokenizers import Tokenizer

from router.demo.processes import router, workers
from router.demo.report import example, table, transcript
from router.demo.respelling import Speller
from router.demo.rollout import call, play
from router.demo.screen import console
from router.embedded.models.ngram import shipped_tokenizer

SERVE_PORT = 30000
SEEDS = (3, 4)
"""The sampling seeds of the two replies that `--serve` asks for."""


def show(args: argparse.Namespace, folder: Path) -> int:
    """Start the processes and run the demonstration; return the exit status.

    Args:
        args: the flags of `router.demo.cli`.
        folder: for the logs of the processes.
    """
    out = console()
    out.print(f"starting {args.workers} workers and a router ...")
    port = args.port if args.port is not None else SERVE_PORT if args.serve else 0
    with workers(folder, args.workers) as urls, router(folder, urls, port=port) as url:
        return _serve(out, url) if args.serve else _play(out, url, args.conversations, args.turns)


def _play(out: Console, url: str, conversations: int, turns: int) -> int:
    speller = Speller(Tokenizer.from_file(str(shipped_tokenizer() / "tokenizer.json")))
    out.print(f"the router is {url}: {conversations} conversations of {turns} turns, as text")
    begun = time.monotonic()
    columns = (TextColumn(" "), BarColumn(), TextColumn("{task.completed} of {task.total} turns"))
    with Progress(*columns, console=out) as progress, ThreadPoolExecutor(conversations) as pool:
        task = progress.add_task("", total=conversations * turns)
        rollouts = list(
            pool.map(lambda number: play(url, number, turns, lambda: progress.advance(task)), range(conversations))
        )
    out.print("\nthe first of them. Its workflow writes up to a colon, and the model goes on to the end of the line:\n")
    out.print(transcript(rollouts[0]))
    out.print()
    out.print(table(rollouts, speller))
    place = example(rollouts, speller)
    if place is not None:
        out.print(f"\nfor example: {place}")
    exact = all(rollout.exact for rollout in rollouts)
    out.print(
        "\nevery token that was sampled came back from the text alone, with its logprob, mask and weight version"
        if exact
        else "\nNOT EXACT: this should not happen, please report it"
    )
    out.print(f"{time.monotonic() - begun:.1f} s. `make serve` leaves it running, to try it with curl.")
    return 0 if exact else 1


def _serve(out: Console, url: str) -> int:
    out.print(f"\nthe router is {url}. A turn, the next one behind it, and the tokens of both:\n")
    # With a seed a reply is the same each time, so the second line can quote the first reply before anybody has run it.
    text = "Question: What is 6 * 7?\n"
    for seed, observation in ((SEEDS[0], "\nObservation: 42\n"), (SEEDS[1], "")):
        body = {"text": text, "sampling_params": {"max_new_tokens": 32, "sampling_seed": seed}}
        _, reply = call(url, "/generate", body)
        _print_curl(out, url, "/generate", body)
        text += reply["text"] + observation
    _print_curl(out, url, "/retrieve_from_text", {"text": text})
    try:
        out.print("\nCtrl-C ends it.")
        threading.Event().wait()
    except KeyboardInterrupt:
        pass
    return 0


def _print_curl(out: Console, url: str, path: str, body: Mapping[str, object]) -> None:
    quoted = json.dumps(body).replace("'", "\\u0027")
    out.print(f"curl {url}{path} -H 'content-type: application/json' -d '{quoted}'\n", soft_wrap=True)
