"""Random tests are the same ones each time, so that a commit is judged by what it changed; exploring is asked for.

`TITO_EXAMPLES=20` looks further: twenty times as many examples, other ones each time (or those of `--hypothesis-seed`).
"""

import os
from typing import Any

from hypothesis import HealthCheck, settings

MORE = int(os.environ.get("TITO_EXAMPLES", "0"))

# How long an example takes is the machine's business, and the first text of all takes a second on a slow one.
UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **UNTIMED)
settings.register_profile("explore", max_examples=100 * (MORE or 1), print_blob=True, **UNTIMED)
settings.load_profile("explore" if MORE else "same")
