"""`tito-router demo-agent`: agents in a session, and the tree of their turns."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from worker.demo.cli import run

_DESCRIPTION = """\
Two workers with a small language model and a router in front of them, on this machine, without a GPU. A real OpenAI client
and a real Anthropic client run a tool-using agent with two helpers, who find photos, and its answer is the best of four, all
in one session. Then the session is finalized, its trajectories are drawn as a tree, and every id of them is compared with
what the workers wrote down. Tool calls and the first words of answers are scripted, the model draws the rest. It is the same
each time.
"""


def parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog="tito-router demo-agent", description=_DESCRIPTION, allow_abbrev=False)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the demonstration. The status is 1 if a trajectory is not exact; for the others see `run`."""
    run(parser(), argv, "worker.demo.agent.show", needs=("openai", "anthropic", "rich"), extra="agents")
