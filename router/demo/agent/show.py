"""`tito-router demo-agent`, from the start of its processes to its report."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from pathlib import Path

from tokenizers import Tokenizer

from router.demo.agent.report import Report
from router.demo.agent.script import Prompter
from router.demo.agent.team import FIRST_VERSION, play
from router.demo.processes import Router
from router.demo.screen import console
from router.embedded.models.ngram import shipped_tokenizer
from router.embedded.options import WorkerOptions
from router.embedded.worker import EmbeddedWorker

WORKERS = 2
TOKENS_PER_SECOND = 200  # as `tito-router demo-worker`


def show(_args: argparse.Namespace, folder: Path) -> int:
    """Run the demonstration; return the exit status. `folder` is for the router's log. The workers run in this process."""
    # A proxy in the environment of the clients does not reach this machine.
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    os.environ["no_proxy"] = ",".join(filter(None, [known, "127.0.0.1"]))
    tokenizer = Tokenizer.from_file(str(shipped_tokenizer() / "tokenizer.json"))
    out = console()
    out.print(f"starting {WORKERS} workers and a router ...")
    options = WorkerOptions(weight_version=FIRST_VERSION, token_delay=1 / TOKENS_PER_SECOND)
    workers = [EmbeddedWorker(None, options, seed=number) for number in range(WORKERS)]
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(worker).url for worker in workers]
        url = stack.enter_context(Router(folder, urls, flags=["--verify-rate", "1"])).url
        out.print(f"the router is {url}: one session, an openai client and an anthropic client\n")
        played = asyncio.run(play(url, Prompter(tokenizer), lambda news: out.print(f"  {news}")))
    report = Report(played, {record.rid: record for worker in workers for record in worker.log}, tokenizer)
    out.print()
    out.print(report)
    return 0 if report.holds else 1
