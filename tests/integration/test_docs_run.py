"""The documents do what they say: every block of README.md and docs/ is run, and outputs are compared.

A block that cannot run here says why in a comment in front of it, in the form that `doc_pages` describes.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from prometheus_client import generate_latest
from tokenizers import Tokenizer

from middleware_hub.client import Client
from router.app import create_app
from router.config import RADIX_TREE_MIDDLEWARE, AbortConfig
from router.flags import config_from_args, parser
from router.policies import POLICIES
from router.workers.policy import RouteQuery
from router.workers.worker import Target, Worker
from tests.integration.doc_pages import COMMANDS, ROOT, pieces, same
from tests.integration.doc_runner import Reading, reading
from tests.support.client import call
from tests.support.usual import usual
from tests.trainers import trainers
from worker.models.ngram import shipped_image_tokenizer, shipped_tokenizer

PIECES = {piece.name: piece for piece in pieces()}
# The model often ends a line, so a conversation has turns; the seed makes it the same conversation each time.
SAMPLING = {"max_new_tokens": 200, "temperature": 1.0, "stop": ["\n"], "sampling_seed": 129}
QUESTION = "Question: Which of the two is longer, the Elbe or the Rhine?\n"


@pytest.fixture
def read(tmp_path: Path) -> Iterator[Callable[..., Reading]]:
    """Return `read(name)`, which runs all blocks of a page, or of a section of docs/trainers.md."""
    with ExitStack() as stack:

        def run(name: str, **options: Any) -> Reading:
            reader = stack.enter_context(reading(tmp_path, **options))
            stack.enter_context(trainers.installed())
            reader.read(PIECES[name])
            return reader

        yield run


PAGES = [name for name in PIECES if not name.startswith("docs/trainers.md#")]
LONG = {
    "README.md",
    *(f"docs/{name}.md" for name in "agents command-line images memory operations quickstart user-guide".split()),
}
"""Pages that start programs, or many SDKs. `make test` has the others."""


@pytest.mark.parametrize("name", usual(PAGES, *{*PAGES} - LONG))
def test_what_a_page_says_happens(read: Callable[..., Reading], name: str) -> None:
    read(name, tokenizer=shipped_image_tokenizer() if name == "docs/images.md" else None)


def test_the_agents_that_see_are_exact(read: Callable[..., Reading]) -> None:
    """The worker read each picture where the trajectory says, and its ids are those of the trajectory."""
    reader = read("docs/images.md", tokenizer=shipped_image_tokenizer())
    names = reader.namespace
    for see in (names["see_with_openai"], names["see_with_anthropic"]):
        reader.forget()
        session = names["call"]("/sessions", {})
        see(session, [names["SCREEN"]] * 3)
        (found,) = names["call"](f"/sessions/{session['session_id']}/finalize", {})["trajectories"]
        log = [record for worker in reader.workers for record in worker.log]
        whole = found["prompt_ids"] + found["response_ids"]
        assert any([*record.input_ids, *record.output_ids] == whole for record in log)
        assert max(len(record.images) for record in log) == len(found["multi_modal_data"]["images"]) == 3


@pytest.mark.parametrize(
    "name", ["docs/trainers.md#what-all-have-in-common", "docs/trainers.md#how-much-is-lost-without-it"]
)
def test_what_a_section_says_happens(read: Callable[..., Reading], name: str) -> None:
    read(name)


# -- the functions return what was sampled -----------------------------------------------------------------------------


def truth(reader: Reading, tokens: list[int]) -> tuple[list[int], list[float]]:
    """Return mask and logprobs of a conversation from the workers' logs. A worker must have read and sampled all of it.

    A turn has the tokens of its reply as far as the next prompt has them: the prompt may not spell a stop string.
    """
    log = [record for worker in reader.workers for record in worker.log]
    assert not any(record.from_text for record in log)
    assert any(record.input_ids + record.output_ids == tokens for record in log), tokens
    mask, logprobs = [0] * len(tokens), [0.0] * len(tokens)
    turns: dict[int, list[float]] = {}
    for record in log:
        begin = len(record.input_ids)
        if begin < len(tokens) and record.input_ids == tokens[:begin]:
            pairs = zip(record.output_ids, tokens[begin:], strict=False)
            same_ids = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            # Of several samples of one prompt, take the one that continues as the conversation does.
            turns[begin] = max(turns.get(begin, []), record.logprobs[:same_ids], key=len)
    for begin, values in turns.items():
        mask[begin : begin + len(values)] = [1] * len(values)
        logprobs[begin : begin + len(values)] = values
    return mask, logprobs


def check(
    reader: Reading,
    prompt: list[int],
    response: list[int],
    mask: list[int],
    logprobs: list[float],
    *,
    alone: bool = True,
) -> None:
    """Check that a sample is a conversation of the workers, begins with a sampled token, and has everything they sampled."""
    true_mask, true_logprobs = truth(reader, prompt + response)
    if alone:
        assert sum(true_mask) == sum(len(record.output_ids) for worker in reader.workers for record in worker.log)
    cut = true_mask.index(1)
    assert cut == len(prompt)
    assert mask == true_mask[cut:]
    assert logprobs == true_logprobs[cut:]


def environment(observations: int) -> Callable[[str], Any]:
    """Return an `act` that gives this many observations, then None."""
    left = iter(range(observations))

    async def act(_turn: str, _sample: Any = None) -> str | None:
        return "\nObservation: about 1,094 km\n" if next(left, None) is not None else None

    return act


RETURN = AbortConfig(policy="return")


@pytest.mark.parametrize("name", ["slime", "miles"])
def test_the_function_of_a_trainers_section_is_exact(read: Callable[..., Reading], name: str) -> None:
    reader = read(f"docs/trainers.md#{name}", abort=RETURN)
    reader.forget()
    trainer = trainers.Trainer(name)
    generate = trainer.module.text_rollout(environment(3))
    sample = trainer.Sample(index=0, prompt=QUESTION)
    for function in (generate, reader.namespace["generate"]):  # that of the page ends after one turn
        reader.forget()
        sample = trainer.Sample(index=0, prompt=QUESTION)
        trainer.generate(function, trainer.args(reader.router, rollout_max_response_len=900), sample, SAMPLING)
        cut = len(sample.tokens) - sample.response_length
        check(reader, sample.tokens[:cut], sample.tokens[cut:], sample.loss_mask, sample.rollout_log_probs)
        assert not sample.remove_sample
    reader.forget()
    asked = trainer.Sample(index=0, prompt="How long is the Elbe?")
    (one,) = trainer.generate(reader.namespace["generate_agent"], trainer.args(reader.router), asked, SAMPLING)
    assert one.reward == 1.0
    if name == "slime":  # the agent of miles' section asks nothing
        cut = len(one.tokens) - one.response_length
        check(reader, one.tokens[:cut], one.tokens[cut:], one.loss_mask, one.rollout_log_probs)


def test_the_loops_of_verls_section_are_classes(read: Callable[..., Reading]) -> None:
    reader = read("docs/trainers.md#verl", abort=RETURN)
    (text,) = [block.text for block in PIECES["docs/trainers.md#verl"].blocks if block.language == "yaml"]
    loops = importlib.import_module("middleware_hub.integrations.verl")
    for entry in yaml.safe_load(text):
        module, _, name = entry["_target_"].rpartition(".")
        assert module == loops.__name__
        own = {key: value for key, value in entry.items() if key not in ("name", "_target_")}
        for key in ("act", "agent"):
            if key in own:
                own[key] = reader.namespace[own[key].removeprefix("my_env.")]
        config = trainers.Config({"actor_rollout_ref": trainers.Config({"rollout": trainers.Config()})})
        data = SimpleNamespace(config={})
        assert getattr(loops, name)(SimpleNamespace(config=config), trainers.Words(), data, **own).router


def test_the_functions_of_trls_section_fit(read: Callable[..., Reading]) -> None:
    """`tests/trainers/test_trl.py` has the exactness; here the page's environment and its reward function meet."""
    reader = read("docs/trainers.md#trl", abort=RETURN)
    fields: dict[str, Any] = {"prompt": QUESTION}
    assert reader.namespace["act"]("1,094 km.", fields) is None
    told = {"completions": ["1,094 km.", "?"], "correct": [fields["correct"], None], "finish": ["stop", "stop"]}
    assert reader.namespace["reward"](usable=[True, False], **told) == [1.0, None]
    assert callable(reader.namespace["rollout_func"])


