"""The decisions of cache_aware, with their reasons."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from typing import Any

import msgspec
import pytest

from benchmarks.routing.simulation import LOADS, PlainCacheAware, Simulation
from router.engines.form.kv_events import AllBlocksCleared, BlockStored, KvEvent
from router.kv_cache.index import KvIndex
from router.policies import cache_aware
from router.policies.cache_aware import CacheAware, CacheAwareParameters
from router.prefix_tree.snapshot import SnapshotError
from router.workers.policy import ENOUGH_CHARACTERS, ENOUGH_IDS, RouteQuery
from router.workers.worker import Target, Worker
from tests.router.prefix_tree.recount import check
from tests.support.usual import usual

SYSTEM = "You are a careful assistant. " * 40


def fleet(*inflight: int) -> tuple[Target, ...]:
    made = []
    for number, count in enumerate(inflight):
        made.append(Target(Worker(f"http://w{number}:1")))
        made[-1].inflight = count
    return tuple(made)


def query(text: str, kind: str = "text") -> RouteQuery:
    if kind == "text":
        return RouteQuery(text=text)
    ids = [ord(character) for character in text]
    return RouteQuery(text="of no use", token_ids=ids if kind == "list" else memoryview(array("i", ids)))


KINDS = pytest.mark.parametrize("kind", ["text", "list", "view"])


@KINDS
def test_the_next_turn_stays_on_its_worker(kind: str) -> None:
    """It stays even if the tree knows little of it: the unknown reply is longer than everything else."""
    policy, workers = CacheAware(), fleet(0, 0, 0, 0)
    prompt = "Please write a long story.      "
    worker, reason = policy.select(workers, query(prompt, kind))
    assert reason == "least_loaded"
    worker.inflight = 3  # from other conversations
    for _ in range(5):
        prompt += "and then " * 50 + "What comes next?"
        assert policy.select(workers, query(prompt, kind)) == (worker, "continued")


@pytest.mark.parametrize(("field", "told_as"), [("salt", "cache_salt"), ("adapter", "lora_name")])
@pytest.mark.parametrize("told", [False, True])
@KINDS
def test_a_hit_that_the_engine_refuses_is_not_promised(kind: str, told: bool, field: str, told_as: str) -> None:
    """A conversation whose salt or adapter changes finds nothing at its worker, and is as good anywhere."""
    index = KvIndex()
    policy, targets = CacheAware(index=index if told and kind != "text" else None), fleet(0, 0, 0, 0)
    prompt = "A long conversation, of which one worker has computed every turn. " * 8
    first = msgspec.structs.replace(query(prompt, kind), **{field: "v1:1"})
    at = policy.select(targets, first).target
    if told and kind != "text":
        ids = [ord(one) for one in prompt]
        hashes = list(range(1, len(ids) // 2 + 1))
        index.reset(at.name, complete=True)  # so that the tree does not count
        index.apply(at.name, [BlockStored(hashes, None, ids[: 2 * len(hashes)], 2, **{told_as: "v1:1"})])
    at.inflight = 3
    later = {name: query(prompt + "And then?", kind) for name in ("", "v1:2", "v1:1")}
    for name, asked in later.items():
        chosen = policy.select(targets, msgspec.structs.replace(asked, **{field: name}))
        assert (chosen.target is at) == (name == "v1:1"), (name, chosen)


def test_a_salt_and_an_adapter_are_no_other_pair_of_both() -> None:
    policy, targets = CacheAware(), fleet(0, 0, 0, 0)
    asked = query("A prompt of which each of them has computed its own. " * 8)
    pairs = (("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"))
    reasons = [
        policy.select(targets, msgspec.structs.replace(asked, salt=salt, adapter=adapter)).reason
        for salt, adapter in pairs * 2
    ]
    assert reasons == ["least_loaded"] * 4 + ["cached"] * 4


def test_conversations_stay_on_their_rank_of_a_worker() -> None:
    """Whether the tree or the worker's own events say which rank has them."""
    worker, index = Worker("http://w:1"), KvIndex()
    worker.split(4)
    index.separate(worker.url, separate=True)
    for policy in (CacheAware(), CacheAware(index=index)):
        at: dict[int, Target] = {}
        for turn in range(4):
            for number in range(8):
                asked = query(f"Conversation {number * 7919}. " * 20 + "And then? " * turn, "view")
                target = policy.select(worker.targets, asked).target
                assert at.setdefault(number, target) is target
        assert set(at.values()) == set(worker.targets)
    text = "A prompt that only the events know. " * 4
    for rank in range(4):
        index.reset(worker.url, rank, complete=True)
    index.apply(worker.url, stored(text), 3)
    assert policy.select(worker.targets, query(text, "view")) == (worker.targets[3], "cached")


