"""What the tests of requests, replies and streams share: any JSON, and JSON as SGLang prints it."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def compact(value: Any) -> bytes:
    """Return JSON as SGLang prints it, without white space."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
