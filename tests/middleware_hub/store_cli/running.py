"""`tito-router store`, run in this process."""

from __future__ import annotations

import pytest

from middleware_hub.store_cli.cli import main


def status(*arguments: str) -> int:
    """Run a command and return its exit status."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code