@KINDS
def test_a_prompt_goes_where_enough_of_it_is_cached(kind: str) -> None:
    policy, workers = CacheAware(), fleet(0, 0, 0, 0)
    worker = policy.select(workers, query("a" * 400 + "b" * 200, kind)).target
    worker.inflight = 1
    assert policy.select(workers, query("a" * 400 + "c" * 900, kind)) == (worker, "cached")
    assert policy.select(workers, query("a" * 400 + "d" * 1000, kind)).reason == "least_loaded"


@pytest.mark.parametrize(("matched", "reason"), [(50, "least_loaded"), (51, "cached")])
def test_the_threshold_is_a_parameter(matched: int, reason: str) -> None:
    policy, workers = CacheAware(CacheAwareParameters(threshold=0.5)), fleet(0, 0)
    policy.select(workers, query("a" * 60 + "b" * 40))
    assert policy.select(workers, query("a" * matched + "c" * (100 - matched))).reason == reason


def test_a_prefix_of_more_than_half_of_the_fleet_is_common() -> None:
    """It is common even if one worker has a few more characters of it by chance."""
    policy, workers = CacheAware(), fleet(0, 0, 0, 0)
    for worker in workers[:3]:
        policy.select((worker,), query(SYSTEM + f"{worker.worker.id} asks something"))
    for worker in workers[:3]:
        worker.inflight = 1
    chance = workers[0].worker.id[:-2]
    assert policy.select(workers, query(SYSTEM + f"{chance} something else")) == (workers[3], "least_loaded")


def test_the_less_loaded_of_two_holders_is_chosen() -> None:
    policy, workers = CacheAware(), fleet(2, 1, 0, 0)
    for worker in workers[:2]:
        policy.select((worker,), query(SYSTEM))
    assert policy.select(workers, query(SYSTEM)) == (workers[1], "cached")


@pytest.mark.parametrize(
    ("inflight", "reason"),
    [((70, 5), "imbalance"), ((69, 5), "cached"), ((209, 140), "cached"), ((211, 140), "imbalance")],
)
def test_imbalance_is_a_difference_by_number_and_by_share(inflight: tuple[int, int], reason: str) -> None:
    policy, workers = CacheAware(), fleet(*inflight)
    policy.select((workers[0],), query(SYSTEM))
    for number in range(200):  # so that no worker has too much recent work
        policy.select((workers[1],), query(f"{number} other words " * 60))
    assert policy.select(workers, query(SYSTEM)).reason == reason


def test_a_worker_with_too_much_recent_work_gets_no_more_for_its_cache() -> None:
    """In a cold fleet with one system prompt, the first worker does not keep all requests."""
    policy, workers = CacheAware(), fleet(0, 0, 0, 0)
    for number in range(64):
        policy.select(workers, query(SYSTEM + f"{number} {number * 7919} is my number")).target.inflight += 1
    loads = sorted(worker.inflight for worker in workers)
    assert loads[-1] <= 1.25 * 16, loads


def test_a_request_of_only_the_system_prompt_is_no_conversation_of_all() -> None:
    """For example a warm-up request. Nothing is in flight, so only recent work decides."""
    policy, workers, served = CacheAware(), fleet(0, 0, 0, 0), Counter[str]()
    policy.select(workers, query(SYSTEM))
    for number in range(80):
        served[policy.select(workers, query(SYSTEM + f"{number} {number * 7919} is my number")).target.name] += 1
    assert max(served.values()) <= 1.25 * 20, served


def test_forks_of_a_conversation_stay_on_its_worker() -> None:
    policy, workers = CacheAware(), fleet(0, 0, 0, 0)
    prompt = "Think of something, and tell me what it is. " * 10
    first = policy.select(workers, query(prompt)).target
    told = [policy.select(workers, query(prompt + f"{number}!" * 50)) for number in range(2)]
    assert [decision.target for decision in told] == [first] * 2
    assert [decision.reason for decision in told] == ["continued", "cached"]


