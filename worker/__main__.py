"""`python -m worker`: the same as `tito-router demo-worker`."""

import sys

from worker.cli import main

if __name__ == "__main__":
    try:
        main(prog="python -m worker")
    except KeyboardInterrupt:  # while it loads, as of `router.cli`
        sys.exit(130)
