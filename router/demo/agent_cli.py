"""`tito-router demo-agent`: agents at work in a session, and the tree of what they did."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tokenizers import Tokenizer

from router.demo.cli import say
from router.demo.conversations import CallError
from router.demo.processes import StartError, witnessed
from router.embedded.models.ngram import shipped_tokenizer

WORKERS = 2
HOST = "127.0.0.1"
CLIENTS = ("openai", "anthropic")
MISSING = "needs the clients of OpenAI and Anthropic, and {} missing: pip install 'tito-router[agents]'"

_DESCRIPTION = """\
Two workers with a small language model and a router in front of them, on this machine, without a GPU. A real OpenAI client
and a real Anthropic client run a tool-using agent with two helpers, and its answer is the best of four, all in one session.
Then the session is finalized, its trajectories are drawn as a tree, and every id of them is compared with what the workers
wrote down. Tool calls and the first words of answers are scripted, the model draws the rest. It is the same each time.
"""


def parser() -> argparse.ArgumentParser:
    """There are no flags but --help."""
    return argparse.ArgumentParser(prog="tito-router demo-agent", description=_DESCRIPTION, allow_abbrev=False)


def missing(names: Sequence[str] = CLIENTS) -> str | None:
    """What to say if one of the clients is not installed."""
    lacking = [name for name in names if importlib.util.find_spec(name) is None]
    if not lacking:
        return None
    return MISSING.format(" and ".join(lacking) + (" are" if len(lacking) > 1 else " is"))


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run it. Exits with 0, with 1 if something is not exact or does not run, with 2 without clients, with 130 on Ctrl-C."""
    flags = parser()
    flags.parse_args(argv)
    lacking = missing()
    if lacking is not None:
        flags.exit(2, f"{flags.prog}: error: {lacking}\n")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="tito-demo-") as folder:
            sys.exit(_demonstrate(Path(folder)))
    except (StartError, CallError) as error:
        say(str(error), sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _demonstrate(folder: Path) -> int:
    begun = time.monotonic()
    from router.demo import agent_accounts  # slow to import, like the clients: not for a --help
    from router.demo.agent_lines import Prompter
    from router.demo.agent_report import Report
    from router.demo.agent_team import FIRST_VERSION, play

    # Whatever proxy the clients find in the environment: it does not know this machine.
    os.environ["no_proxy"] = ",".join(filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), HOST]))
    tokenizer = Tokenizer.from_file(str(shipped_tokenizer() / "tokenizer.json"))
    say(f"starting {WORKERS} workers and a router ...")
    with witnessed(folder, workers=WORKERS, tokenizer=shipped_tokenizer(), weight_version=FIRST_VERSION) as url:
        say(f"the router is {url}: one session, an openai client and an anthropic client\n")
        played = asyncio.run(play(url, Prompter(tokenizer), lambda news: say(f"  {news}")))
    # Only now do the workers tell: the router is gone, and what it answered is in `played`.
    told = agent_accounts.read_all(folder)
    live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and "NO_COLOR" not in os.environ
    width = min(shutil.get_terminal_size((110, 24)).columns, 120) if sys.stdout.isatty() else 110
    report = Report(played, told, tokenizer, width=max(width, 80), colors=live)
    say(f"\n{report.tree()}\n\n{report.table()}\n\n{report.conclusion()}")
    say(f"{time.monotonic() - begun:.1f} s.")
    return 0 if report.holds else 1