def test_forks_stay_although_all_workers_have_most_of_their_prefix() -> None:
    policy, workers = CacheAware(), fleet(0, 0, 0, 0)
    system = "".join(random.Random(1).choices("abcdefgh ", k=16_000))
    for number in range(800):
        policy.select((workers[number % 4],), query(f"{system}{number * 7919} is my number. "))
    prompt = system + "Think of something, and tell me what it is. " * 5
    first = policy.select(workers, query(prompt)).target
    first.inflight = 3
    told = [policy.select(workers, query(prompt + f"{number}!" * 50)) for number in range(2)]
    assert told == [(first, "continued"), (first, "cached")]


def test_a_group_that_returns_at_once_is_no_imbalance() -> None:
    """The whole group goes to its worker, although the others have nothing in flight."""
    policy, workers, kept = CacheAware(), fleet(0, 0, 0, 0), 0
    talks = [(group, sample) for group in range(5) for sample in range(16)]
    at: dict[tuple[int, int], Worker] = {}
    for turn in range(2):
        for group, sample in talks:
            asked = query(f"{SYSTEM} Problem {group}: {group * 7919}? " + f"It is {sample * 7919}. Sure? " * turn)
            worker = policy.select(workers, asked).target
            kept += at.setdefault((group, sample), worker) is worker
            worker.inflight += 1
            if not turn:
                policy.replied(worker, asked, f"It is {sample * 7919}.")
        for worker in workers:
            worker.inflight = 0
    assert kept - len(talks) >= 0.95 * len(talks)


def test_a_lone_conversation_never_spills() -> None:
    """It is all of the recent work, but competes with nothing."""
    policy, workers, prompt = CacheAware(), fleet(0, 0, 0, 0), SYSTEM
    first = policy.select(workers, query(prompt)).target
    for _ in range(100):
        prompt += "more " * 20
        assert policy.select(workers, query(prompt)) == (first, "continued")


def test_a_missing_holder_is_replaced_and_the_replacement_is_learnt() -> None:
    policy, workers = CacheAware(), fleet(0, 0, 0)
    prompt = "To be continued. " * 10
    first = policy.select(workers, query(prompt)).target
    others = tuple(worker for worker in workers if worker is not first)
    second, reason = policy.select(others, query(prompt + "a"))
    assert reason == "least_loaded"
    assert policy.select(others, query(prompt + "a, b")) == (second, "continued")
    policy.forget(second)
    assert policy.select(workers, query(prompt + "a, b, c")) == (first, "cached")


@pytest.mark.parametrize("kind", ["text", "view"])
def test_a_large_worker_is_forgotten_in_steps_and_returns_empty(kind: str) -> None:
    policy, workers = CacheAware(), fleet(0, 0, 0)
    tree: Any = policy.texts if kind == "text" else policy.ids
    prompts = [f"{number} " * 400 for number in range(100)]
    for prompt in prompts:
        policy.select(workers[:1], query(prompt, kind))
    policy.forget(workers[0])
    left = tree.tenant_size(workers[0].name)
    assert left > 100_000
    assert policy.select(workers, query(prompts[-1], kind)).reason == "least_loaded", "what is left does not count"
    for number in range(3):
        policy.select(workers[1:], query(f"another {number}", kind))
    assert 0 < tree.tenant_size(workers[0].name) < left
    policy.select(workers[:1], query("it is back", kind))
    assert tree.tenant_size(workers[0].name) == len("it is back")
    check(tree)


@pytest.mark.parametrize("kind", ["text", "view"])
def test_it_says_whether_there_is_more_to_trim(kind: str) -> None:
    policy = CacheAware(CacheAwareParameters(max_tree_size=100))
    for number in range(10):
        policy.select(fleet(0, 0), query(f"{number} " * 50, kind))
    assert policy.trim(100)
    assert not policy.trim(10_000)


def test_without_a_prompt_the_least_loaded_is_chosen_in_turn() -> None:
    policy, workers = CacheAware(), fleet(0, 1, 0)
    chosen = [policy.select(workers, RouteQuery()) for _ in range(4)]
    assert {decision.reason for decision in chosen} == {"no_prompt"}
    assert workers[1] not in {decision.target for decision in chosen}


