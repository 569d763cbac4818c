"""A worker that writes down what it read and sampled, and the reader of what it wrote.

The router has no part in it, and cannot have: a worker writes when it ends, after the router has given its answer.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_TOKENS_PER_SECOND = 200  # as `tito-router demo-worker`


@dataclass(frozen=True)
class Evidence:
    """One generation, as its worker wrote it down.

    Attributes:
        read: the ids that the model consumed.
        sampled: the ids that it produced.
        logprobs: of each sampled id.
        versions: of the weights that sampled each id.
    """

    read: list[int]
    sampled: list[int]
    logprobs: list[float]
    versions: list[str]


def read_all(folder: Path) -> dict[str, Evidence]:
    """Return what all workers wrote into `folder`, by generation id."""
    written = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jsonl"))]
    lines = [json.loads(line) for text in written for line in text.splitlines()]
    return {line.pop("generation"): Evidence(**line) for line in lines}


def main() -> None:
    """Serve until SIGTERM, then write a line of JSON for each generation."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--weight-version", required=True)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    args = parser.parse_args()
    logging.basicConfig(level="INFO", stream=sys.stderr)
    from router.embedded.worker import EmbeddedWorker, WorkerOptions  # slow to import, and `read_all` does without

    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: over.set())
    delay = 1 / _TOKENS_PER_SECOND
    worker = EmbeddedWorker(None, WorkerOptions(seed=args.seed, weight_version=args.weight_version, token_delay=delay))
    with worker:
        logger.info("listening on %s, tokenizer %s", worker.url, worker.tokenizer_path)
        over.wait()
    with (args.out / f"{args.seed}.jsonl").open("w", encoding="utf-8") as file:
        for one in worker.log:
            evidence = Evidence(one.input_ids, one.output_ids, one.logprobs, one.versions)
            file.write(json.dumps({"generation": one.rid, **asdict(evidence)}) + "\n")


if __name__ == "__main__":
    main()
