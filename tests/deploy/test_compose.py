"""deploy/compose.yaml as it would run: routers replaced one by one under load, and a dashboard whose every query answers."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.deploy.composed import DEPLOY, Composed, composed
from tests.support.client import Answer, call
from tests.support.fleet import until
from tests.support.programs import Program

pytestmark = pytest.mark.slow

AFFINITY = "x-router-affinity"
QUIET = {
    "tito_router_worker_failures_total": "every worker answers",
    "tito_router_retries_total": "every worker answers",
    "tito_router_abort_retries_total": "nothing is aborted",
    "tito_router_queue_seconds_bucket": "there is room for all",
    "tito_radix_evictions_total": "there is memory for all",
    "tito_session_resent_requests_total": "no client asks twice",
    "tito_radix_replies_total": "all replies are exact",
    "tito_router_process": "it takes --processes",
    "tito_session_replies_total": "all replies are exact",
}
"""What a dashboard rightly shows nothing of while all is well."""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    with composed(tmp_path_factory.mktemp("compose")) as made:
        yield made


class Conversation:
    """A client that keeps no connection, and sends again only what broke off: every other request must succeed."""

    def __init__(self, front: str, number: int) -> None:
        self._front = front
        self._random = random.Random(number)
        self.text = f"Question {number}: How many plays did Shakespeare write?\n"
        self.sampled: list[int] = []
        self.routers: set[str] = set()
        self.broken = 0
        self._word: str | None = None
        self._echoes = number % 2 == 0

    def turn(self) -> None:
        body = {"text": self.text, "sampling_params": {"max_new_tokens": 12}}
        headers = {AFFINITY: self._word} if self._echoes and self._word else {}
        answer = self._post("/generate", body, headers)
        assert answer.headers["x-radix-recorded"] == "exact", answer.headers
        assert self._word in (None, answer.headers[AFFINITY])
        self._word = answer.headers[AFFINITY]
        self.text += answer.json()["text"]
        self.sampled += answer.json()["output_ids"]
        self.text += f"\nObservation: {self._random.random()}\n"

    def check(self) -> None:
        found = self._post("/retrieve_from_text", {"text": self.text}, {}).json()
        masked = [token for token, mask in zip(found["tokens"], found["loss_mask"], strict=True) if mask]
        assert masked == self.sampled

    def _post(self, path: str, body: Any, headers: dict[str, str]) -> Answer:
        answer = call(self._front + path, body, headers=headers, may_break=True)
        while answer.broken:  # its router was killed between head and body
            self.broken += 1
            answer = call(self._front + path, body, headers=headers, may_break=True)
        assert answer.status == 200, (answer.status, answer.content[:500])
        return answer


def agent(front: str) -> None:
    """A session of three turns, of which each call may reach another router."""
    session = call(f"{front}/sessions", {}).json()["session_id"]
    root, messages = f"{front}/sessions/{session}", [{"role": "user", "content": "Hello"}]
    for _ in range(3):
        answer = call(f"{root}/v1/chat/completions", {"model": "m", "messages": messages, "max_tokens": 12})
        assert answer.status == 200, answer.content
        assert answer.headers[AFFINITY] == session
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "And?"}]
    answer = call(f"{root}/finalize", {})
    assert answer.status == 200, answer.content
    assert max(one["num_turns"] for one in answer.json()["trajectories"]) == 3


def replace(router: Program) -> None:
    """As an operator does it: told to stop, it finishes what it has, and is started again."""
    router.terminate()
    assert router.exit_code() == 0, router.log[-2000:]
    router.start()
    router.wait_until_up()


def lose(router: Program) -> None:
    """As the kernel does it when memory runs out."""
    router.kill()
    time.sleep(1)
    router.start()
    router.wait_until_up()


def serves(router: Program) -> bool:
    """Return whether it has answered a generation since it was started."""
    return b'tito_router_requests_total{route="generate",status="200"}' in call(f"{router.url}/metrics").content


@pytest.mark.parametrize("end", [replace, lose])
def test_routers_end_one_after_the_other_and_no_request_fails(up: Composed, end: Callable[[Program], None]) -> None:
    stop, talked = threading.Event(), [Conversation(up.front, number) for number in range(12)]

    def talk(one: Conversation) -> None:
        while not stop.is_set():
            one.turn()
            time.sleep(0.02)

    with ThreadPoolExecutor(len(talked) + 1) as threads:
        under_way = [threads.submit(talk, one) for one in talked]
        try:
            for router in up.routers:
                turns = sum(len(one.sampled) for one in talked)
                threads.submit(agent, up.front).result(60)
                end(router)
                until(lambda router=router: serves(router), "the load balancer has seen that it is back")  # type: ignore[misc]
                assert sum(len(one.sampled) for one in talked) > turns
        finally:
            stop.set()
        for one in under_way:
            one.result(60)
    for one in talked:
        one.check()
    assert sum(one.broken for one in talked) <= (2 * len(talked) if end is lose else 0)
    served = 'sum by (instance) (max_over_time(tito_router_requests_total{route="generate"}[5m])) > 0'
    until(lambda: len(up.query(served)) == 2, "both routers take part")


def test_every_query_of_the_dashboard_answers(up: Composed) -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 40
    talked = [Conversation(up.front, 100 + number) for number in range(4)]
    missing = [query for query in queries if not any(quiet in query for quiet in QUIET)]

    def shown(query: str) -> bool:
        return bool(up.query(query.replace("$instance", ".*").replace("$__rate_interval", "20s")))

    def all_shown() -> bool:
        for one in talked:
            one.turn()
        agent(up.front)
        talked[0].check()
        missing[:] = [query for query in missing if not shown(query)]
        return not missing

    until(all_shown, lambda: f"nothing to show: {missing}")
    for query in queries:
        shown(query)  # also what shows nothing is understood


def test_nothing_of_it_alerts(up: Composed) -> None:
    firing = up.query('ALERTS{alertstate="firing"}')
    assert firing == []
    rules = call(f"http://{up.places['prometheus:9090']}/api/v1/rules").json()["data"]["groups"]
    assert sum(len(group["rules"]) for group in rules) > 10
    assert {rule["health"] for group in rules for rule in group["rules"]} == {"ok"}