def test_recent_work_decides_among_equally_loaded_workers() -> None:
    policy, workers = CacheAware(), fleet(0, 0, 0)
    lengths = [300, 20, 100, 30, 25, 120]
    given = dict.fromkeys(workers, 0)
    for number, length in enumerate(lengths):
        text = str(number) * length
        worker = policy.select(workers, query(text)).target
        assert given[worker] == min(given.values())
        given[worker] += length


# -- later turns -------------------------------------------------------------------------------------------------------


GENERATION = "<|assistant|><think></think>"


class Talk:
    """A conversation whose history drops the generation prompt and strips the replies."""

    def __init__(self, number: int, system: str, *, question: str = "What of {}? ") -> None:
        self.history = system + question.replace("{}", str(number))
        self.at: Worker | None = None
        self.later = self.kept = 0

    def turn(
        self, policy: CacheAware, workers: tuple[Target, ...], kind: str, said: str, *, heard: bool = False
    ) -> str:
        asked = query(self.history + GENERATION, kind)
        worker, reason = policy.select(workers, asked)
        if heard:
            text = f" {said} "
            policy.replied(worker, asked, text if kind == "text" else [ord(one) for one in text])
        if self.at is not None:
            self.later += 1
            self.kept += worker is self.at
        self.at = worker
        self.history += f"{said} And then? "
        return reason


QUESTIONS = ["What of {}? ", "Tell me all there is to be known about the number {}. " * 4]


@KINDS
@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("question", usual(QUESTIONS, QUESTIONS[0]))
def test_a_later_turn_stays_although_history_drops_the_generation_prompt(kind: str, heard: bool, question: str) -> None:
    """The system prompt of 16,000 units dwarfs the conversation, and nothing is in flight."""
    system = "".join(random.Random(1).choices("abcdefgh ", k=16_000))
    policy, workers = CacheAware(), fleet(0, 0, 0, 0)
    talks = [Talk(number, system, question=question) for number in range(100, 164)]
    served = Counter[str]()
    for turn in range(4):
        for number, talk in enumerate(talks):
            talk.turn(policy, workers, kind, f"It is {number * 7919 % 997} of {turn}. " * 4, heard=heard)
            assert talk.at is not None
            served[talk.at.name] += 1
    assert sum(talk.kept for talk in talks) >= 0.95 * sum(talk.later for talk in talks)
    assert max(served.values()) <= 1.15 * served.total() / 4, served


def test_a_similar_question_is_no_later_turn() -> None:
    """It also ends with a generation prompt, but leaves the other prompt before that."""
    policy, workers = CacheAware(), fleet(0, 0, 0, 0)
    system = "Answer the question. " * 200
    for worker in workers:
        policy.select((worker,), query(system))
    reasons = {
        policy.select(workers, query(f"{system}What of {number}?{GENERATION}")).reason for number in range(100, 160)
    }
    assert reasons == {"least_loaded"}


@KINDS
def test_a_stripped_reply_is_continued(kind: str) -> None:
    policy, workers = CacheAware(), fleet(0, 0, 0, 0)
    prompt = SYSTEM + "Tell me a story. "
    worker = policy.select(workers, query(prompt, kind)).target
    said = "  Once upon a time, there was a king. \n"
    policy.replied(worker, query(prompt, kind), said if kind == "text" else [ord(one) for one in said])
    worker.inflight = 3
    assert policy.select(workers, query(prompt + said.strip() + " Go on, please.", kind)) == (worker, "continued")


@KINDS
def test_replies_tell_samples_of_one_prompt_apart(kind: str) -> None:
    """Groups of 16, some of them spread because too much was in flight, return all at once."""
    generator = random.Random(3)
    policy, workers = CacheAware(), fleet(0, 0, 0, 0)
    later, kept, served, spread = 0, 0, Counter[str](), 0
    for group in range(12):
        prompt = SYSTEM + f"Problem {group * 7919}: how many are there? "
        at: list[tuple[Worker, str]] = []
        for _ in range(16):
            asked = query(prompt, kind)
            worker = policy.select(workers, asked).target
            said = "".join(generator.choices("abcdefgh ", k=generator.randrange(3, 900)))
            policy.replied(worker, asked, said if kind == "text" else [ord(one) for one in said])
            at.append((worker, prompt + said + " Are you sure? "))
            worker.inflight += 1
        for worker, _ in at:
            worker.inflight -= 1
        spread += len({worker.name for worker, _ in at}) > 1
        generator.shuffle(at)
        for worker, text in at:
            later += 1
            kept += policy.select(workers, query(text, kind)).target is worker
            served[worker.name] += 1
    assert kept >= 0.95 * later
    assert max(served.values()) <= 1.15 * served.total() / 4, served
    assert spread, "else their first prompt would tell where they are"


