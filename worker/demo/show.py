"""`tito-router demo`, once its flags are read: the rollouts and their table, or a router that is left running."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import sys
import time
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text
from tokenizers import Tokenizer

from worker.demo.processes import Router, StartError, workers
from worker.demo.respelling import Respelling, Speller
from worker.demo.rollout import INSTRUCTION, Rollout, call, play
from worker.models.ngram import shipped_tokenizer

_HEAD = ("", "turns", "tokens", "sampled", "wrong if encoded again", "retrieved", "not encoded again")
SERVE_PORT = 30000
SEEDS = (3, 4)
"""The sampling seeds of the two replies that `--serve` asks for."""


def show(args: argparse.Namespace, folder: Path) -> int:
    """Start the processes and run the demonstration; return the exit status.

    Args:
        args: the flags of `worker.demo.cli`.
        folder: for the logs of the processes.
    """
    out = console()
    out.print(f"starting {args.workers} workers and a router ...")
    port = args.port if args.port is not None else SERVE_PORT if args.serve else 0
    store = Path(args.store) if args.store else _kept() if args.serve else folder / "store"
    try:
        store.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(
            f"the store's folder {store} cannot be made: {error.strerror}: name another one with --store"
        ) from error
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        raise StartError(
            f"cannot listen on port {port}: {os.strerror(error.errno or 0)}: choose another one with --port"
            + (' (make serve ARGS="--port N")' if _of_make() else "")
        ) from error
    with (
        workers(folder, args.workers) as urls,
        Router(folder, urls, port=port, flags=["--store", f"sqlite:{store}"]) as router,
    ):
        if args.serve:
            _forget_earlier_workers(router.url, urls)
            return _serve(out, router, store)
        return _play(out, router, args.conversations, args.turns)


def _of_make() -> bool:
    """Whether the user said `make demo`, in a clone. A wheel has no Makefile; a clone's .venv is rarely on PATH."""
    return "MAKELEVEL" in os.environ


