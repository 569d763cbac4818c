"""A stream that breaks off is in the store before its client sees that: the client goes on at once, at another router."""

from __future__ import annotations

import contextlib
import select
from pathlib import Path

import pytest

from middleware_hub.store.sqlite.file import connect
from router.config import StoreConfig
from tests.support.asking import Asking, until
from tests.support.stack import Stack, stack

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
