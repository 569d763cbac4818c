"""The name of a reply with several choices, which names none of them.

The `id` of a chat or completion is made of its generation's id, so it names that sample wherever one is meant: as a parent, for
a reward, in a list of replies. With several choices there is no such sample. Their `id` says so by its form, which any router
knows, at any time.
"""

from __future__ import annotations

import re
from typing import Final

from router.errors import BadRequestError

_SEVERAL: Final = re.compile(r"(?:chatcmpl-|cmpl-)?[0-9a-f]{32}-n([0-9]+)")


def of_several(name: str, count: int) -> str:
    """Return the name of all `count` choices of a reply, made of a generation's id; of one choice, just that."""
    return name if count == 1 else f"{name}-n{count}"


def check_one(name: str, what: str) -> None:
    """Raise BadRequestError if a name, given as `what`, is that of several choices."""
    found = _SEVERAL.fullmatch(name)
    if found is not None:
        raise BadRequestError(
            f"{what} {name!r} is the id of a reply with {found[1]} choices, and one sample is meant: name that by its own id, "
            "choices[i].meta_info.generation_id"
        )
