"""Checks of the options that functions of the client take by name.

Otherwise a misspelt name would have no effect: a misspelt `group_size`, for example, leaves a group incomplete for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


def check_options(given: Iterable[str], kind: Any) -> None:
    """Raise TypeError, as Python does for its own arguments, for a name that is no key of `kind`, a TypedDict."""
    known = kind.__required_keys__ | kind.__optional_keys__
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(known))}"
            raise TypeError(f"there is no option {name!r}: {hint}")
