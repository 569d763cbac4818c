"""The path that a misspelt one means.

The router passes a path that is not its own to a worker, whose 404 names neither the router nor the path.
"""

from __future__ import annotations

from difflib import get_close_matches

from router.auth.permissions import FREE, OWN_ADMIN, READ, USE

_SOURCE = "{source}"
_KNOWN = FREE | USE | READ | OWN_ADMIN | {"/sessions", "/workers", "/inspect"}
_SPELT = frozenset(path.replace(_SOURCE, "disk") for path in _KNOWN)
_LONGER = tuple(path.partition(_SOURCE)[0] if _SOURCE in path else f"{path}/" for path in _KNOWN)
"""How a path begins that is known and has more behind it, such as a name."""
_SESSIONS = "sessions"
_ENDS = ("/chat/completions", "/messages", "/messages/count_tokens")
_ALIKE = 0.8
"""How much of two paths has to be equal. Less, and paths of workers that are not listed here would count as misspelt."""
_PART = len("/stats")
"""As many characters of a path are enough to find it by its beginning or its end."""


def meant_path(path: str) -> str | None:
    """Return the path that is meant; None if `path` itself is known, or like no other."""
    if path in _KNOWN:
        return None
    if path == "/":  # somebody opens the router's address in a browser
        return "/inspect"
    bare = "/" + path.strip("/")
    while bare.startswith("/v1/"):  # a client's base URL has a /v1 too many, or none
        bare = bare.removeprefix("/v1")
    for found in (bare, f"/v1{bare}"):
        if found in _SPELT and found != path:
            return found
    head, _, rest = bare[1:].partition("/")
    if rest and get_close_matches(head, (_SESSIONS,), 1, _ALIKE):
        return None if head == _SESSIONS else f"/{_SESSIONS}/{rest}"
    # A client's base URL may itself be the path of a call. Clients put these behind it.
    if ended := [end for end in _ENDS if path.endswith(end)]:
        return f"/v1{ended[0]}"
    if path.startswith(_LONGER):
        return None
    if alike := get_close_matches(path, _SPELT, 1, _ALIKE):
        return alike[0]
    parts = [known for known in _SPELT if len(bare) >= _PART and (known.startswith(bare) or known.endswith(bare))]
    return min(parts, default=None)
