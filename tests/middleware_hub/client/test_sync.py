"""The blocking client, which a script makes from the asynchronous one."""

from __future__ import annotations

import pytest

from scripts import make_client


def test_it_is_what_the_script_makes() -> None:
    made = make_client.made(make_client.SOURCE.read_text(encoding="utf-8"))
    assert made == make_client.MADE.read_text(encoding="utf-8"), "sync.py is out of date: run `make client`"


def test_nothing_of_it_is_asynchronous() -> None:
    text = make_client.MADE.read_text(encoding="utf-8").partition("__future__")[2]
    assert not [word for word in ("async", "await", "Async") if word in text]


def test_a_constructor_that_has_changed_is_noticed() -> None:
    source = make_client.SOURCE.read_text(encoding="utf-8").replace("made: Mapping", "found: Mapping")
    with pytest.raises(ValueError, match="mend PARTS"):
        make_client.made(source)
