"""A parser that is registered is offered by the help, described in the documents, and run by the tests of all formats."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from middleware_hub.parsers import NAMES, REASONING_NAMES
from router.config import CALL_PARSERS, REASONING_PARSERS
from tests.middleware_hub.parsers.formats import FORMATS

DOCUMENT = Path(__file__).parents[3] / "docs" / "sessions.md"


def documented(flag: str) -> dict[str, list[str]]:
    """The table of a flag's parsers: own names, and those of engines for the same parser."""
    table = DOCUMENT.read_text().partition(f"| `{flag}` | also |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines()[2:]]
    return {name.strip(" `"): re.findall(r"`([^`]+)`", also) for name, also in rows}


def registered(names: Any) -> dict[str, list[str]]:
    return {parser.names[0]: list(parser.names[1:]) for parser in dict.fromkeys(names.values()) if parser is not None}


def test_the_document_and_the_help_name_every_call_parser() -> None:
    assert documented("--tool-call-parser") == registered(NAMES), "the table in docs/sessions.md"
    assert set(CALL_PARSERS) == set(registered(NAMES)), "CALL_PARSERS in router/config/sessions.py"


def test_the_document_and_the_help_name_every_reasoning_parser() -> None:
    without_class = {"harmony": ["gpt-oss", "openai_gptoss"], "none": []}
    assert documented("--reasoning-parser") == registered(REASONING_NAMES) | without_class, (
        "the table in docs/sessions.md"
    )
    assert set(REASONING_PARSERS) == set(documented("--reasoning-parser")), "in router/config/sessions.py"


def test_every_format_is_tested() -> None:
    found = {made.parser for made in FORMATS.values()}
    assert found == {parser for name, parser in NAMES.items() if name != "none"}, "a Format in formats.py for each"