@pytest.mark.slow
def test_the_rollout_of_the_user_guide_is_exact(read: Callable[..., Reading]) -> None:
    reader = read("docs/user-guide.md", abort=RETURN)
    reader.forget()
    left = iter(["\nObservation: about 1,094 km\n"] * 3)
    with Client(reader.router) as client:
        found = reader.namespace["rollout"](client, QUESTION, SAMPLING, lambda _turn: next(left, None))
    assert len(found.turns) == 4
    cut = found.prompt_length
    check(reader, found.tokens[:cut], found.tokens[cut:], found.loss_mask[cut:], found.logprobs[cut:])


@pytest.mark.slow
def test_the_plain_loop_is_exact(read: Callable[..., Reading]) -> None:
    """Two groups of four, under the default abort policy, without aborts."""
    reader = read("docs/trainers.md#a-loop-of-your-own")
    params = {**SAMPLING, "sampling_seed": None}
    observation = "\nObservation: 42\n"
    prompts = ["Question: How long is the Elbe?\n", QUESTION]
    talks = reader.namespace["rollout"](prompts, 4, params, lambda _turn: observation, turns=3)
    samples = [reader.namespace["sample"](talk) for talk in talks]
    assert len(samples) == 8
    for sample in samples:
        check(reader, sample["prompt"], sample["response"], sample["mask"], sample["logprobs"], alone=False)
    reader.namespace["client"].close()