def test_a_group_without_known_replies_stays_together() -> None:
    """Sixteen conversations stand where one prompt ended; each can be continued once, although history drops its end."""
    policy, workers = CacheAware(), fleet(0, 0, 0, 0)
    for number in range(800):
        policy.select((workers[number % 4],), query(f"{SYSTEM}{number * 7919} is my number. "))
    prompt = SYSTEM + "How many are there? "
    first = policy.select(workers, query(prompt + GENERATION)).target
    for _ in range(15):
        assert policy.select(workers, query(prompt + GENERATION)).target is first
    first.inflight = 3
    longer = [prompt + f"{number * 7919 % 997} are there. " + "And more? " * 400 + GENERATION for number in range(17)]
    told = [policy.select(workers, query(text)) for text in longer]
    assert told[:16] == [(first, "continued")] * 16
    assert told[16].reason != "continued"


def test_a_short_or_missing_reply_does_no_harm() -> None:
    policy, workers = CacheAware(), fleet(0, 0)
    asked = query("a question", "list")
    worker = policy.select(workers, asked).target
    policy.replied(worker, asked, [])
    policy.replied(worker, asked, "a text, to ids")
    policy.replied(worker, RouteQuery(), [1])
    policy.replied(worker, RouteQuery(text="a"), [1])
    assert (policy.ids.size, policy.texts.size) == (len("a question"), 0)


def test_a_reply_of_a_departed_worker_is_not_remembered() -> None:
    policy, workers = CacheAware(), fleet(0, 0)
    for number in range(40):
        policy.select(workers[:1], query(f"{number} " * 400))
    policy.forget(workers[0])
    before = policy.texts.size
    policy.replied(workers[0], query("a question"), "a reply")
    assert policy.texts.size == before > 0


def test_only_the_start_of_a_reply_is_remembered() -> None:
    policy, workers = CacheAware(), fleet(0, 0)
    for kind in ("text", "list"):
        policy.replied(workers[0], query("?", kind), "a" * 9_000 if kind == "text" else [7] * 9_000)
    assert (policy.texts.size, policy.ids.size) == (1 + ENOUGH_CHARACTERS, 1 + ENOUGH_IDS)


@pytest.mark.parametrize("ids", [[2**31, 2**32 - 1, 5], array("I", [2**31, 5]), memoryview(array("I", [2**32 - 1]))])
def test_all_32_bit_ids_are_accepted(ids: Any) -> None:
    policy, workers = CacheAware(), fleet(0, 0, 0)
    worker = policy.select(workers, RouteQuery(token_ids=ids)).target
    worker.inflight = 1
    assert policy.select(workers, RouteQuery(token_ids=[*ids, 1, 2])) == (worker, "continued")


# -- tenants -----------------------------------------------------------------------------------------------------------


@KINDS
def test_a_decision_reveals_nothing_of_another_tenants_prompts(kind: str) -> None:
    """The reason and the worker are those of a router to which no other tenant has sent anything."""
    alone, shared = CacheAware(), CacheAware()
    workers = fleet(0, 0, 0, 0)
    secret = "The launch code is 4711, and nobody must know. " * 10
    mine = msgspec.structs.replace(query(secret, kind), tenant="mine")
    for _ in range(3):
        chosen = shared.select(workers, mine).target
        shared.replied(chosen, mine, "Yes." if kind == "text" else [1, 2, 3])
    for text in (secret, secret + "Yes. And?", secret[:100]):
        asked = msgspec.structs.replace(query(text, kind), tenant="theirs")
        chosen.inflight = 1
        assert shared.select(workers, asked).reason == alone.select(workers, asked).reason
        assert shared.select(workers, asked).reason == alone.select(workers, asked).reason


