"""Which JSON is nested too deeply to be read.

Up to Python 3.13 a decoder gives up at a thousand levels. Python 3.14 limits its stack in place of the levels, so the router
reads JSON of some ten thousand levels, and passes it on.
"""

import sys

import pytest

LIMITED = sys.version_info < (3, 14)
"""Whether a decoder counts levels."""
limited = pytest.mark.skipif(not LIMITED, reason="this Python reads deeper JSON, and it is passed on")
