"""`python -m router.embedded`, the earlier name of `tito-router demo-worker`."""

import sys

from router.cli import main

if __name__ == "__main__":
    main(["demo-worker", *sys.argv[1:]])
