"""The routes of sessions: those of the documents and of the hub's table are the same ones."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from middleware_hub import routes
from tests.middleware_hub.sessions.in_process import Room

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
Route = tuple[str, str]


def documented() -> set[Route]:
    """The rows of the table of all routes in the HTTP API."""
    page = (ROOT / "docs" / "http-api.md").read_text()
    return set(re.findall(r"^\| .*\[`([A-Z]+) (/sessions[^`]*)`\]", page, re.MULTILINE))


def served() -> set[Route]:
    """What the hub's table has."""
    tables = routes.SESSIONS, routes.SESSION_CONTROLS, routes.SESSION_CHATS
    return {(method, path) for table in tables for path, methods in table.items() for method in methods}


def test_the_documents_name_what_is_served() -> None:
    assert documented() == served()


def test_each_of_them_is_there_for_its_methods_and_no_others() -> None:
    async def work() -> None:
        room = Room()
        await room.open()
        there = served()
        paths = {
            path for _, path in there if "/models" not in path or ":" in path
        }  # a worker answers those about models
        for path in sorted(paths):
            for method in ("GET", "POST", "PUT", "DELETE"):
                if (method, path) == ("DELETE", "/sessions/{id}"):
                    continue  # it would be the last one
                status, _ = await room.call(method, path.format(id="s", model="m"), {})
                assert (status == 405) == ((method, path) not in there), (method, path, status)
                assert status != 404, path

    asyncio.run(work())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_names_another(page: Path) -> None:
    """`GET /sessions/{id}?tree=1` in a text, and a path in a program, whose session's id stands in braces as well."""
    known = {path for _, path in served()} | {"/sessions/{id}/v1"}
    found = re.findall(r"(?:\b(?:GET|POST|DELETE) |[\"\'}0-9])(/sessions(?:/[\w{}/\[\]\'-]+)?)", page.read_text())
    for path in found:
        assert re.sub(r"^/sessions/[^/]+", "/sessions/{id}", path) in known, path
