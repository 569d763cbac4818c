"""`tito-router report`: a store has the figures that the router itself shows."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.inspector.gallery import Gallery
from middleware_hub.inspector.reports import cli
from middleware_hub.inspector.reports.drift import Drifts
from middleware_hub.inspector.reports.run import RunReports
from middleware_hub.media.shelf import Shelf
from middleware_hub.media.stock import Stock
from router.config import StoreConfig
from tests.support import templates
from tests.support.agents import AgentSession, user
from tests.support.asking import until
from tests.support.stack import Stack, stack
from tests.support.vocabularies import vocabulary

OF_THE_MOMENT = {"computed_at", "progress"}


def play(made: Stack) -> None:
    """Samples of one prompt, continued, under two versions; and a session."""
    short = {"max_new_tokens": 12}
    for number in range(4):
        first = made.generate({"text": "Why?", "rid": f"a{number}", "sampling_params": short}).body["text"]
        made.set_weight_version(str(number // 2))
        made.generate({"text": f"Why?{first} And then", "rid": f"b{number}", "sampling_params": short})
    agent = AgentSession.make(made)
    turn = agent.must(user("hello"), says="forty-two")
    agent.must(user("hello"), turn.message, user("more"), says="and 43")
    agent.must(user("hello"), turn.message, user("less"), says="or 41")


def shown(made: Stack) -> Any:
    until(lambda: made.get("/inspect/api/run").json()["done"], "the report is done")
    return made.get("/inspect/api/run").json()


def run(*flags: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(flags)
    return int(ended.value.code or 0)


def test_a_store_has_the_figures_that_the_router_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = f"sqlite:{tmp_path}/store"
    sessions = {"chat_template": str(templates.folder() / "qwen2_5.jinja")}
    with stack("qwen", styles=("incremental",), store=StoreConfig(url=store), sessions=sessions) as made:
        play(made)
        expected = shown(made)
    out = tmp_path / "report.json"
    folder = str(vocabulary("qwen"))
    assert run("--store", store, "--out", str(out), "--tokenizer-path", folder) == 0
    found = json.loads(out.read_text())
    for name in expected.keys() - OF_THE_MOMENT - {"logprobs"}:
        assert found[name] == expected[name], name
    assert found["logprobs"]["counts"] == expected["logprobs"]["counts"]
    for one, other in zip(found["logprobs"]["by_version"], expected["logprobs"]["by_version"], strict=True):
        assert one == pytest.approx(other)  # the same numbers, added up in another order
    assert found["conversations"] == 5
    page = tmp_path / "report.html"
    assert run("--store", store, "--out", str(page), "--namespace", "", "--since", "1d") == 0
    (data,) = re.findall(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    report = json.loads(data)["answers"]["/run"]
    assert report["drift"] is None
    assert report["sampled_tokens"] == expected["sampled_tokens"]
    assert run("--store", store, "--out", str(out), "--tenant", "nobody") == 0
    assert json.loads(out.read_text())["tokens"] == 0
    assert "0 conversations" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ("--store", "sqlite:{path}/none", "--out", "{path}/report.html"),
        ("--store", "other:x", "--out", "{path}/report.html"),
        ("--store", "sqlite:{path}/none", "--out", "{path}/report.pdf"),
        ("--store", "sqlite:{path}/none", "--out", "{path}/r.json", "--tokenizer-path", "{path}/none"),
        ("--out", "{path}/report.html"),
    ],
)
def test_a_wrong_flag_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]) -> None:
    assert run(*(flag.format(path=tmp_path) for flag in flags)) == 2
    assert "error: " in capsys.readouterr().err
    assert list(tmp_path.glob("r*")) == [], "nothing is left behind"


class Nothing:
    """A conversation without a branch, as a session is before its first turn."""

    id = "session:new"

    def branches(self) -> Any:
        return iter(())


def test_conversations_without_branches_let_others_run() -> None:
    count = 1_000

    async def work() -> None:
        vocabulary: Any = None
        drifts: Drifts = None  # type: ignore[assignment] # nothing has a text
        reports = RunReports(vocabulary, drifts, lambda _: 0, Gallery(Stock(Shelf(0))))
        all_of_them: Any = [Nothing()] * count
        turns = 0

        async def another() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(another())
        while not (await reports.report("", 1, lambda: (count, all_of_them)))["done"]:
            pass
        other.cancel()
        assert turns >= count

    asyncio.run(work())


def test_a_report_that_failed_is_begun_again() -> None:
    async def work() -> None:
        vocabulary: Any = None
        drifts: Drifts = None  # type: ignore[assignment] # nothing has a text
        reports = RunReports(vocabulary, drifts, lambda _: 0, Gallery(Stock(Shelf(0))))
        broken: Any = [None]
        with pytest.raises(AttributeError):
            await reports.report("", 1, lambda: (1, broken))
        report = await reports.report("", 1, lambda: (0, []))
        assert report["done"]

    asyncio.run(work())
