"""The inspector's page in a real browser, on answers that are made up: any text in any field, any length."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from middleware_hub.inspector.reports.files import saved_page
from tests.inspector.conftest import Opened, Watched, place
from tests.inspector.made_up import STATIC, MadeUp, serving

pytestmark = pytest.mark.slow

MARKUP = "</script></title><img src=x onerror=\"document.title='broken'\"><b class=injected>\"'&lt;{{1+1}}${1}`"


def test_all_modules_are_fetched_at_once() -> None:
    """A module that the page does not name would be asked for only when its importer has come."""
    named = re.findall(r'rel="modulepreload" href="inspect/assets/([^"]+)"', (STATIC / "index.html").read_text())
    assert sorted([*named, "main.js"]) == sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.js"))


def selected(page: Page) -> str | None:
    """Return the position of the token that is looked at."""
    on = page.locator(".t.on")
    return on.get_attribute("data-i") if on.count() else None


def at(page: Page, index: int) -> None:
    expect(page.locator(".t.on")).to_have_attribute("data-i", str(index))
    expect(page.locator(".details h2")).to_have_text(f"Token {index:,}")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 820), (400, 800)], ids=["wide", "narrow"])
def test_no_view_breaks_a_rule_of_accessibility(
    size: tuple[int, int], theme: str, opened: Opened, watched: Watched
) -> None:
    watched.expected.append("404")
    made = MadeUp(150, turn=50, reasons=("retokenized",))
    one = "conversation", made.id
    views = [
        place("", "overview"),
        place("", "overview", search="?namespace=none"),
        place("", "run"),
        place("", "explain"),
    ]
    colourings = ("mask", "logprob", "version", "turn", "drift") if size[0] > 1000 else ("logprob", "drift")
    views += [place("", *one, search=f"?t=70&by={by}") for by in colourings]
    views += [place("", "compare", search="?a=text%3Aone&b=text%3Aone"), place("", "conversation", "text:none")]
    with serving(made.answers) as url:
        page = opened("about:blank", size=size, theme=theme)
        for view in views:
            page.goto("about:blank")
            page.goto(url + view)
            page.wait_for_selector(".waiting", state="detached")
            page.wait_for_selector("h1, .trouble")
            if "t=70" in view:
                at(page, 70)
            if "explain" in view:
                page.fill("textarea", "a text")
                page.click("button[type=submit]")
                page.wait_for_selector(".meter")
            for summary in page.locator(".numbers summary").all():
                summary.click()
            rules = {
                rule["id"]: [node["html"] for node in rule["nodes"]] for rule in Axe().run(page).response["violations"]
            }
            assert rules == {}, view
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= size[0], f"{view} is {width} pixels wide"
            page.keyboard.press("?")
            if "explain" not in view:
                expect(page.get_by_role("dialog", name="Keys")).to_be_visible()


def test_markup_in_any_field_stays_text(opened: Opened, tmp_path: Path) -> None:
    made = MadeUp(400, mark=MARKUP, reasons=(MARKUP,))
    with serving(made.answers) as url:
        page = opened(place(url, "overview"))
        saved = {f"/conversations/{made.id}": made.whole(), "/run": made.run()}
        saved[f"/conversations/{made.id}/branches/{made.branch}"] = made.head()
        saved[f"/conversations/{made.id}/branches/{made.branch}/tokens"] = made.tokens(0, 400)
        (tmp_path / "saved.html").write_bytes(saved_page({"saved": 1, "at": 1_790_000_000, "answers": saved}))
        views = [
            place(url, "overview"),
            place(url, "overview", search="?group=" + "%3Cb%20class%3Dinjected%3E"),
            place(url, "run"),
        ]
        views += [
            place(url, "conversation", made.id, made.branch, search=f"?t=111&by={by}")
            for by in ("mask", "version", "drift")
        ]
        views += [place(url, "compare", search="?a={0}&b={0}".format(place("", made.id).removeprefix("/inspect#/")))]
        views += [
            place(url, "explain"),
            (tmp_path / "saved.html").as_uri(),
            (tmp_path / "saved.html").as_uri() + "#/run",
        ]
        for view in views:
            page.goto("about:blank")
            page.goto(view)
            page.wait_for_selector(".waiting", state="detached")
            page.wait_for_selector("h1")
            if "explain" in view:
                page.fill("textarea", MARKUP)
                page.click("button[type=submit]")
                page.wait_for_selector(".meter")
            if "t=111" in view:
                at(page, 111)
            if "?group" not in view:  # it is there, as text
                expect(page.locator("body")).to_contain_text("<img src=x onerror=")
            assert page.locator("img, .injected, main script").count() == 0, view
            assert page.title() != "broken"


def test_every_key_does_what_the_list_of_keys_says(opened: Opened) -> None:
    made = MadeUp(5_000)
    with serving(made.answers) as url:
        page = opened(place(url, "conversation", made.id))
        press = page.keyboard.press
        page.wait_for_selector(".t")
        press("ArrowRight")
        at(page, 0)
        press("ArrowRight")
        at(page, 1)
        press("ArrowLeft")
        at(page, 0)
        press("n")
        at(page, 100)
        press("n")
        at(page, 300)
        press("p")
        at(page, 100)
        press("ArrowDown")
        expect(page.locator(".t.on")).not_to_have_attribute("data-i", "100")
        below = int(selected(page) or 0)
        assert below > 100
        press("ArrowUp")
        at(page, 100)
        press("End")
        at(page, 4_999)
        press("Home")
        at(page, 0)
        first = made.drift(0, 5_000)[0]["start"]
        press("d")
        at(page, first)
        expect(page.get_by_label("Colour by")).to_have_value("drift")
        press("d")
        at(page, made.drift(0, 5_000)[1]["start"])
        press("Shift+D")
        at(page, first)
        press("c")
        expect(page.get_by_label("Colour by")).to_have_value("mask")
        press("g")
        page.get_by_label("Position").fill("4,321")
        press("Enter")
        at(page, 4_321)
        press("/")
        page.keyboard.type("num")
        press("Enter")
        expect(page.locator(".result")).to_have_text("6 of 6")
        press("Shift+Enter")
        expect(page.locator(".result")).to_have_text("5 of 6")
        at(page, 3 + 4 * 997)
        press("Escape")
        press("ArrowRight")
        at(page, 3 + 4 * 997 + 1)
        press("?")
        expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
        press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        page.wait_for_url(lambda url: url.endswith(f"?t={3 + 4 * 997 + 1}"))


def test_a_link_leads_to_its_token(opened: Opened) -> None:
    made = MadeUp(20_000)
    with serving(made.answers) as url:
        page = opened(place(url, "conversation", made.id, made.branch, search="?t=12345&by=logprob"))
        at(page, 12_345)
        expect(page.get_by_label("Colour by")).to_have_value("logprob")
        expect(page.locator(".t.on")).to_be_in_viewport()
        other = opened(page.url)
        at(other, 12_345)


@pytest.mark.parametrize("size", [(1280, 820), (400, 800)], ids=["wide", "narrow"])
def test_tokens_that_come_before_the_first_frame_are_shown_where_the_link_leads(
    size: tuple[int, int], opened: Opened
) -> None:
    made = MadeUp(20_000)
    with serving(made.answers) as url:
        page = opened("about:blank", size=size)
        page.add_init_script(
            "window.ResizeObserver = class extends ResizeObserver"
            " { constructor(told) { super((...all) => setTimeout(told, 300, ...all)); } }"
        )
        page.goto(place(url, "conversation", made.id, made.branch, search="?t=12345"))
        at(page, 12_345)
        page.wait_for_timeout(500)  # until after the frame
        expect(page.locator(".t.on")).to_be_in_viewport()


def test_a_token_that_was_not_sampled_has_no_colour_but_that_of_its_turn(opened: Opened) -> None:
    made = MadeUp(600)
    with serving(made.answers) as url:
        page = opened(place(url, "conversation", made.id, search="?t=100"))
        at(page, 100)
        colours = "all => all.map(one => [Number(one.dataset.i), getComputedStyle(one).backgroundColor])"
        for by in ("mask", "logprob", "version", "drift"):
            page.get_by_label("Colour by").select_option(by)
            page.wait_for_selector(".t.on")
            found = page.locator(".boxes .t[data-i]").evaluate_all(colours)
            assert len(found) > 100
            assert {colour for index, colour in found if not made.sampled(index)} == {"rgba(0, 0, 0, 0)"}, by
            assert {colour for index, colour in found if made.sampled(index)} - {"rgba(0, 0, 0, 0)"}, by


def test_what_has_no_shape_is_drawn_and_half_characters_show_their_bytes(opened: Opened) -> None:
    made = MadeUp(600)
    with serving(made.answers) as url:
        page = opened(place(url, "conversation", made.id))
        box = lambda index: page.locator(f"[data-i='{index}']")  # noqa: E731
        expect(box(3)).to_have_text("f0 9f 8c have")
        expect(box(13)).to_have_text("↵")
        for index, sign in zip(range(5, 600, 41), ["🌊", " مرحبا", "汉江", "⇥", "ZWSP"], strict=False):
            expect(box(index)).to_have_text(sign)
            assert box(index).evaluate("one => getComputedStyle(one).unicodeBidi") == "isolate"
            assert box(index).get_attribute("dir") == "auto"


def test_only_what_is_in_view_is_in_the_page(opened: Opened) -> None:
    made = MadeUp(200_000, turn=20_000)
    with serving(made.answers) as url:
        page = opened(place(url, "conversation", made.id, search="?t=100000"))
        at(page, 100_000)
        for _ in range(3):
            assert page.evaluate("document.querySelectorAll('*').length") < 8_000
            page.mouse.move(640, 600)
            page.mouse.wheel(0, 30_000)
            page.wait_for_timeout(50)
        page.keyboard.press("End")
        at(page, 199_999)
        assert page.evaluate("document.querySelectorAll('*').length") < 8_000


def test_a_key_is_asked_for_and_kept_for_the_tab_only(opened: Opened, watched: Watched) -> None:
    watched.expected.append("401")
    made = MadeUp(100)
    with serving(made.answers, key="sesame") as url:
        page = opened(place(url, "overview"))
        page.get_by_role("textbox", name="Key").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("This key is not valid.")
        page.get_by_role("textbox", name="Key").fill("sesame")
        page.keyboard.press("Enter")
        expect(page.locator("tbody tr")).to_have_count(1)
        assert page.evaluate("[JSON.stringify(localStorage), Object.values(sessionStorage)]") == ["{}", ["sesame"]]
        page.reload()
        expect(page.locator("tbody tr")).to_have_count(1)
        assert "sesame" not in page.url
        assert not any("sesame" in asked for asked in watched.asked)


def test_what_is_wrong_is_said_with_what_to_do(opened: Opened, watched: Watched) -> None:
    watched.expected.append("404")
    made = MadeUp(100)
    with serving(made.answers) as url:
        page = opened(place(url, "conversation", "text:gone"))
        expect(page.get_by_role("alert")).to_contain_text("no such conversation")
        page.get_by_role("link", name="See what is remembered now.").click()
        expect(page.locator("tbody tr")).to_have_count(1)
        page.get_by_label("Namespace").fill("elsewhere")
        expect(page.get_by_role("heading", name="Nothing fits")).to_be_visible()
        page.get_by_role("button", name="Clear the filters").click()
        expect(page.locator("tbody tr")).to_have_count(1)


def test_the_theme_can_be_chosen_and_stays(opened: Opened) -> None:
    made = MadeUp(100)
    with serving(made.answers) as url:
        page = opened(place(url, "overview"), theme="light")
        paper = "getComputedStyle(document.documentElement).backgroundColor"
        light = page.evaluate(paper)
        page.get_by_label("Theme").select_option("dark")
        dark = page.evaluate(paper)
        page.reload()
        page.wait_for_selector("h1")
        assert light != dark == page.evaluate(paper)


def test_a_saved_page_needs_nothing_else(opened: Opened, watched: Watched, tmp_path: Path) -> None:
    made = MadeUp(3_000)
    path = f"/conversations/{made.id}"
    answers = {path: made.whole(), f"{path}/branches/{made.branch}": made.head()}
    answers[f"{path}/branches/{made.branch}/tokens"] = made.tokens(0, 3_000)
    file = tmp_path / "saved.html"
    file.write_bytes(saved_page({"saved": 1, "at": 1_790_000_000, "answers": answers}))
    page = opened(file.as_uri())
    expect(page.get_by_role("heading", level=1)).to_have_text(made.summary()["title"])
    page.keyboard.press("End")
    at(page, 2_999)
    page.keyboard.press("/")
    page.keyboard.type(" river" + "Thought")  # across two tokens
    page.keyboard.press("Enter")
    expect(page.locator(".result")).to_contain_text("of ")
    assert {made.text(int(selected(page) or 0))} == {" river"}
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type(json.dumps([made.tokens(0, 3_000)["ids"][40], made.tokens(0, 3_000)["ids"][41]]))
    page.keyboard.press("Enter")
    expect(page.locator(".result")).to_contain_text("of 33")
    page.goto(file.as_uri() + "#/overview")
    page.get_by_role("link", name="Show what it holds.").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(made.summary()["title"])
    assert [url for url in watched.asked if not url.startswith(("file:", "data:"))] == []


def test_an_age_grows_in_a_list_that_nothing_is_added_to(opened: Opened) -> None:
    made = MadeUp(100)
    with serving(made.answers) as url:
        page = opened("about:blank")
        page.clock.install(time=made.summary()["updated"] + 30)
        page.goto(place(url, "overview"))
        expect(page.locator("tbody time")).to_have_text(re.compile("s ago$"))
        page.clock.fast_forward(600_000)
        expect(page.locator("tbody time")).to_have_text(re.compile("min ago$"))


def test_the_menu_of_files_is_left_with_the_keyboard(opened: Opened) -> None:
    made = MadeUp(100)
    with serving(made.answers) as url:
        page = opened(place(url, "conversation", made.id))
        summary, menu = page.locator(".menu summary"), page.locator(".menu-list")
        for leave in ("Escape", "Shift+Tab"):
            summary.focus()
            page.keyboard.press("Enter")
            expect(menu).to_be_visible()
            page.keyboard.press(leave)
            expect(menu).to_be_hidden()
        summary.focus()
        page.keyboard.press("Enter")
        page.keyboard.press("Tab")
        page.keyboard.press("Escape")
        expect(menu).to_be_hidden()
        expect(summary).to_be_focused()


def test_samples_of_one_prompt_are_told_apart_in_the_choice(opened: Opened) -> None:
    """They have the same title, and as many turns."""
    made = MadeUp(100)
    with serving(made.answers) as url:
        page = opened(place(url, "compare"))
        expect(page.get_by_label("A", exact=True).locator("option").last).to_contain_text(made.id)


def test_an_unknown_place_is_the_overview(opened: Opened) -> None:
    made = MadeUp(100)
    with serving(made.answers) as url:
        page = opened(place(url, "nowhere"))
        expect(page.locator("tbody tr")).to_have_count(1)
        expect(page.get_by_role("link", name="Overview")).to_have_attribute("aria-current", "page")


def test_keys_work_from_a_button_too(opened: Opened) -> None:
    """Whoever chose a finding goes on with the keyboard."""
    made = MadeUp(600)
    with serving(made.answers) as url:
        page = opened(place(url, "conversation", made.id))
        page.locator(".findings button").first.click()
        page.wait_for_selector(".t.on")
        before = int(selected(page) or 0)
        page.keyboard.press("p")
        expect(page.locator(".t.on")).not_to_have_attribute("data-i", str(before))
        page.keyboard.press("c")
        expect(page.get_by_label("Colour by")).to_have_value("logprob")


def test_the_first_finding_says_why_a_branch_is_not_exact_and_where(opened: Opened) -> None:
    made = MadeUp(600, reasons=("edited_turn", "template_mismatch"))
    with serving(made.answers) as url:
        page = opened(place(url, "conversation", made.id))
        first, last = page.locator(".findings button").first, page.locator(".findings button").last
        expect(first).to_have_text("template_mismatch in turn 1: a context is not what the chat template renders")
        expect(last).to_have_text("edited_turn in turn 1: a sampled turn was edited")
        expect(page.locator(".turn", has_text="inexact")).to_have_count(1)
        first.click()
        at(page, 100)
        expect(page.locator(".details")).to_contain_text("template_mismatch: a context is not what")
        expect(page.locator("[data-fact=exact] .bad")).to_have_text("template_mismatch")


def test_a_text_that_turns_the_direction_turns_only_itself_in_a_choice(opened: Opened) -> None:
    """An option holds no elements, so marks close it in."""
    made = MadeUp(100, mark="\u202e")
    with serving(made.answers) as url:
        page = opened(place(url, "compare", search=f"?a={made.id}&b={made.id}"))
        for label in ("A", "Branch"):
            option = page.get_by_label(label, exact=True).first.locator("option:checked")
            expect(option).to_have_text(re.compile("^(1\\. )?\u2068\u202e[^\u2069]+\u2069"))


def test_who_asks_for_drift_behind_the_last_sees_its_colours(opened: Opened) -> None:
    made = MadeUp(600)
    with serving(made.answers) as url:
        page = opened(place(url, "conversation", made.id))
        page.wait_for_selector(".strip .t")
        page.keyboard.press("End")
        at(page, 599)
        page.keyboard.press("d")
        expect(page.get_by_label("Colour by")).to_have_value("drift")
        expect(page.locator("p[aria-live]")).to_have_text("no further drift")
        assert selected(page) == "599"
