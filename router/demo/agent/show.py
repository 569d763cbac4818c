"""`tito-router demo-agent`, from the start of its processes to its report."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from tokenizers import Tokenizer

from router.demo.agent.proof import read_evidence
from router.demo.agent.report import Report
from router.demo.agent.script import Prompter
from router.demo.agent.team import FIRST_VERSION, play
from router.demo.processes import fleet
from router.demo.screen import console
from router.embedded.models.ngram import shipped_tokenizer

WORKERS = 2


def show(folder: Path) -> int:
    """Run the demonstration; return the exit status. `folder` is for logs and for what the workers write down."""
    begun = time.monotonic()
    # A proxy in the environment of the clients does not reach this machine.
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    os.environ["no_proxy"] = ",".join(filter(None, [known, "127.0.0.1"]))
    tokenizer = Tokenizer.from_file(str(shipped_tokenizer() / "tokenizer.json"))
    out = console()
    out.print(f"starting {WORKERS} workers and a router ...")
    flags = ["--weight-version", FIRST_VERSION, "--journal", str(folder)]
    with fleet(folder, workers=WORKERS, worker_flags=flags, router_flags=["--verify-rate", "1"]) as url:
        out.print(f"the router is {url}: one session, an openai client and an anthropic client\n")
        played = asyncio.run(play(url, Prompter(tokenizer), lambda news: out.print(f"  {news}")))
    # The workers write when they end: the router is gone by then, and what it answered is in `played`.
    report = Report(played, read_evidence(folder), tokenizer)
    out.print()
    out.print(report)
    out.print(f"{time.monotonic() - begun:.1f} s.")
    return 0 if report.holds else 1
