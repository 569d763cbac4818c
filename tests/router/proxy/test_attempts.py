"""Where a request goes next, and whose fault it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import BreakerConfig, RetryConfig
from router.errors import EndedInQueueError, NoWorkerError, RouterError, UpstreamError, UpstreamTimeoutError
from router.policies.round_robin import RoundRobin
from router.proxy.attempts import MAX_LOST, Attempts, Failure
from router.workers.breaker import BreakerState
from router.workers.policy import RouteQuery
from router.workers.pool import WorkerPool
from router.workers.worker import ProbeResult

QUERY = RouteQuery()


def make(count: int, failures: int = 2) -> WorkerPool:
    pool = WorkerPool(RoundRobin(), breaker=BreakerConfig(failure_threshold=failures))
    for number in range(count):
        pool.probed(pool.add(f"http://w{number}:1"), None)
    return pool


def begin(pool: WorkerPool, *, repeatable: bool = True, **retry: float) -> Attempts:
    config = RetryConfig(**{"jitter": 0.0, **retry})  # type: ignore[arg-type]
    return Attempts(pool, config, repeatable=repeatable)


def open_breakers(pool: WorkerPool) -> list[str]:
    return [worker.url for worker in pool.list() if worker.breaker.state is not BreakerState.CLOSED]


def run(pool: WorkerPool, attempts: Attempts, bad: dict[str, Failure], asked: list[str] | None = None) -> str:
    """A request whose workers fail as `bad` says of their URLs, and the others answer: who did, or the error."""
    while True:
        try:
            attempts.check()
            lease = pool.lease(QUERY, attempts.exclude)
        except NoWorkerError as error:
            try:
                attempts.no_worker_left(error)
            except RouterError as last:
                return last.type
            continue
        except RouterError as last:
            return last.type
        with lease:
            attempts.count += 1
            if asked is not None:
                asked.append(lease.worker.url)
            why = bad.get(lease.worker.url)
            if why is None:
                attempts.answered(lease.worker)
                return lease.worker.url
            if why == "error":
                if not attempts.goes_on_after_error(lease.target, 500):
                    return "500"
            else:
                attempts.failed(lease.target, why, why)


@pytest.mark.parametrize("why", ["connect", "lost", "timeout", "error"])
def test_a_worker_that_fails_where_another_one_answers_is_at_fault(why: Failure) -> None:
    pool = make(2)
    for _ in range(4):
        assert run(pool, begin(pool), {"http://w0:1": why}) == "http://w1:1"
    assert open_breakers(pool) == ["http://w0:1"]


@pytest.mark.parametrize("why", ["lost", "timeout", "error"])
def test_a_request_that_nobody_can_answer_is_at_fault_itself(why: Failure) -> None:
    """Twenty clients send it: no breaker opens."""
    pool = make(5, failures=1)
    everybody = dict.fromkeys((worker.url for worker in pool.list()), why)
    last: set[str] = set()
    for _ in range(20):
        attempts = begin(pool)
        last.add(run(pool, attempts, everybody))
        assert attempts.count == MAX_LOST
    assert last == {{"lost": "worker_error", "timeout": "worker_timeout", "error": "500"}[why]}
    assert open_breakers(pool) == []


def test_a_connection_that_cannot_be_made_speaks_for_itself() -> None:
    pool = make(2, failures=1)
    assert run(pool, begin(pool), dict.fromkeys(["http://w0:1", "http://w1:1"], "connect")) == "worker_error"
    assert open_breakers(pool) == ["http://w0:1", "http://w1:1"]


def test_where_there_is_no_other_worker_its_error_is_the_reply() -> None:
    pool = make(1, failures=1)
    assert run(pool, begin(pool), {"http://w0:1": "error"}) == "500"
    assert open_breakers(pool) == []


def test_what_cannot_be_repeated_is_sent_again_only_if_nothing_was_sent() -> None:
    pool = make(3)
    assert run(pool, begin(pool, repeatable=False), {"http://w0:1": "connect"}) == "http://w2:1"
    pool = make(3)
    assert run(pool, begin(pool, repeatable=False), {"http://w0:1": "lost"}) == "worker_error"
    pool = make(3)
    assert run(pool, begin(pool, repeatable=False), {"http://w0:1": "error"}) == "500"


def test_a_worker_whose_kept_connection_was_closed_is_asked_once_more_and_not_blamed() -> None:
    pool = make(1, failures=1)
    attempts = Attempts(pool, RetryConfig(), repeatable=True)
    (worker,) = pool.list()
    attempts.failed(worker.targets[0], "lost", "reset", kept=True)
    assert attempts.fresh
    assert attempts.exclude == {worker.id}
    attempts.no_worker_left(NoWorkerError("all tried"))
    assert attempts.exclude == frozenset()
    attempts.answered(worker)
    assert open_breakers(pool) == []


def test_it_is_asked_only_once_more() -> None:
    pool = make(1, failures=1)
    attempts = Attempts(pool, RetryConfig(), repeatable=True)
    (worker,) = pool.list()
    attempts.failed(worker.targets[0], "lost", "reset", kept=True)
    attempts.no_worker_left(NoWorkerError("all tried"))
    attempts.failed(worker.targets[0], "lost", "reset")
    with pytest.raises(UpstreamError):
        attempts.no_worker_left(NoWorkerError("all tried"))


def test_a_worker_that_closes_new_connections_is_blamed() -> None:
    """None of them can have been closed for being idle."""
    pool = make(2, failures=2)
    for _ in range(2):
        attempts = begin(pool)
        one, two = pool.list()
        attempts.failed(one.targets[0], "lost", "reset")
        attempts.answered(two)
    assert open_breakers(pool) == ["http://w0:1"]


def test_full_workers_are_waited_for_longer_each_time_and_blamed_for_nothing() -> None:
    pool = make(2, failures=1)
    attempts = begin(pool, first_wait=0.05, multiplier=1.5, longest_wait=0.1)
    one, two = pool.list()
    waits = [attempts.wait_after_busy(worker.targets[0], 503, None) for worker in (one, two, one, two, one)]
    assert waits[:4] == pytest.approx([0.05, 0.075, 0.1, 0.1])
    assert waits[4] is None, "the fifth is the last"
    assert open_breakers(pool) == []


def test_another_worker_is_preferred_to_a_full_one() -> None:
    pool = make(2)
    attempts = begin(pool)
    one, two = pool.list()
    attempts.wait_after_busy(one.targets[0], 429, None)
    assert attempts.exclude == {one.targets[0].id}
    attempts.wait_after_busy(two.targets[0], 429, None)
    assert attempts.exclude == frozenset(), "when all are full, each is as good as the other"


def test_retry_after_is_honoured_up_to_the_longest_wait() -> None:
    pool = make(1)
    (worker,) = pool.list()
    assert begin(pool).wait_after_busy(worker.targets[0], 503, 7.0) == 7.0
    assert begin(pool).wait_after_busy(worker.targets[0], 503, 3600.0) == 30.0
    assert begin(pool).wait_after_busy(worker.targets[0], 503, 0.0) == pytest.approx(0.05)
    pool = make(2)
    assert begin(pool).wait_after_busy(pool.list()[0].targets[0], 503, 7.0) == pytest.approx(0.05), (
        "there is another one"
    )


@given(st.floats(-1, 1))
def test_jitter_spreads_by_a_fifth(drawn: float) -> None:
    pool = make(1)
    attempts = Attempts(pool, RetryConfig(first_wait=1.0), repeatable=True, draw=lambda low, high: drawn)
    wait = attempts.wait_after_busy(pool.list()[0].targets[0], 503, None)
    assert wait is not None
    assert 0.8 <= wait <= 1.2


def test_the_last_word_names_all_that_was_tried() -> None:
    pool = make(2)
    attempts = begin(pool)
    one, two = pool.list()
    attempts.wait_after_busy(one.targets[0], 503, None)
    attempts.failed(two.targets[0], "timeout", "no reply within 3 s")
    error = attempts.exhausted()
    assert isinstance(error, UpstreamTimeoutError)
    assert error.details["tried"] == ["http://w0:1: status 503", "http://w1:1: no reply within 3 s"]
    attempts.failed(one.targets[0], "lost", "reset")
    assert isinstance(attempts.exhausted(), UpstreamError)
    attempts.failed(two.targets[0], "timeout", "no reply, and it is quarantined", gone=True)
    assert isinstance(attempts.exhausted(), UpstreamError), "no time limit was reached"
    with pytest.raises(UpstreamError):
        attempts.check(unwanted=True)


@given(st.lists(st.sampled_from(["connect", "lost", "timeout", "error", None]), min_size=1, max_size=8))
def test_whoever_fails_how_the_request_ends_and_nobody_is_blamed_unproven(kinds: list[Failure | None]) -> None:
    pool = make(len(kinds), failures=1)
    bad = {worker.url: kind for worker, kind in zip(pool.list(), kinds, strict=True) if kind is not None}
    attempts = begin(pool)
    asked: list[str] = []
    end = run(pool, attempts, bad, asked)
    answered = end.startswith("http")
    assert attempts.count <= len(kinds)
    blamed = set(open_breakers(pool))
    assert len(set(asked)) == len(asked), "each worker once"
    assert blamed == {url for url in asked if url in bad and (answered or bad[url] == "connect")}
    assert sum(worker.inflight for worker in pool.list()) == 0


def test_a_worker_that_was_too_slow_before_the_last_one_was_full_is_no_time_out() -> None:
    """The last thing that happened says what kind of error it is."""
    pool = make(3)
    one, two, _ = pool.list()
    attempts = begin(pool)
    attempts.failed(one.targets[0], "timeout", "no reply within 1 s")
    with pytest.raises(UpstreamTimeoutError):
        attempts.check(unwanted=True)
    assert attempts.wait_after_busy(two.targets[0], 503, None) is not None
    error = attempts.exhausted()
    assert isinstance(error, UpstreamError)
    assert not isinstance(error, UpstreamTimeoutError)
    assert "no reply within 1 s" in str(error)


def test_an_abort_that_ends_a_wait_is_no_failure_of_a_worker() -> None:
    pool = make(2)
    (one, _), attempts = pool.list(), begin(pool)
    assert attempts.wait_after_busy(one.targets[0], 503, None) is not None
    attempts.check()
    with pytest.raises(EndedInQueueError):
        attempts.check(unwanted=True)
    attempts.failed(one.targets[0], "lost", "broke off")
    with pytest.raises(UpstreamError, match="broke off"):
        attempts.check(unwanted=True)


def test_where_no_worker_is_left_the_reply_of_one_that_does_not_generate_is_the_answer() -> None:
    """And the worker is asked again what it is."""
    pool = make(2)
    attempts = begin(pool)
    one, other = pool.list()
    attempts.failed(one.targets[0], "lost", "lost")
    attempts.engine = other.engine = "sglang"
    assert not attempts.goes_on_without_engine(other.targets[0], 404)
    assert (one.stranger, other.stranger) == (False, True)


@pytest.mark.parametrize(("asked", "found"), [(None, None), (None, "vllm"), ("sglang", "vllm"), ("sglang", None)])
def test_a_worker_that_was_asked_in_the_words_of_another_engine_gives_no_reply(
    asked: str | None, found: str | None
) -> None:
    pool = make(1)
    attempts = begin(pool)
    (worker,) = pool.list()
    attempts.engine, worker.engine = asked, found
    with pytest.raises(NoWorkerError, match="it was not known which engine") as raised:
        attempts.goes_on_without_engine(worker.targets[0], 404)
    assert raised.value.headers == (("retry-after", "1"),)


@pytest.mark.parametrize("full", [False, True])
def test_where_workers_answered_nobody_is_sent_to_look_whether_they_are_up(full: bool) -> None:
    pool = make(1)
    attempts = begin(pool)
    (worker,) = pool.list()
    if full:
        attempts.wait_after_busy(worker.targets[0], 503, None)
    else:
        attempts.failed(worker.targets[0], "connect", "refused")
    assert ("GET /workers" in str(attempts.exhausted())) is not full


def make_ranks(count: int, ranks: int) -> WorkerPool:
    pool = make(count, failures=1)
    for worker in pool.list():
        pool.introduced(worker, ProbeResult(ranks=ranks))
    return pool


def left(pool: WorkerPool, attempts: Attempts, rank: int | None = None) -> set[str]:
    """Return the targets that the next attempt may go to."""
    return {target.name for target in pool._candidates(attempts.exclude, rank)[0]}


def test_a_full_rank_says_nothing_of_the_other_ranks() -> None:
    pool = make_ranks(1, 3)
    attempts = begin(pool)
    for rank in (1, 2):
        attempts.wait_after_busy(pool.list()[0].targets[rank], 429, None)
    assert left(pool, attempts) == {"http://w0:1"}
    assert attempts.wait_after_busy(pool.list()[0].targets[0], 503, 7.0) == 7.0, "all are full now"
    assert len(left(pool, attempts)) == 3


def test_other_ranks_of_a_worker_that_was_late_are_tried_behind_other_workers() -> None:
    pool = make_ranks(2, 2)
    (one, two), attempts = pool.list(), begin(pool)
    attempts.failed(one.targets[1], "timeout", "late")
    assert left(pool, attempts) == {"http://w1:1", "http://w1:1@1"}
    attempts.failed(two.targets[0], "lost", "reset")
    assert left(pool, attempts) == {"http://w0:1"}


@pytest.mark.parametrize("why", ["connect", "lost", "error", "no_engine"])
def test_what_concerns_the_process_concerns_all_its_ranks(why: Failure) -> None:
    pool = make_ranks(2, 2)
    attempts = begin(pool)
    attempts.failed(pool.list()[0].targets[1], why, why)
    assert left(pool, attempts) == {"http://w1:1", "http://w1:1@1"}


def test_a_request_for_a_rank_keeps_to_it() -> None:
    """Also where no other worker has it: then there is nowhere else to go."""
    pool = make_ranks(2, 3)
    pool.introduced(pool.list()[1], ProbeResult(ranks=1))
    attempts = Attempts(pool, RetryConfig(), repeatable=True, rank=2)
    target = pool.list()[0].targets[2]
    assert not attempts.goes_on_after_error(target, 500)
    assert attempts.wait_after_busy(target, 503, 7.0) == 7.0
    assert left(pool, attempts, 2) == {"http://w0:1@2"}


def test_a_target_that_may_be_at_fault_as_well_is_asked_again_if_there_is_no_other() -> None:
    pool = make(3, failures=1)
    one, two, three = pool.list()
    attempts = begin(pool)
    attempts.failed(one.targets[0], "lost", "reset", avoided=two.targets[0])
    with pool.lease(QUERY, attempts.exclude) as lease:
        assert lease.worker is three
    attempts.failed(three.targets[0], "lost", "reset")
    with pool.lease(QUERY, attempts.exclude) as lease:
        assert lease.worker is two
        attempts.answered(two)
    assert open_breakers(pool) == [one.url, three.url]
