"""`python -m router.embedded`: the same as `tito-router demo-worker`."""

import sys

from router.embedded.cli import main

if __name__ == "__main__":
    try:
        main(prog="python -m router.embedded")
    except KeyboardInterrupt:  # while it loads, as of `router.cli`
        sys.exit(130)
