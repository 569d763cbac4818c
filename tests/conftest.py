"""Random tests are the same ones each time, so that a commit is judged by what it changed; exploring is asked for.

`TITO_EXAMPLES=20` looks further: twenty times as many examples, other ones each time (or those of `--hypothesis-seed`).
"""

import os

from hypothesis import settings

MORE = int(os.environ.get("TITO_EXAMPLES", "0"))

settings.register_profile("same", derandomize=True)
settings.register_profile("explore", max_examples=100 * (MORE or 1), print_blob=True)
settings.load_profile("explore" if MORE else "same")
