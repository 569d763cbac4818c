"""The inspector's page with a conversation of 200,000 tokens: how long it takes to open, and how it scrolls.

The router works in this process and serves the page as well. What a frame costs the page is measured besides the time between
two frames, which a busy machine makes longer.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Error, Page
from pytest_benchmark.fixture import BenchmarkFixture

from router.app import create_app
from router.config import RadixConfig, RouterConfig, WorkersConfig
from tests.support.browser import chromium
from tests.support.client import call
from tests.support.serving import serve
from tests.support.vocabularies import vocabulary
from worker.worker import EmbeddedWorker

TOKENS = 200_000
FRAMES = 300
_STOPPED = "Chromium draws no more frames"
_SCROLL = """async ([frames, stopped]) => {
  const strip = document.querySelector(".strip");
  const [gaps, costs] = [[], []];
  const frame = () => new Promise((drawn, failed) => {
    const late = setTimeout(() => failed(new Error(stopped)), 30_000);
    requestAnimationFrame((now) => (clearTimeout(late), drawn(now)));
  });
  let last = await frame();
  for (let index = 0; index < frames; index += 1) {
    strip.scrollTop += 120;
    const begun = performance.now();
    strip.dispatchEvent(new Event("scroll"));
    const now = await frame();
    strip.getBoundingClientRect();
    costs.push(performance.now() - Math.max(begun, now));
    gaps.push(now - last);
    last = now;
  }
  const at = (all, share) => all.toSorted((a, b) => a - b)[Math.floor(all.length * share)];
  return { gap_p50: at(gaps, 0.5), gap_p95: at(gaps, 0.95), cost_p50: at(costs, 0.5), cost_p99: at(costs, 0.99) };
}"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    rng = random.Random(0)
    with EmbeddedWorker(vocabulary("qwen-whole"), context_length=2 * TOKENS) as worker:
        config = RouterConfig(
            workers=WorkersConfig(urls=(worker.url,)), radix=RadixConfig(tokenizer_path=str(vocabulary("qwen-whole")))
        )
        with serve(create_app(config)) as url:
            worker.script(ids=[rng.randrange(1_000, 30_000) for _ in range(TOKENS)], finish="length")
            sampling = {"max_new_tokens": TOKENS, "skip_special_tokens": False}
            body = {"text": "Write a long one. ", "rid": "long", "sampling_params": sampling}
            assert call(f"{url}/generate", body, timeout=300).headers["x-radix-recorded"] == "exact"
            yield url


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with chromium(tmp_path) as browser:
        yield browser.new_page(viewport={"width": 1280, "height": 820})


def opened(page: Page, url: str, search: str = "") -> None:
    page.goto("about:blank")
    page.goto(f"{url}/inspect#/conversation/text%3Along{search}")
    page.wait_for_selector(".boxes .t")


def test_open_200k_tokens(benchmark: BenchmarkFixture, page: Page, url: str) -> None:
    """From the address to the first tokens, while another client asks whether the router lives."""
    slowest, over = [0.0], threading.Event()

    def ask() -> None:
        while not over.is_set():
            begun = time.perf_counter()
            assert call(f"{url}/liveness").status == 200
            slowest[0] = max(slowest[0], time.perf_counter() - begun)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        benchmark.pedantic(opened, (page, url), rounds=10, warmup_rounds=1)
    finally:
        over.set()
        asking.join()
    benchmark.extra_info["slowest /liveness, ms"] = round(1e3 * slowest[0], 1)


def test_open_a_token_in_the_middle(benchmark: BenchmarkFixture, page: Page, url: str) -> None:
    def middle() -> None:
        opened(page, url, f"?t={TOKENS // 2}")
        page.wait_for_selector(f".t.on[data-i='{TOKENS // 2}']")

    benchmark.pedantic(middle, rounds=10, warmup_rounds=1)


@pytest.mark.parametrize("by", ["logprob", "drift"])
def test_scroll(benchmark: BenchmarkFixture, page: Page, url: str, by: str) -> None:
    """300 frames, each of which moves the text by four lines."""
    opened(page, url, f"?t={TOKENS // 2}&by={by}")
    try:
        found = benchmark.pedantic(page.evaluate, (_SCROLL, [FRAMES, _STOPPED]), rounds=2)
    except Error as error:
        if _STOPPED not in error.message:
            raise
        pytest.skip(f"{_STOPPED}: without a display it may, on a machine that is busy")
    benchmark.extra_info.update({name: round(value, 2) for name, value in found.items()})
    assert page.evaluate("document.querySelectorAll('*').length") < 10_000
