"""What salts cost and keep away: `python -m benchmarks.serving.salts`, some seconds.

A session of thirty turns goes over two updates of the weights that leave the engine's cache as it is, once for each
`--kv-salt`. The engine's own `cached_tokens` say what it read. The engine is the embedded worker, or a real one without a GPU
(`--engine sglang`, `--engine vllm`: some minutes, and `tests/sglang_cpu/setup.sh` or `tests/vllm_cpu/setup.sh` before).
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from benchmarks.pages import table
from router.config.kv_salt import SaltMode
from tests.integration.conftest import real_router
from tests.support import templates
from tests.support.chat_models import chat_model
from tests.support.client import call
from tests.support.engines import ENGINES
from tests.support.stack import stack
from tests.support.talk import Cacheable, Talk, over_updates, update

EMBEDDED = "embedded"


@contextlib.contextmanager
def served(name: str) -> Iterator[tuple[str, Cacheable]]:
    """Yield the URL of a router in front of one worker, and what its cache can have."""
    if name == EMBEDDED:
        with stack("qwen", styles=("cumulative",), folder=chat_model("qwen3"), prefix_cache=True) as made:
            yield made.url, lambda known: known - 1
        return
    engine = ENGINES[name]
    flags = ("--chat-template", str(templates.folder() / "qwen2_5.jinja"))
    with (
        tempfile.TemporaryDirectory() as folder,
        engine.kit.servers(engine.flags[:1], log_dir=Path(folder)) as (worker,),
        real_router([worker.url], engine.kit.model, Path(folder) / "router.log", flags) as url,
    ):
        yield url, engine.cached


def row(url: str, mode: str, cacheable: Cacheable, turns: int, every: int) -> list[str]:
    """Have the session, and behind one more update a new one that asks the same first."""
    assert call(f"{url}/flush_cache", {}).status == 200
    found = over_updates(url, mode, cacheable, turns=turns, every=every)
    update(url, str(2 + turns // every))
    other = Talk(url, mode, cacheable)
    other.turn()
    told = list(dict.fromkeys(str(version) for version in found.talk.kv_versions()))
    numbers = (found.talk.known, sum(found.talk.again), sum(found.old), other.cached[0])
    return [f"`{mode}`", ", ".join(told), *(f"{number:,}" for number in numbers)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=(EMBEDDED, *ENGINES), default=EMBEDDED, help="(%(default)s)")
    parser.add_argument("--turns", type=int, default=30, help="of the session (%(default)s)")
    parser.add_argument("--every", type=int, default=10, help="turns between two updates (%(default)s)")
    args = parser.parse_args()
    with served(args.engine) as (url, cacheable):
        rows = [row(url, mode, cacheable, args.turns, args.every) for mode in get_args(SaltMode)]
    head = [
        "`--kv-salt`",
        "`kv_version`",
        "tokens at its end",
        "prefilled again",
        "read of older caches",
        "by a new one",
    ]
    print(table(head, rows, words=2))


if __name__ == "__main__":
    main()
