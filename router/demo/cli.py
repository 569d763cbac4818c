"""`tito-router demo`: start everything, play, show what came of it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn, TextIO

from tokenizers import Tokenizer

from router.demo.conversations import CallError, Conversation, call, play
from router.demo.processes import StartError, everything
from router.demo.report import Speller, example, table
from router.embedded.models.ngram import shipped_tokenizer

SEEDS = (3, 4)
"""Of the two replies that `--serve` tells."""

_DESCRIPTION = """\
Two workers with a small language model and a router in front of them, on this machine, without a GPU. A group of
conversations is played over text, as an agent would; then each is recovered from its text, token by token.
"""


def parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(prog="tito-router demo", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--conversations", type=_count, default=8, metavar="N", help="how many (%(default)s)")
    parser.add_argument("--turns", type=_count, default=5, metavar="N", help="of each (%(default)s)")
    parser.add_argument("--workers", type=_count, default=2, metavar="N", help="(%(default)s)")
    parser.add_argument("--serve", action="store_true", help="play nothing: leave it running, and say what to try")
    parser.add_argument("--port", type=int, help="the router's (a free one; 30000 with --serve)")
    return parser


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run it. Exits with 0, with 1 if something is not exact or does not run, with 130 on Ctrl-C."""
    args = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    port = args.port if args.port is not None else 30000 if args.serve else 0
    try:
        with tempfile.TemporaryDirectory(prefix="tito-demo-") as folder:
            say(f"starting {args.workers} workers and a router ...")
            with everything(Path(folder), workers=args.workers, port=port, tokenizer=shipped_tokenizer()) as url:
                sys.exit(_serve(url) if args.serve else _demonstrate(url, args.conversations, args.turns))
    except (StartError, CallError) as error:
        say(str(error), sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(0 if args.serve else 130)


def _demonstrate(url: str, conversations: int, turns: int) -> int:
    speller = Speller(Tokenizer.from_file(str(shipped_tokenizer() / "tokenizer.json")))
    say(f"the router is {url}: {conversations} conversations of {turns} turns, as text")
    begun = time.monotonic()
    progress = _Progress(conversations * turns)
    with ThreadPoolExecutor(conversations) as pool:
        talks = list(pool.map(lambda number: play(url, number, turns, progress.tell), range(conversations)))
    progress.over()
    say(f"\nthe first of them, as its author sees it:\n\n{_indented(talks[0].text)}\n")
    say(table(talks, speller))
    shown = example(talks, speller)
    if shown:
        say(f"\nfor example: {shown}")
    return _conclude(talks, time.monotonic() - begun)


def _conclude(talks: Sequence[Conversation], seconds: float) -> int:
    exact = all(talk.exact for talk in talks)
    say(
        "\nevery token that was sampled came back from the text alone, with its logprob, mask and weight version"
        if exact
        else "\nNOT EXACT: this should not happen, please report it"
    )
    say(f"{seconds:.1f} s. `make serve` leaves it running, to try it with curl.")
    return 0 if exact else 1


def _serve(url: str) -> int:
    say(f"\nthe router is {url}. A turn, the next one behind it, and the tokens of both:\n")
    # With a seed a reply is the same each time, so that the lines can be told before anybody has run them.
    text = "Question: What is 6 * 7?\n"
    for seed, observation in ((SEEDS[0], "\nObservation: 42\n"), (SEEDS[1], "")):
        body = {"text": text, "sampling_params": {"max_new_tokens": 32, "sampling_seed": seed}}
        _, reply = call(url, "/generate", body)
        say(_curl(url, "/generate", body))
        text += reply["text"] + observation
    say(_curl(url, "/retrieve_from_text", {"text": text}))
    say("\nCtrl-C ends it.")
    threading.Event().wait()
    return 0


def _curl(url: str, path: str, body: Mapping[str, object]) -> str:
    quoted = json.dumps(body).replace("'", "\\u0027")
    return f"curl {url}{path} -H 'content-type: application/json' -d '{quoted}'\n"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


class _Progress:
    """How many turns are done: one line that grows on a terminal, a line now and then elsewhere."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._lock = threading.Lock()
        self._live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"

    def tell(self) -> None:
        """One more. Called from any thread."""
        with self._lock:
            self._done += 1
            if self._live:
                bar = "█" * (30 * self._done // self._total)
                say(f"\r  {bar:░<30} {self._done} of {self._total} turns", end="")
            elif self._done == self._total or self._done % max(1, self._total // 4) == 0:
                say(f"  {self._done} of {self._total} turns")

    def over(self) -> None:
        """Go on in a new line."""
        if self._live:
            say("")


def say(text: str, stream: TextIO | None = None, end: str = "\n") -> None:
    """To whoever runs this; a terminal without UTF-8 gets what it can show."""
    stream = stream or sys.stdout
    encoding = stream.encoding or "utf-8"
    stream.write((text + end).encode(encoding, "replace").decode(encoding))
    stream.flush()


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a count")
    return number
