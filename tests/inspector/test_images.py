"""Images on the inspector's page in a real browser: where they stand, by keyboard, at any number, and when they are gone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.inspector.conftest import Opened, Watched, place
from tests.inspector.made_up import MadeUp, serving
from tests.support.pictures import data_url, digest, picture
from tests.support.stack import Stack, stack
from worker.engine.prompt_images import length_of
from worker.models.ngram import shipped_image_tokenizer

pytestmark = pytest.mark.slow

PAD = "<|image_pad|>"
IMAGE = f"<|vision_start|>{PAD}<|vision_end|>"
PICTURES = [picture(160, 120, 1), picture(90, 160, 2, "JPEG"), picture(300, 60, 3)]
SIZES = [(160, 120), (90, 160), (300, 60)]


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    """A router that has seen three images, the first one again in a fork, and two in a session that forks."""
    with stack("qwen", styles=("cumulative",), folder=shipped_image_tokenizer()) as made:
        text = ""
        for turn in range(3):
            text += f"Look {turn}: {IMAGE} and?\n"
            given = [data_url(one) for one in PICTURES[: turn + 1]]
            body = {"text": text, "image_data": given, "rid": f"r{turn}", "sampling_params": {"max_new_tokens": 9}}
            text += str(made.generate(body).body["text"])
        other = {"text": f"Look 0: {IMAGE} and?\n", "image_data": [data_url(PICTURES[1])], "rid": "other"}
        made.generate({**other, "sampling_params": {"max_new_tokens": 9}})
        made.exchange("POST", "/sessions", {"session_id": "agent"})
        for one in PICTURES[:2]:
            parts = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": data_url(one)}}]
            chat = {"messages": [{"role": "user", "content": parts}], "max_tokens": 6}
            assert made.exchange("POST", "/sessions/agent/v1/chat/completions", chat).status == 200
        yield made


def spans(made: Stack) -> list[list[int]]:
    head = made.get("/inspect/api/conversations/text%3Ar0/branches/r2").json()
    return [one["span"] for one in head["images"]]


def natural(page: Page, frame: str) -> tuple[int, int]:
    """The size of the image that a frame shows, in pixels of its file."""
    image = page.locator(f"{frame} img").first
    expect(image).to_have_js_property("complete", True)
    return image.evaluate("one => [one.naturalWidth, one.naturalHeight]")


def focused(page: Page, index: int) -> None:
    expect(page.locator("[data-i].on")).to_have_attribute("data-i", str(index))


def test_an_image_is_one_box_where_its_tokens_stand(served: Stack, opened: Opened) -> None:
    page = opened(place(served.url, "conversation", "text:r0", "r2"))
    boxes = page.locator(".strip .picture")
    expect(boxes).to_have_count(3)
    for box, content, size, (start, end) in zip(boxes.all(), PICTURES, SIZES, spans(served), strict=True):
        assert box.get_attribute("data-i") == str(start)
        name = f"Open image, {end - start} tokens, {size[0]} × {size[1]} pixels"
        expect(page.get_by_role("button", name=name)).to_have_count(1)
        assert end - start == length_of(digest(content))
        expect(box.locator("img")).to_have_attribute("src", data_url(content))
        assert box.locator("img").evaluate("one => [one.naturalWidth, one.naturalHeight]") == list(size)
        assert page.locator(f".strip [data-i='{start + 1}']").count() == 0
    drawn = [int(one.get_attribute("data-i") or 0) for one in page.locator(".strip [data-i]").all()]
    inside = {at for low, high in spans(served) for at in range(low + 1, high)}
    assert drawn == sorted(set(range(max(drawn) + 1)) - inside)
    assert page.locator(".strip", has_text=PAD).count() == 0
    expect(page.locator("header [data-fact=images]")).to_have_text("3")


def test_the_keyboard_steps_over_an_image_and_opens_it(served: Stack, opened: Opened) -> None:
    page = opened(place(served.url, "conversation", "text:r0", "r2"))
    (start, end), size = spans(served)[1], SIZES[1]
    press = page.keyboard.press
    page.wait_for_selector(".t")
    press("g")
    page.get_by_label("Position").fill(str(start + 3))  # inside of it
    press("Enter")
    focused(page, start)
    expect(page.locator(".details h2")).to_have_text("Image 2 of 3")
    expect(page.locator(".details")).to_contain_text(digest(PICTURES[1]))
    expect(page.locator("[aria-live=polite]")).to_contain_text(f"image, {end - start} tokens, {size[0]} × {size[1]}")
    press("ArrowRight")
    focused(page, end)
    press("ArrowLeft")
    focused(page, start)
    press("ArrowLeft")
    focused(page, start - 1)
    expect(page.locator(".details h2")).to_have_text(f"Token {start - 1}")
    press("ArrowDown")
    focused(page, start)
    press("ArrowDown")
    expect(page.locator("[data-i].on")).not_to_have_attribute("data-i", str(start))
    assert int(page.locator("[data-i].on").get_attribute("data-i") or 0) >= end
    press("ArrowUp")
    focused(page, start)
    press("Enter")
    dialog = page.get_by_role("dialog", name=f"Image of {end - start} tokens")
    expect(dialog).to_contain_text(digest(PICTURES[1]))
    assert tuple(natural(page, "dialog")) == size
    expect(dialog.get_by_role("img", name=f"{size[0]} × {size[1]} pixels, JPEG")).to_be_visible()
    press("Escape")
    expect(dialog).to_have_count(0)
    page.locator(".strip .picture").first.click()
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    focused(page, spans(served)[0][0])
    with page.expect_download() as download:
        page.locator(".strip .picture").first.click()
        page.get_by_role("link", name="Save the file").click()
    assert Path(download.value.path()).read_bytes() == PICTURES[0]


def test_the_tree_the_list_and_the_report_show_images(served: Stack, opened: Opened) -> None:
    page = opened(place(served.url, "conversation", "session:agent"))
    lines = page.locator(".tree li")
    expect(lines).to_have_count(2)
    for line, content in zip(lines.all(), PICTURES, strict=False):
        expect(line).to_contain_text("1 image")
        expect(line.locator("img")).to_have_attribute("src", data_url(content))
    page.goto(place(served.url, "overview"))
    expect(page.locator("tr[data-id='text:r0']")).to_contain_text("3 images")
    page.goto(place(served.url, "run"))
    expect(page.locator("[data-tile=images]")).to_have_text("6")
    rows = page.get_by_role("region", name="Commonest images: table").locator("tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.first.locator("img")).to_have_attribute("src", data_url(PICTURES[1]))  # it is there most often
    rows.first.get_by_role("button").click()
    expect(page.get_by_role("dialog").locator("img")).to_be_visible()


def test_two_branches_that_part_at_an_image(served: Stack, opened: Opened) -> None:
    page = opened(place(served.url, "compare", search=f"?a={quote('text:r0')}&a_branch=r0&b={quote('text:other')}"))
    expect(page.locator("[data-fact=difference]")).to_contain_text("There they have different images.")
    line = page.locator(".pair-line.differs").first
    expect(line.locator("img")).to_have_count(2)
    assert [one.get_attribute("src") for one in line.locator("img").all()] == [data_url(one) for one in PICTURES[:2]]
    numbers = [int(one.inner_text()) for one in page.locator(".pair-line > :nth-child(1)").all() if one.inner_text()]
    start, end = spans(served)[0]
    assert (start, end) in list(pairwise(numbers)), "an image is one line"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 820), (400, 800)], ids=["wide", "narrow"])
def test_images_break_no_rule_of_accessibility(
    size: tuple[int, int], theme: str, served: Stack, opened: Opened
) -> None:
    start = spans(served)[0][0]
    views = [
        place("", "conversation", "text:r0", "r2", search=f"?t={start}"),
        place("", "conversation", "session:agent"),
    ]
    views += [place("", "run"), place("", "overview")]
    views += [place("", "compare", search=f"?a={quote('text:r0')}&a_branch=r0&b={quote('text:other')}")]
    page = opened("about:blank", size=size, theme=theme)
    for view in views:
        page.goto("about:blank")
        page.goto(served.url + view)
        page.wait_for_selector("h1")
        for opens in (False, True):
            box = page.locator(".middle .picture, .small.picture").first
            if opens and box.count():
                box.click()
                expect(page.get_by_role("dialog").locator("img")).to_be_visible()
            rules = Axe().run(page).response["violations"]
            assert {rule["id"]: [node["html"] for node in rule["nodes"]] for rule in rules} == {}, view
            assert page.evaluate("document.documentElement.scrollWidth") <= size[0], view


def test_a_saved_page_has_its_images_in_it(served: Stack, opened: Opened, watched: Watched, tmp_path: Path) -> None:
    page = opened(place(served.url, "conversation", "text:r0", "r2"))
    page.get_by_text("Save", exact=True).click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Page").click()
    download.value.save_as(tmp_path / "saved.html")
    del watched.asked[:]
    page = opened((tmp_path / "saved.html").as_uri())
    for box, content in zip(page.locator(".strip .picture").all(), PICTURES, strict=False):
        expect(box.locator("img")).to_have_attribute("src", data_url(content))
        assert box.locator("img").evaluate("one => one.decode().then(() => one.naturalWidth)") > 0
    assert [url for url in watched.asked if not url.startswith(("file:", "data:"))] == []


class WithImages(MadeUp):
    """A made-up conversation in which each context of 100 tokens has an image of 60; `gone` are those without a file."""

    def __init__(self, total: int, files: list[bytes], gone: tuple[int, ...] = ()) -> None:
        super().__init__(total)
        self.images = []
        for number, start in enumerate(range(20, total - 60, 200)):
            content = files[number % len(files)]
            about: dict[str, Any] = {"mime": "image/png", "width": 40, "height": 30, "size": len(content)}
            if number in gone:
                about = dict.fromkeys(about)
            self.images.append({"digest": digest(content), **about, "span": [start, start + 60]})

    def head(self) -> dict[str, Any]:
        return {**super().head(), "images": self.images}


def test_of_hundreds_of_images_only_those_near_the_view_are_fetched(opened: Opened, watched: Watched) -> None:
    files = [picture(40, 30, seed) for seed in range(400)]
    made = WithImages(80_000, files)
    assert len({one["digest"] for one in made.images}) == 400
    with serving(made.answers, files={digest(one): one for one in files}) as url:
        page = opened(place(url, "conversation", made.id))
        expect(page.locator(".strip .picture img").first).to_be_visible()
        page.keyboard.press("End")
        expect(page.locator(f".strip [data-i='{made.total - 1}']")).to_be_visible()
        last = page.locator(f".strip [data-i='{made.images[-1]['span'][0]}'] img")
        expect(last).to_have_attribute("src", data_url(files[399]))
        asked = {one for one in watched.asked if "/media/" in one}
        assert 2 <= len(asked) < 60
        assert page.evaluate("document.querySelectorAll('*').length") < 8_000
        page.keyboard.press("Home")
        expect(page.locator(".strip .picture img").first).to_have_attribute("src", data_url(files[0]))
        assert len([one for one in watched.asked if "/media/" in one]) == len(
            {one for one in watched.asked if "/media/" in one}
        ), "a file is fetched once"


def test_an_image_whose_file_is_gone_says_what_it_was(opened: Opened, watched: Watched) -> None:
    content = picture(40, 30, 5)
    made = WithImages(300, [content], gone=(1,))
    with serving(made.answers, files={digest(content): content}) as url:
        page = opened(place(url, "conversation", made.id))
        name = f"Open image, 60 tokens, the file is not held any more, {digest(content)[:19]}"
        gone = page.get_by_role("button", name=name)
        expect(gone).to_contain_text("60 tokens")
        expect(gone.locator(".thumbnail")).to_have_class("thumbnail gone")
        gone.click()
        expect(page.get_by_role("dialog")).to_contain_text("The file of this image is not held any more.")
        expect(page.get_by_role("dialog")).to_contain_text(digest(content))
    assert len([one for one in watched.asked if "/media/" in one]) <= 1


def test_an_image_is_fetched_with_the_key(opened: Opened, watched: Watched) -> None:
    watched.expected.append("401")
    content = picture(40, 30, 5)
    made = WithImages(300, [content])
    with serving(made.answers, key="sesame", files={digest(content): content}) as url:
        page = opened(place(url, "conversation", made.id))
        page.get_by_role("textbox", name="Key").fill("sesame")
        page.keyboard.press("Enter")
        expect(page.locator(".strip .picture img").first).to_have_attribute("src", data_url(content))
        assert not any("sesame" in asked for asked in watched.asked)
