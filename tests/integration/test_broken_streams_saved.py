"""A stream that breaks off is in the store before its client sees that: the client goes on at once, at another router."""

from __future__ import annotations

import contextlib
import select
from pathlib import Path

import pytest

from middleware_hub.store.sqlite.file import connect
from router.config import StoreConfig
from tests.support.asking import Asking, until
from tests.support.client import call
from tests.support.programs import Program
from tests.support.stack import Stack, stack
from worker.models.ngram import shipped_tokenizer

TEXT = "Tell me of the sea: "
READ = 5


def router(folder: Path) -> contextlib.AbstractContextManager[Stack]:
    store = StoreConfig(url=f"sqlite:{folder}/", spool=str(folder / "spool"))
    return stack("qwen", styles=("cumulative",), store=store)


def recorded(served: Stack) -> int:
    """Return how many replies the router has judged: in the same step it begins to save them."""
    lines = served.get("/metrics").content.decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) == 1 for line in lines if line.startswith("tito_radix_replies_total{"))


def test_it_breaks_off_when_it_is_saved(tmp_path: Path) -> None:
    """The file is locked when the worker dies, so the reply cannot be saved yet."""
    with router(tmp_path) as one, router(tmp_path) as two, contextlib.ExitStack() as entered:
        one.workers[0].hold(after=READ)
        body = {"text": TEXT, "sampling_params": {"max_new_tokens": 50}, "stream": True}
        asking = entered.enter_context(contextlib.closing(Asking(one.url, body)))
        read = [asking.event() for _ in range(READ)][-1]
        assert read is not None
        assert not recorded(one)
        with contextlib.closing(connect(tmp_path / "store.sqlite3")) as holder:
            holder.execute("BEGIN IMMEDIATE")
            one.workers[0].kill()
            until(lambda: recorded(one), "the reply is recorded")
            assert not select.select([asking.response.fileno()], [], [], 0)[0], "the client sees the end"
            holder.execute("ROLLBACK")
        with pytest.raises((ConnectionError, OSError)):
            asking.event()
        found = two.retrieve(TEXT + read["text"])
        assert [token for token, mask in zip(found["tokens"], found["loss_mask"], strict=True) if mask] == read[
            "output_ids"
        ]


@pytest.mark.slow
def test_a_turn_that_breaks_off_where_a_router_stops(tmp_path: Path) -> None:
    """Its time to finish is over while its worker hangs, so it is not known yet what was sampled."""
    flags = ["--tokenizer-path", str(shipped_tokenizer()), "--store", f"sqlite:{tmp_path}/", "--shutdown-grace", "1"]
    flags += ["--store-spool", str(tmp_path / "spool")]
    with contextlib.ExitStack() as entered:
        worker = entered.enter_context(Program("worker", "demo-worker", folder=tmp_path))
        worker.wait_until_up()
        programs = [Program(name, *flags, "--worker-urls", worker.url, folder=tmp_path) for name in ("one", "two")]
        for program in programs:
            entered.enter_context(program).wait_until_up()
        one, two = programs
        assert call(f"{one.url}/sessions", {"session_id": "s"}).status == 201
        path, asked = "/sessions/s/v1/chat/completions", [{"role": "user", "content": TEXT}]
        body = {"model": "m", "messages": asked, "stream": True, "max_tokens": 2000, "ignore_eos": True}
        asking = entered.enter_context(contextlib.closing(Asking(one.url, body, path=path)))
        read = ""
        while len(read) < READ:
            event = asking.event()
            assert event is not None
            read += event["choices"][0]["delta"].get("content") or ""
        worker.freeze()
        one.terminate()
        until(lambda: "Cancel 1 running" in one.log, "the time to finish is over")
        while select.select([asking.response.fileno()], [], [], 1)[0]:
            asking.event()  # one that came before; ConnectionError for the end
        worker.thaw()
        with pytest.raises((ConnectionError, OSError)):
            asking.events()
        asked += [{"role": "assistant", "content": read}, {"role": "user", "content": "Go on."}]
        answer = call(f"{two.url}{path}", {"model": "m", "messages": asked, "max_tokens": 5})
        assert answer.status == 200, answer.content
        assert int(answer.headers["x-radix-reused-tokens"]) > 0