# -- what agents do is what was sampled --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
    """docs/agents.md, run once for all of its agents, with one worker left."""
    with reading(tmp_path_factory.mktemp("agents")) as reader:
        reader.read(PIECES["docs/agents.md"])
        for other in reader.workers[1:]:
            call(f"{reader.router}/remove_worker", {"url": other.url})
        yield reader


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["ask_openai", "ask_anthropic", "ask_google", "ask_langchain"])
def test_the_agents_lose_no_token(agents: Reading, agent: str) -> None:
    """Run a loop of each library with scripted tool calls, and check the batch made from it."""
    names, worker = agents.namespace, agents.workers[0]
    agents.forget()
    for city in ("Hamburg", "Oslo"):
        asks = json.dumps({"name": "weather", "arguments": {"city": city}})
        worker.script(text=f"I look.\n<tool_call>\n{asks}\n</tool_call>")
    worker.script(text="Take a coat.")

    session = names["call"]("/sessions", {})
    assert names[agent](session, "Is it going to rain?") == "Take a coat."
    (found,) = names["call"](f"/sessions/{session['session_id']}/finalize", {})["trajectories"]
    assert found["num_turns"] == len(worker.log) == 3
    tools = [message["content"] for message in found["messages"] if message["role"] == "tool"]
    assert [json.loads(content)["city"] for content in tools] == ["Hamburg", "Oslo"]
    check(agents, found["prompt_ids"], found["response_ids"], found["response_mask"], found["response_logprobs"])

    batch = names["padded"]([found, {**found, "response_ids": [], "response_mask": [], "response_logprobs": []}])
    whole = found["prompt_ids"] + found["response_ids"]
    assert batch["input_ids"].tolist()[0] == whole
    assert batch["attention_mask"].sum(axis=1).tolist() == [len(whole), len(found["prompt_ids"])]
    assert batch["loss_mask"].sum() == sum(len(record.output_ids) for record in worker.log)
    assert not batch["logprobs"][batch["loss_mask"] == 0].any()


# -- what the text says ------------------------------------------------------------------------------------------------


