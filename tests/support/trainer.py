"""A trainer's process, `python -m tests.support.trainer FILE HOLD URL...`: it claims, holds, acknowledges, and notes each step.

A line of the file is JSON: `["claimed", claim, {sample: [request ids]}]`, `["acknowledged", claim, [samples]]`, or
`["refused", claim, [samples that others have]]`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from middleware_hub.client import Client, RefusedError, RouterClientError

LEASE = 2.0


def main(path: Path, hold: float, urls: list[str]) -> None:
    with path.open("a", buffering=1) as file, Client(urls) as client:

        def write(*line: object) -> None:
            file.write(json.dumps(line) + "\n")
            os.fsync(file.fileno())

        while True:
            try:
                claim = client.claim(
                    groups=2, lease_seconds=LEASE, wait_seconds=1, allow_partial=True, partial_after_seconds=2
                )
            except RouterClientError:
                time.sleep(0.05)  # all routers are gone for a moment
                continue
            if claim.id is None:
                continue
            names = {one.id: [turn.request_id for each in one.trajectories for turn in each.turns] for one in claim}
            write("claimed", claim.id, names)
            time.sleep(hold)
            while True:
                try:
                    count = client.acknowledge(claim)
                except RefusedError as error:
                    if error.status not in (404, 409):
                        continue
                    write("refused", claim.id, error.details.get("taken", []))
                except RouterClientError:
                    continue
                else:
                    assert count == len(claim)
                    write("acknowledged", claim.id, list(names))
                break


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
