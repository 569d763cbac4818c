"""The places of turns below a base URL, and the dialect of each: client libraries add these paths themselves.

A library may add a second `/v1`, or none at all. Google's put another version of their API there, such as `v1beta`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from starlette.types import Scope

from middleware_hub.chat.dialect import Counter, Dialect
from middleware_hub.dialects.anthropic import Anthropic
from middleware_hub.dialects.gemini import COUNT, Gemini, called
from middleware_hub.dialects.gemini.models import google_models
from middleware_hub.dialects.openai import OpenAI
from middleware_hub.dialects.responses import Responses
from router.http.headers import header


class Place(NamedTuple):
    """A path below a base URL.

    Attributes:
        row: the path as `routes.SESSION_CHATS` has it behind the session; empty if there is nothing at the path.
        dialect: of what is served there, errors included.
        counter: counts the tokens of a prompt; None for a place that does something else.
        model: the name of the model that the path asks about.
        about_models: whether it tells which models there are.
        listed: writes a worker's list of models, or the model of a name; None if the worker's own words are the reply.
        native: whether workers serve this path, too.
    """

    row: str
    dialect: Dialect
    counter: Counter | None = None
    model: str = ""
    listed: Callable[[bytes, str], bytes] | None = None
    native: bool = True

    about_models: bool = False


OPENAI: Final = OpenAI()
_ANTHROPIC: Final = Anthropic()
_GOOGLE: Final = Gemini("", "", events=False)
_FIXED: Final = {
    "chat/completions": Place("v1/chat/completions", OPENAI),
    "messages": Place("v1/messages", _ANTHROPIC),
    "messages/count_tokens": Place("v1/messages/count_tokens", _ANTHROPIC, _ANTHROPIC),
    "responses": Place("v1/responses", Responses()),
}
PLACES: Final = {place.row: place for place in _FIXED.values()}
"""By the paths as most clients write them; `place_at` finds all."""
_VERSIONS: Final = re.compile(r"((?:v1(?:(?:alpha|beta)[0-9]*)?/)*)(.*)", re.DOTALL)
_MODELS: Final = "models"
_GOOGLES_OWN: Final = b"x-goog-api-client"
"""All of Google's libraries send this header. Some say `v1`, where OpenAI's have another list of models."""


def place_at(path: str, scope: Scope) -> Place | None:
    """Return the place at a path, which has no slash in front; None for a path that no library adds.

    `scope` is the request's: its query says how Google's clients want a stream, and its headers whether it is one of theirs.
    """
    found = _VERSIONS.fullmatch(path)
    assert found is not None, "it matches every text"
    versions, rest = found.groups()
    if rest in _FIXED:
        return _FIXED[rest]
    if (call := called(rest, scope["query_string"])) is not None:
        dialect, name = call
        return Place(f"v1beta/models/{{model}}:{name}", dialect, dialect if name == COUNT else None, native=False)
    is_googles = versions.strip("v1/") != "" or header(scope, _GOOGLES_OWN) is not None
    if rest == _MODELS or rest.startswith(f"{_MODELS}/"):
        name = rest[len(_MODELS) + 1 :]
        if is_googles:
            row = f"v1beta/models{'/{model}' if name else ''}"
            return Place(row, _GOOGLE, model=name, about_models=True, listed=google_models, native=False)
        return Place("v1/models", OPENAI, model=name, about_models=True)
    if is_googles:
        return Place("", _GOOGLE)
    return Place("", _ANTHROPIC) if rest.startswith("messages/") else None
