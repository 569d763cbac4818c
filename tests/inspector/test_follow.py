"""A conversation that goes on while it is looked at, and the filter of times, in a real browser."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import expect

from tests.inspector.conftest import Opened, Watched, place
from tests.inspector.made_up import MadeUp, serving
from tests.support.asking import until

pytestmark = pytest.mark.slow


class GoingOn:
    """A conversation with one reply, which grows to two when it is told to: the second one is another branch."""

    def __init__(self) -> None:
        self.turns = [MadeUp(200), MadeUp(400)]
        self.turns[1].branch = "reply-11"
        self.grown = False

    def answers(self, method: str, parts: list[str], fields: dict[str, str]) -> Any:
        one, two = self.turns
        if parts[2:4] == ["branches", two.branch]:
            return two.answers(method, parts, fields)
        found = one.answers(method, parts, fields)
        if parts == ["conversations", one.id] and self.grown:
            (node,), (branch,) = found["tree"], found["branches_list"]
            both = {**node, "branch_of": [two.branch]}
            fork = {**node, "id": "other", "branch_of": ["aside"], "parent": None}
            found["tree"] = [both, {**node, "id": "m", "parent": "n", "branch_of": [two.branch]}, fork]
            later = {**branch, "id": two.branch, "updated": branch["updated"] + 1}
            found["branches_list"] = [later, {**branch, "id": "aside", "updated": branch["updated"] + 9}]
        return found


def test_a_conversation_is_followed_as_it_goes_on(opened: Opened) -> None:
    """The turn behind the one that is open, not a newer one elsewhere in the tree; and back goes to where one came from."""
    made = GoingOn()
    one, two = made.turns
    with serving(made.answers) as url:
        page = opened(place(url, "overview"))
        page.goto(place(url, "conversation", one.id, search="?by=logprob"))
        page.wait_for_selector(".t")
        page.get_by_label("Follow").check()
        page.wait_for_url(lambda url: "follow=1" in url)
        made.grown = True
        page.wait_for_url(f"**/{two.branch}?*")
        expect(page.locator(".details h2")).to_have_text("Token 300")
        expect(page.get_by_label("Follow")).to_be_checked()
        expect(page.get_by_label("Colour by")).to_have_value("logprob")
        page.get_by_label("Follow").uncheck()
        page.wait_for_url(lambda url: "follow" not in url)
        page.go_back()
        expect(page.locator("h1")).to_have_text("What is remembered")


def test_following_goes_on_when_the_router_is_back(opened: Opened, watched: Watched) -> None:
    watched.expected.append("404")
    made = GoingOn()
    one, two = made.turns
    away = False

    def answers(method: str, parts: list[str], fields: dict[str, str]) -> Any:
        return None if away else made.answers(method, parts, fields)

    with serving(answers) as url:
        page = opened(place(url, "conversation", one.id))
        page.wait_for_selector(".t")
        away = True
        page.get_by_label("Follow").check()
        expect(page.locator(".side")).to_contain_text("no such conversation")
        away, made.grown = False, True
        page.wait_for_url(f"**/{two.branch}?*")


def test_a_time_up_to_which_conversations_are_shown(opened: Opened) -> None:
    made, asked = MadeUp(200), []

    def answers(method: str, parts: list[str], fields: dict[str, str]) -> Any:
        asked.append(fields)
        return made.answers(method, parts, fields)

    with serving(answers) as url:
        page = opened(place(url, "overview"))
        page.wait_for_selector(".conversations")
        now = time.time()
        page.get_by_label("Updated within").select_option(label="an hour")
        page.get_by_label("before").select_option(label="a day ago")
        page.wait_for_url("**until=86400*")
        expect(page.locator(".conversations")).to_be_visible()
        until(lambda: any("until" in fields for fields in asked))
        times = next(fields for fields in reversed(asked) if "until" in fields)
        assert abs(now - 86_400 - float(times["until"])) < 30
        assert float(times["until"]) - float(times["since"]) == 3_600
        assert parse_qs(urlsplit(page.url).fragment.partition("?")[2])["since"] == ["3600"]
