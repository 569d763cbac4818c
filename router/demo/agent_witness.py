"""A worker that writes down what it has read and sampled: what trajectories are held against.

The router has no part in it, and cannot have: the file is written when the worker ends, after the router has given its answer.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from router.embedded.engine.records import Record
from router.embedded.worker import EmbeddedWorker

logger = logging.getLogger(__name__)

_PACE = 200  # tokens per second, as `tito-router demo-worker`


def write(records: Iterable[Record], path: Path) -> None:
    """A line of JSON for each generation."""
    lines = [
        {
            "generation": record.rid,
            "read": record.input_ids,
            "sampled": record.output_ids,
            "logprobs": record.logprobs,
            "versions": record.versions,
        }
        for record in records
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM, then write."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--weight-version", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn.error").setLevel("WARNING")
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: over.set())
    worker = EmbeddedWorker(seed=args.seed, weight_version=args.weight_version, token_delay=1 / _PACE)
    with worker:
        logger.info("listening on %s, tokenizer %s", worker.url, worker.tokenizer_path)
        over.wait()
    write(worker.log, args.out)


if __name__ == "__main__":
    main()