@KINDS
def test_a_tenants_own_conversations_stay(kind: str) -> None:
    policy, workers = CacheAware(), fleet(0, 0, 0, 0)
    for tenant in ("one", "another"):
        asked = msgspec.structs.replace(query(SYSTEM + "What is this? ", kind), tenant=tenant)
        worker = policy.select(workers, asked).target
        worker.inflight += 1
        longer = msgspec.structs.replace(query(SYSTEM + "What is this? It is that. And that? ", kind), tenant=tenant)
        assert policy.select(workers, longer) == (worker, "continued")


def test_kv_events_of_other_tenants_decide_nothing() -> None:
    index = KvIndex()
    policy, workers = CacheAware(index=index), fleet(0, 0, 0)
    for worker in workers:
        index.reset(worker.name, complete=True)
    prompt = "The launch code is 4711. " * 20
    index.apply(workers[1].name, stored(prompt))
    asked = msgspec.structs.replace(query(prompt, "view"), tenant="theirs")
    assert policy.select(workers, asked).reason == "least_loaded"
    assert policy.select(workers, query(prompt, "view")) == (workers[1], "cached")


# -- snapshots ---------------------------------------------------------------------------------------------------------


@KINDS
def test_a_snapshot_survives_a_restart(kind: str) -> None:
    before, workers = CacheAware(), fleet(0, 0, 0, 0)
    prompt = "Remember this, whatever happens. "
    worker = before.select(workers, query(prompt, kind)).target
    after = CacheAware()
    after.load(before.dump())
    assert after.dump() == before.dump()
    worker.inflight = 2
    assert after.select(workers, query(prompt + "Now?", kind)).target is worker


def _without_the_end_of_its_ids(data: bytes) -> bytes:
    texts, ids = msgspec.msgpack.decode(data)
    return msgspec.msgpack.encode((texts, ids[:-1]))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data[:60] + b"?" + data[61:],
        _without_the_end_of_its_ids,
    ],
)
def test_a_damaged_snapshot_is_refused_as_a_whole(spoil: Any) -> None:
    before = CacheAware()
    before.select(fleet(0, 0), query("a prompt " * 20))
    before.select(fleet(0, 0), query("a prompt " * 20, "list"))
    after = CacheAware()
    with pytest.raises(SnapshotError):
        after.load(spoil(before.dump()))
    assert after.dump() == CacheAware().dump()


@KINDS
def test_a_restart_keeps_every_conversation_under_a_long_system_prompt(kind: str) -> None:
    """Sixteen conversations under 18,000 characters that all workers have."""
    system = "".join(random.Random(2).choices("abcdefgh ", k=18_000))
    before, workers = CacheAware(), fleet(0, 0, 0, 0)
    talks = [Talk(number, system) for number in range(16)]
    for turn in range(2):
        for number, talk in enumerate(talks):
            talk.turn(before, workers, kind, f"It is {number} of {turn}.", heard=True)
    after = CacheAware()
    after.load(before.dump())
    kept = [talk.kept for talk in talks]
    reasons = [talk.turn(after, workers, kind, "Yes.") for talk in talks]
    assert [talk.kept for talk in talks] == [one + 1 for one in kept]
    assert set(reasons) == {"continued"}