def _kept() -> Path:
    """Return the folder of the store that outlives `--serve`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tito-router" / "demo-store"


def _play(out: Console, router: Router, conversations: int, turns: int) -> int:
    speller = Speller(Tokenizer.from_file(str(shipped_tokenizer() / "tokenizer.json")))
    out.print(f"the router is {router.url}: {conversations} conversations of {turns} turns, as text")
    begun = time.monotonic()
    total = conversations * turns
    columns = (TextColumn(" "), BarColumn(), TextColumn("{task.completed} of {task.total} turns"))
    with Progress(*columns, console=out) as progress, ThreadPoolExecutor(conversations) as pool:
        task = progress.add_task("", total=total)
        half, done = max(1, total // 2), itertools.count(1)

        def on_turn() -> None:
            progress.advance(task)
            if next(done) == half:
                router.restart()  # the other conversations have requests in flight

        rollouts = list(pool.map(lambda number: play(router.url, number, turns, on_turn), range(conversations)))
    again = sum(rollout.sent_again for rollout in rollouts)
    out.print(
        f"after {half} of {total} turns the router was killed (SIGKILL) and started again with its store: "
        f"{again} requests were sent twice"
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
    serve = "make serve" if _of_make() else "tito-router demo --serve"
    out.print(
        f"{time.monotonic() - begun:.1f} s. `{serve}` starts the same, and keeps it running to be tried with curl."
    )
    return 0 if exact else 1


def _forget_earlier_workers(router: str, own: Sequence[str]) -> None:
    """Remove the workers of earlier runs: the store keeps the fleet, and each run starts workers at other ports.

    A port may come again: then the store says that this worker was removed, so it is added.
    """
    with urllib.request.urlopen(f"{router}/list_workers") as answer:
        known = json.load(answer)["urls"]
    for url in known:
        if url not in own and not _listens(url):  # of another `--serve` that runs on the same store they are in use
            call(router, "/remove_worker", {"url": url})
    for url in own:
        if url not in known:
            call(router, "/add_worker", {"url": url})


def _listens(url: str) -> bool:
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 80), timeout=1).close()
    except OSError:
        return False
    return True


def _serve(out: Console, router: Router, store: Path) -> int:
    url = router.url
    out.print(
        f"\nthe router is {url}, and its store {store}: what you send is there after a restart, too.", soft_wrap=True
    )
    out.print(f"The inspector shows it token by token: {url}/inspect", soft_wrap=True)
    out.print("A turn, the next one, and the tokens of both:\n")
    # With a seed the reply is always the same, so the second command can quote it before the first command was run.
    text = "Question: What is 6 * 7?\n"
    for seed, observation in ((SEEDS[0], "\nObservation: 42\n"), (SEEDS[1], "")):
        body = {"text": text, "sampling_params": {"max_new_tokens": 32, "sampling_seed": seed}}
        _, reply = call(url, "/generate", body, {"x-radix-namespace": "demo"})  # apart from the user's own requests
        _print_curl(out, url, "/generate", body)
        text += reply["text"] + observation
    _print_curl(out, url, "/retrieve_from_text", {"text": text})
    out.print(f"kill -9 {router.pid}  # the router, which is started again and goes on with its store", highlight=False)
    try:
        out.print("\nCtrl-C ends it.")
        while True:
            time.sleep(1)  # without an end to the wait this thread does not see a signal that another one has taken
            if (status := router.status) is not None:
                router.restart()
                ended = f"status {status}" if status >= 0 else f"signal {-status}"
                out.print(
                    f"the router ended ({ended}), and was started again, as {router.pid}: it goes on with its store"
                )
    except KeyboardInterrupt:
        pass
    return 0


def _print_curl(out: Console, url: str, path: str, body: Mapping[str, object]) -> None:
    quoted = json.dumps(body).replace("'", "\\u0027")
    out.print(f"curl {url}{path} -H 'content-type: application/json' -d '{quoted}'\n", soft_wrap=True)


def transcript(rollout: Rollout) -> Text:
    """Return the text of a rollout with a bar in front of each line, and the sampled text in bold."""
    shown = Text(INSTRUCTION)
    for prompt, reply in rollout.turns:
        shown.append(prompt).append(reply, style="bold")
    return Text("\n").join(Text("  │ ") + line for line in shown.split("\n"))


def table(rollouts: Sequence[Rollout], speller: Speller) -> Table:
    """Return a row for each rollout, and their sums in the foot."""
    rows = [_cells(str(number), [rollout], speller) for number, rollout in enumerate(rollouts, start=1)]
    return plain_table(_HEAD, rows, _cells("all", rollouts, speller))


def _cells(name: str, rollouts: Sequence[Rollout], speller: Speller) -> tuple[str, ...]:
    sampled = sum(sum(rollout.trajectory["loss_mask"]) for rollout in rollouts)
    wrong = sum(speller.wrong(rollout.trajectory, rollout.text)[0] for rollout in rollouts)
    exact = sum(rollout.exact for rollout in rollouts)
    prompt, reused = sum(one.prompt_tokens for one in rollouts), sum(one.reused_tokens for one in rollouts)
    return (
        name,
        str(sum(len(rollout.sampled) for rollout in rollouts)),
        str(sum(rollout.trajectory["token_length"] for rollout in rollouts)),
        str(sampled),
        f"{wrong} ({wrong / sampled:.0%})" if sampled else "-",
        ("exact" if exact else "NOT EXACT") if len(rollouts) == 1 else f"{exact} of {len(rollouts)} exact",
        f"{reused} of {prompt}",
    )


def example(rollouts: Sequence[Rollout], speller: Speller) -> Respelling | None:
    """Return a place where the text alone would have misled; None if there is none."""
    found = (speller.wrong(rollout.trajectory, rollout.text)[1] for rollout in rollouts)
    return next((place for place in found if place is not None), None)


_WIDTH = 110  # cells, where there is no terminal


def console() -> Console:
    """Return a console on standard output that prints texts unchanged: their brackets are not markup."""
    width = None if sys.stdout.isatty() else _WIDTH
    return Console(width=width, markup=False, emoji=False, highlight=False)


def plain_table(head: Sequence[str], rows: Iterable[Sequence[str]], foot: Sequence[str]) -> Table:
    """Return a table of numbers, with lines below its head and above its foot."""
    columns = (Column(title, total, justify="right") for title, total in zip(head, foot, strict=True))
    table = Table(*columns, box=box.SIMPLE, show_edge=False, pad_edge=False, show_footer=True)
    for row in rows:
        table.add_row(*row)
    return table