def test_the_policy_and_the_middleware_of_the_page_on_development(
    read: Callable[..., Reading], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = read("docs/development.md").namespace
    workers = [Target(Worker(f"http://10.0.0.{number}:30001")) for number in range(4)]
    policy = names["ByRoutingKey"]()
    chosen = {policy.select(workers, RouteQuery(routing_key="a")) for _ in range(9)}
    assert len(chosen) == 1
    assert policy.select(workers, RouteQuery()) is workers[0]

    monkeypatch.setitem(cast(dict[str, Any], POLICIES), "overflow", names["Overflow"])
    flags = parser().parse_args("--middleware none --policy overflow --overflow-above 1".split())
    app = create_app(config_from_args(flags))
    for number in range(4):
        app.pool.probed(app.pool.add(f"http://10.0.0.{number}:30001"), None)
    keyed = [app.pool.lease(RouteQuery(routing_key="a")).worker for _ in range(4)]
    assert keyed[0] is keyed[1] is not keyed[2] is not keyed[3]
    assert "policy_overflows_total 2.0" in generate_latest(app.registry).decode()

    module = ModuleType("my_package.stamp")
    module.Stamp = names["Stamp"]
    monkeypatch.setitem(sys.modules, "my_package", ModuleType("my_package"))
    monkeypatch.setitem(sys.modules, "my_package.stamp", module)
    with reading(tmp_path, middlewares=("my_package.stamp:Stamp", RADIX_TREE_MIDDLEWARE)) as reader:
        answer = call(f"{reader.router}/generate", {"text": QUESTION, "sampling_params": {"max_new_tokens": 4}})
    assert answer.headers["x-stamp"] == "127.0.0.1"
    assert answer.headers["x-radix-recorded"] == "exact"


def test_the_spelling_that_the_readme_begins_with() -> None:
    """The README's `[ wr][ite]` and `[ write]` have the ids of the quickstart."""
    tokenizer = Tokenizer.from_file(str(shipped_tokenizer() / "tokenizer.json"))
    assert [tokenizer.decode([number]) for number in (690, 1883, 1225)] == [" wr", "ite", " write"]
    assert tokenizer.encode(" write").ids == [1225]


def test_make_starts_what_is_tried_here() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "\t@$(VENV)/bin/tito-router demo $(ARGS)\n" in makefile
    assert "\t@$(VENV)/bin/tito-router demo --serve $(ARGS)\n" in makefile


def test_what_is_not_run_says_why_and_is_little() -> None:
    """`pytest -s` shows the list."""
    blocks = [block for piece in PIECES.values() for block in piece.blocks if block.language in (*COMMANDS, "json")]
    left_out = [block for block in blocks if block.not_run is not None]
    for block in left_out:
        print(f"{block.place} is not run: {block.not_run}")
    assert all(len(str(block.not_run).split()) > 3 for block in left_out)
    python = {block.place.partition(":")[0] for block in left_out if block.language == "python"}
    # Tests run these: tests/deploy/test_ray.py, and tests/integration/test_real_training_loop.py, where torch is.
    assert python == {"docs/ray.md", "docs/training-loop.md"}
    assert len(left_out) < len(blocks) / 3


@pytest.mark.parametrize(
    ("expected", "printed", "varies", "is_same"),
    [
        ("one two", "one  two\n", None, True),
        ("one two", "one three", None, False),
        ('{"a":1,\n "b":[1,...]}', '{"a":1,"b":[1,2,3]}', None, True),
        ('{"a":1,\n "b":[1,...]}', '{"a":2,"b":[1,2,3]}', None, False),
        ("...\n3 exact", "one\ntwo\n3 exact", None, True),
        ("3 exact", "one\n3 exact", None, False),
        ("took 1.5 s", "took 20.25 s", r"\d+\.\d+", True),
        ("took 1.5 s", "took 20.25 m", r"\d+\.\d+", False),
        ("[ re][ach]", "[ wr][ite]", r"(\[[^\]]+\])+", True),
    ],
)
def test_an_output_is_compared(expected: str, printed: str, varies: str | None, is_same: bool) -> None:
    assert same(expected, printed, varies) is is_same