def test_a_copy_taken_in_steps_is_consistent_while_the_policy_goes_on() -> None:
    """Between the steps, prompts arrive, workers leave, and the policy is trimmed."""
    generator = random.Random(4)
    policy, workers = CacheAware(), fleet(0, 0, 0, 0)

    def something() -> None:
        text = SYSTEM[: generator.randrange(1, 60)] + "".join(generator.choices("ab ", k=generator.randrange(40)))
        policy.select(workers, query(text, generator.choice(("text", "list"))))

    for _ in range(50):
        for _ in range(20):
            something()
        copy = policy.copy()
        while copy.step(3):
            something()
            if not generator.randrange(20):
                policy.forget(generator.choice(workers))
            if not generator.randrange(20):
                policy.texts.evict_all(policy.texts.size // 2)
        after = CacheAware()
        after.load(copy.encode())
        check(after.texts)
        check(after.ids)


# -- KV events ---------------------------------------------------------------------------------------------------------


def stored(text: str, start: int = 1) -> list[KvEvent]:
    """Return a worker's event for a prompt, in blocks of 16."""
    ids = [ord(character) for character in text]
    hashes = [start + number for number in range(len(ids) // 16)]
    return [BlockStored(hashes, None, ids[: 16 * len(hashes)], 16, None)]


def test_kv_events_count_more_than_the_tree() -> None:
    index = KvIndex()
    policy, workers = CacheAware(index=index), fleet(0, 0, 0)
    for worker in workers:
        index.reset(worker.name, complete=True)
    prompt = "How was that again? " * 20
    first = policy.select(workers, query(prompt, "view")).target
    other = next(worker for worker in workers if worker is not first)
    index.apply(other.name, stored(prompt))
    other.inflight = 2
    assert policy.select(workers, query(prompt + "And now, tell me more?", "view")).target is other
    index.apply(other.name, [AllBlocksCleared()])
    assert policy.select(workers, query(prompt + "And now, tell me more?", "view")).reason == "least_loaded"


def test_the_tree_counts_for_workers_without_kv_events() -> None:
    index = KvIndex()
    policy, workers = CacheAware(index=index), fleet(0, 0, 0)
    index.reset(workers[0].name, complete=True)
    prompt = "How was that again? " * 20
    policy.select(workers[1:2], query(prompt, "view"))
    workers[1].inflight = 2
    assert policy.select(workers, query(prompt + "And now, tell me more?", "view")) == (workers[1], "continued")
    index.apply(workers[0].name, stored(prompt[:48]))
    prompt += "And now, tell me more?"
    assert policy.select(workers, query(prompt + " That is enough, I think.", "view")) == (workers[1], "continued")
    policy.forget(workers[0])
    assert not index.tracked(workers[0].name)


def test_where_no_worker_reports_the_tree_decides_as_without_an_index() -> None:
    """What all of them have counts for none of them."""
    with_index, without = CacheAware(index=KvIndex()), CacheAware()
    workers = fleet(0, 0, 0, 0)
    for number, question in enumerate(("Where is it?", "Who is it?", "What is it?", "Why is it so?", "Which one?")):
        for policy in (with_index, without):
            policy.select(workers[number % 4 : number % 4 + 1], query(SYSTEM + question * 3, "view"))
        asked = query(SYSTEM + question[:3] + f"{number}, however, is another question", "view")
        assert with_index.select(workers, asked) == without.select(workers, asked)


# -- the run as a whole ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inflight", usual([16, 64, 128], 64))
def test_a_run_under_one_system_prompt_neither_collapses_nor_scatters(inflight: int) -> None:
    outcome = Simulation(CacheAware(), inflight).run(3000)
    assert outcome.busiest <= 1.25
    assert outcome.kept >= 0.9


@pytest.mark.parametrize(("load", "inflight"), usual([("edited", 64), ("groups", 256)]))
def test_edited_histories_and_groups_of_samples_stay_on_their_worker(load: str, inflight: int) -> None:
    outcome = Simulation(CacheAware(), inflight, kind=LOADS[load]).run(3000)
    assert outcome.kept >= 0.95
    assert outcome.busiest <= 1.15


def test_a_new_conversation_goes_to_the_least_worked_of_those_with_about_the_least_in_flight() -> None:
    policy, workers = CacheAware(), fleet(0, 0, 0)
    policy.select(workers[:1], query("A long first prompt. " * 100))
    for worker, load in zip(workers, (6, 8, 9), strict=True):
        worker.inflight = load
    assert policy.select(workers, query("Something else.")).target is workers[1]
    workers[0].inflight = 5
    assert policy.select(workers, query("And something new.")).target is workers[0]


@pytest.mark.parametrize("seed", usual(range(1, 9), 1))
def test_few_groups_for_many_ranks_are_spread_by_their_work(seed: int) -> None:
    """Eight ranks, and eight groups of sixteen in flight: a group is as much as a rank is to have."""
    outcome = Simulation(CacheAware(), 128, kind=LOADS["groups"], workers=8, seed=seed).run(2000)
    assert outcome.kept >= 0.95
    assert outcome.busiest <= 1.15


@pytest.mark.slow
def test_the_simulation_detects_a_collapse() -> None:
    """The plain rule of the longest prefix collapses in it."""
    assert Simulation(PlainCacheAware(), 64).run(3000).busiest > 1.5


def test_the_bound_of_a_run_leaves_room_for_long_requests() -> None:
    assert cache_aware._BOUND < 1.25
