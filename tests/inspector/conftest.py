"""A browser for the tests of the page. Whatever a test does, the page says nothing on its console and asks no other origin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

import pytest
from playwright.sync_api import BrowserContext, Page, Request, expect

from tests.support.browser import Browser, chromium

MINUTE = 60_000


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for a file of tests. While it is open its event loop runs in this thread, so `asyncio.run` fails."""
    expect.set_options(timeout=MINUTE / 4)
    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@dataclass
class Watched:
    """What pages said and asked.

    Attributes:
        said: errors and warnings of the console, and exceptions that nobody caught.
        asked: the URLs that were asked for.
        expected: parts of what is said that a test expects, as of an answer of 401.
    """

    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        page.on("console", lambda text: text.type in ("error", "warning") and self.said.append(text.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", self._request)

    def _request(self, request: Request) -> None:
        self.asked.append(request.url)

    def check(self) -> None:
        assert [text for text in self.said if not any(part in text for part in self.expected)] == []
        origins = {urlsplit(url)[:2] for url in self.asked if urlsplit(url).scheme not in ("blob", "data", "file")}
        assert len(origins) <= 1, origins


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.check()


Opened = Callable[..., Page]


@pytest.fixture
def opened(browser: Browser, watched: Watched) -> Iterator[Opened]:
    """`opened(url)`: a page, in a context of its own; `size=(400, 800)`, `theme="dark"`."""
    contexts: list[BrowserContext] = []

    def open_page(url: str, *, size: tuple[int, int] = (1280, 820), theme: str = "light") -> Page:
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme=theme,  # type: ignore[arg-type]
            reduced_motion="reduce",
        )
        context.set_default_timeout(MINUTE / 4)
        contexts.append(context)
        page = context.new_page()
        watched.watch(page)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()


def place(url: str, *parts: str, search: str = "") -> str:
    """Return the address of a place of the page."""
    return f"{url}/inspect#/{'/'.join(quote(part, safe='') for part in parts)}{search}"
