"""The logs of libraries that write to stderr themselves."""

from __future__ import annotations

import logging


def quiet_their_handlers() -> None:
    """Remove the libraries' handlers, so that their messages take the form of our log. Call it once they are imported."""
    for name in ("transformers", "huggingface_hub"):
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
