"""Make the pictures of the inspector in docs/pictures, of what the demonstrations leave behind.

Usage: python -m scripts.make_pictures [--out FOLDER] [--all]

The script plays the conversations of `tito-router demo`, with new weights on the way and one reply cut off, and the agents of
`tito-router demo-agent`, and takes the pictures in a Chromium. `--all` takes every view in both themes and at both sizes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

from tokenizers import Tokenizer

from tests.support.browser import Browser, chromium
from worker.demo.agent.script import Prompter
from worker.demo.agent.team import play as play_agents
from worker.demo.processes import Router, workers
from worker.demo.rollout import Rollout, call, play
from worker.models.ngram import shipped_image_tokenizer

ROOT = Path(__file__).resolve().parents[1]

TURNS, ROLLOUTS = 8, 7
SIZES = {"1280": (1280, 820), "400": (400, 820)}
PLACES = ("overview", "conversation", "drift", "image", "session", "compare", "explain", "run")
SHOWN = (
    ("overview", "1280", "light"),
    ("conversation", "1280", "light"),
    ("drift", "1280", "dark"),
    ("image", "1280", "light"),
    ("run", "1280", "light"),
)
SHOWN += (("compare", "1280", "light"), ("explain", "1280", "light"), ("session", "400", "dark"))
"""The pictures that the docs show."""


@contextlib.contextmanager
def played(folder: Path) -> Iterator[tuple[str, list[Rollout]]]:
    """Run a router that remembers conversations and a session; yield its URL and the conversations."""
    with workers(folder, 2, images=True) as urls, Router(folder, urls, images=True) as router:
        tokenizer = Tokenizer.from_file(str(shipped_image_tokenizer() / "tokenizer.json"))
        call(router.url, "/update_weights_from_disk", {"model_path": "demo", "weight_version": "1"})
        asyncio.run(play_agents(router.url, Prompter(tokenizer), lambda _: None))
        version = iter(range(3, 99))

        def on_turn() -> None:
            if next(turns) % 24 == 23:
                body = {"model_path": "demo", "weight_version": str(next(version))}
                call(router.url, "/update_weights_from_disk", body)

        turns = iter(range(10_000))
        # One after the other, so that the pictures stay alike.
        with ThreadPoolExecutor(1) as pool:
            rollouts = list(pool.map(lambda number: play(router.url, number, TURNS, on_turn), range(ROLLOUTS)))
        first = rollouts[0]
        short = {"max_new_tokens": 5, "temperature": 1.0, "sampling_seed": 12}
        body = {"text": first.text + "\nAnswer:", "sampling_params": short}
        call(router.url, "/generate", body, {"x-radix-parent": first.request_ids[-1]})
        yield router.url, rollouts


def shoot(browser: Browser, url: str, rollouts: list[Rollout], out: Path, wanted: list[tuple[str, str, str]]) -> None:
    """Take these pictures: of a place, at a size, in a theme."""
    one = f"text:{rollouts[0].request_ids[0]}"
    name = lambda text: quote(text, safe="")  # noqa: E731
    for place, size, theme in wanted:
        width, height = SIZES[size]
        with browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme) as context:  # type: ignore[arg-type]
            page = context.new_page()
            page.goto(f"{url}/inspect")
            page.wait_for_selector(".conversations tbody tr")
            session = page.get_attribute("tr[data-id^='session:']", "data-id") or ""
            known = json.load(urlopen(f"{url}/inspect/api/conversations/{name(session)}"))
            branches = [branch["id"] for branch in known["branches_list"] if branch["reward"] is not None]
            seeing, (start, _) = first_image(f"{url}/inspect/api/conversations/{name(session)}", known["branches_list"])
            paths = {
                "overview": "",
                "conversation": f"conversation/{name(one)}?by=logprob",
                "drift": f"conversation/{name(one)}",
                "image": f"conversation/{name(session)}/{name(seeing)}?t={start}",
                "session": f"conversation/{name(session)}",
                "compare": f"compare?a={name(session)}&b={name(session)}&a_branch={branches[1]}&b_branch={branches[2]}",
                "explain": "explain",
                "run": "run",
            }
            page.goto(f"{url}/inspect#/{paths[place]}")
            if place == "explain":
                page.fill("textarea", rollouts[0].text.replace("Thought: ", "Thought:", 1))
                page.click("form button[type=submit]")
                page.wait_for_selector(".meter")
            for key in {"conversation": "nnn", "drift": "dd"}.get(place, ""):
                page.wait_for_selector(".t")
                page.keyboard.press(key)
            if place == "image":
                page.wait_for_selector(".strip .picture")
                page.eval_on_selector(".strip .picture", "one => one.scrollIntoView({block: 'center'})")
            for unfinished in (".waiting", "progress"):
                page.wait_for_selector(unfinished, state="detached")
            page.wait_for_timeout(500)  # until what is drawn step by step has come
            page.screenshot(path=out / f"inspector-{place}{'' if wanted == list(SHOWN) else f'-{size}-{theme}'}.png")


def first_image(url: str, branches: list[dict[str, Any]]) -> tuple[str, tuple[int, int]]:
    """Return the first branch with an image, and the tokens of that."""
    for branch in branches:
        shown = json.load(urlopen(f"{url}/branches/{quote(branch['id'], safe='')}"))["images"]
        if shown:
            return branch["id"], shown[0]["span"]
    raise SystemExit("no branch of the session has an image")


def main() -> None:
    """Make the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    every = [(place, size, theme) for place in PLACES for size in SIZES for theme in ("light", "dark")]
    with (
        tempfile.TemporaryDirectory() as folder,
        played(Path(folder)) as (url, rollouts),
        chromium(Path(folder)) as browser,
    ):
        shoot(browser, url, rollouts, args.out, every if args.all else list(SHOWN))


if __name__ == "__main__":
    main()
