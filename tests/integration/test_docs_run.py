"""The documents do what they say: every block of README.md and docs/ is run, and outputs are compared.

A block that cannot run here says why in a comment in front of it, in the form that `doc_pages` describes.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import groupby, takewhile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from middleware_hub import sessions_middleware
from router.config import RADIX_TREE_MIDDLEWARE, AbortConfig
from router.embedded.models.ngram import shipped_tokenizer
from router.policies.base import RouteQuery
from router.workers.worker import Worker
from tests.integration import trainer_classes
from tests.integration.doc_pages import COMMANDS, ROOT, pieces, same
from tests.integration.doc_runner import Reading, reading
from tests.support.client import call

PIECES = {piece.name: piece for piece in pieces()}
# The model often ends a line, so a conversation has turns; the seed makes it the same conversation each time.
SAMPLING = {"max_new_tokens": 200, "temperature": 1.0, "stop": ["\n"], "sampling_seed": 129}
QUESTION = "Question: Which of the two is longer, the Elbe or the Rhine?\n"


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Reading]]:
    """Return `read(name)`, which runs all blocks of a page, or of a section of docs/trainers.md."""
    with ExitStack() as stack:

        def run(name: str, **options: Any) -> Reading:
            reader = stack.enter_context(reading(tmp_path, **options))
            trainer_classes.install(monkeypatch, reader.router, lambda: [worker.url for worker in reader.workers])
            reader.read(PIECES[name])
            return reader

        yield run


@pytest.mark.parametrize("name", [name for name in PIECES if not name.startswith("docs/trainers.md#")])
def test_what_a_page_says_happens(read: Callable[..., Reading], name: str) -> None:
    read(name)


@pytest.mark.parametrize(
    "name", ["docs/trainers.md#what-all-have-in-common", "docs/trainers.md#a-loop-of-your-own"], ids=lambda name: name
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

    async def act(_reply: str) -> str | None:
        return "\nObservation: about 1,094 km\n" if next(left, None) is not None else None

    return act


async def aborted(reader: Reading, generation: Any, after: int) -> Any:
    """Await a call whose first reply is aborted at its worker, as slime does it, after this many tokens."""
    worker, *others = reader.workers
    for other in others:
        call(f"{reader.router}/remove_worker", {"url": other.url})
    worker.hold(after)
    running = asyncio.ensure_future(generation)
    await asyncio.to_thread(worker.wait_for_arrivals, 1)
    await asyncio.to_thread(call, f"{worker.url}/abort_request", {"abort_all": True})
    worker.release()
    return await running


def slime(reader: Reading, **flags: Any) -> Any:
    host, _, port = reader.router.removeprefix("http://").partition(":")
    args = {"partial_rollout": False, "mask_offpolicy_in_partial_rollout": False, **flags}
    return SimpleNamespace(sglang_router_ip=host, sglang_router_port=port, **args)


RETURN = AbortConfig(policy="return")


@pytest.mark.parametrize("page", ["docs/trainers.md#slime", "docs/user-guide.md"])
def test_the_rollout_function_for_slime_is_exact(read: Callable[..., Reading], page: str) -> None:
    reader = read(page, abort=RETURN)
    reader.forget()
    reader.namespace["act"] = environment(3)
    sample = trainer_classes.Sample(QUESTION)
    asyncio.run(reader.namespace["generate"](slime(reader), sample, SAMPLING))
    assert sample.status is sample.Status.COMPLETED
    assert not sample.remove_sample
    assert sample.response.count("Observation") == 3
    cut = len(sample.tokens) - sample.response_length
    check(reader, sample.tokens[:cut], sample.tokens[cut:], sample.loss_mask, sample.rollout_log_probs)
    assert sample.weight_versions == ["default"] * 4


@pytest.mark.parametrize("masked", [False, True])
def test_the_function_for_slime_goes_on_after_an_abort(read: Callable[..., Reading], masked: bool) -> None:
    reader = read("docs/trainers.md#slime", abort=RETURN)
    generate = reader.namespace["generate"]
    reader.namespace["act"] = environment(2)
    args = slime(reader, partial_rollout=True, mask_offpolicy_in_partial_rollout=masked)
    sample = trainer_classes.Sample(QUESTION)

    asyncio.run(aborted(reader, generate(args, sample, SAMPLING), after=5))
    assert sample.status is sample.Status.ABORTED
    assert sample.response_length == sum(sample.loss_mask) == 5
    reader.workers[0].set_weight_version("1")
    asyncio.run(generate(args, sample, SAMPLING))

    assert sample.status is sample.Status.COMPLETED
    assert not sample.remove_sample
    assert sample.weight_versions == ["default", "1", "1", "1"]
    mask = [1] * 5 + sample.loss_mask[5:]
    assert sample.loss_mask[:5] == [0 if masked else 1] * 5
    cut = len(sample.tokens) - sample.response_length
    check(reader, sample.tokens[:cut], sample.tokens[cut:], mask, sample.rollout_log_probs)


@pytest.mark.parametrize("abort", [False, True])
def test_the_agent_loop_for_verl_is_exact(read: Callable[..., Reading], abort: bool) -> None:
    reader = read("docs/trainers.md#verl", abort=RETURN)
    reader.namespace["act"] = environment(2)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(response_length=500)))
    loop = reader.namespace["TextAgentLoop"](config, trainer_classes.Template(), router=reader.router)
    # verl's own registration is what adds the workers.
    for worker in reader.workers:
        call(f"{reader.router}/remove_worker", {"url": worker.url})
    if abort:
        del reader.workers[1:]  # the one worker is the one that aborts
    running = loop.run(
        {**SAMPLING, "logprobs": True}, raw_prompt=[{"role": "user", "content": "How long is the Elbe?"}]
    )
    out = asyncio.run(aborted(reader, running, after=1) if abort else running)
    check(reader, out.prompt_ids, out.response_ids, out.response_mask, out.response_logprobs)
    assert out.num_turns == 6
    assert sum(len(worker.log) for worker in reader.workers) == 3 + abort
    turns = 1 + len([sampled for sampled, _ in groupby(out.response_mask) if not sampled])
    assert turns == 3
    assert len(out.extra_fields["weight_versions"]) == 3


def test_the_function_for_miles_is_exact(read: Callable[..., Reading]) -> None:
    reader = read("docs/trainers.md#miles", abort=RETURN)
    reader.namespace["act"] = environment(2)
    for prompt in (QUESTION, [{"role": "user", "content": "How long is the Elbe?"}]):
        sample = trainer_classes.Sample(prompt)
        given = SimpleNamespace(
            args=SimpleNamespace(partial_rollout=False),
            sample=sample,
            state=SimpleNamespace(tokenizer=trainer_classes.Template()),
            sampling_params=SAMPLING,
        )
        reader.forget()
        made = asyncio.run(reader.namespace["generate"](given)).samples
        assert made is sample
        assert made.status is made.Status.COMPLETED
        assert not made.remove_sample
        cut = len(made.tokens) - made.response_length
        check(reader, made.tokens[:cut], made.tokens[cut:], made.loss_mask, made.rollout_log_probs)


def test_the_plain_loop_is_exact(read: Callable[..., Reading]) -> None:
    """Two groups of four, under the default abort policy, without aborts."""
    reader = read("docs/trainers.md#a-loop-of-your-own")
    params = {**SAMPLING, "sampling_seed": None}
    texts, names = reader.namespace["rollout"](
        ["Question: How long is the Elbe?\n", QUESTION], 4, params, lambda _reply: "\nObservation: 42\n", turns=3
    )
    samples = [reader.namespace["sample"](text, name) for text, name in zip(texts, names, strict=True)]
    assert len(samples) == 8
    for sample in samples:
        check(reader, sample["prompt"], sample["response"], sample["mask"], sample["logprobs"], alone=False)
    reader.namespace["http"].close()


# -- what agents do is what was sampled --------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", ["ask_openai", "ask_anthropic", "ask_langchain"])
def test_the_agents_lose_no_token(read: Callable[..., Reading], agent: str) -> None:
    """Run a loop of each library with scripted tool calls, and check the batch made from it."""
    reader = read("docs/agents.md")
    names = reader.namespace
    worker, *others = reader.workers
    for other in others:
        call(f"{reader.router}/remove_worker", {"url": other.url})
    reader.forget()
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
    check(reader, found["prompt_ids"], found["response_ids"], found["response_mask"], found["response_logprobs"])

    batch = names["padded"]([found, {**found, "response_ids": [], "response_mask": [], "response_logprobs": []}])
    whole = found["prompt_ids"] + found["response_ids"]
    assert batch["input_ids"].tolist()[0] == whole
    assert batch["attention_mask"].sum(axis=1).tolist() == [len(whole), len(found["prompt_ids"])]
    assert batch["loss_mask"].sum() == sum(len(record.output_ids) for record in worker.log)
    assert not batch["logprobs"][batch["loss_mask"] == 0].any()


def test_every_call_of_a_session_is_documented() -> None:
    """The table of docs/http-api.md has method and path of each. They come from the source, because no router lists them."""
    folder = ROOT / "middleware_hub" / "sessions"
    place = re.compile(r'^ {12}"([a-z_]*)": (\{"[A-Z].*\}),$', re.MULTILINE)
    found = {
        (method, f"/sessions/{{id}}/{name}".rstrip("/"))
        for name, methods in place.findall((folder / "controls.py").read_text())
        for method in re.findall(r'"([A-Z]+)"', methods)
    }
    assert len(found) > 5, "the source has another form: read the calls in another way"
    found |= {
        ("POST", f"/sessions/{{id}}/v1/{name}") for name in (*sessions_middleware.TURNS, sessions_middleware.COUNT)
    }
    found |= {("GET", "/sessions/{id}/v1/models"), ("GET", "/sessions"), ("POST", "/sessions")}
    page = (ROOT / "docs" / "http-api.md").read_text()
    assert set(re.findall(r"^\| `([A-Z]+)` \| `(/sessions[^`]*)` \|", page, re.MULTILINE)) == found


# -- what the text says ------------------------------------------------------------------------------------------------


def test_the_policy_and_the_middleware_of_the_page_on_development(
    read: Callable[..., Reading], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = read("docs/development.md").namespace
    workers = [Worker(f"http://10.0.0.{number}:30001") for number in range(4)]
    policy = names["ByRoutingKey"]()
    chosen = {policy.select(workers, RouteQuery(routing_key="a")) for _ in range(9)}
    assert len(chosen) == 1
    assert policy.select(workers, RouteQuery()) is workers[0]

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
    assert not any(block.language == "python" for block in left_out)
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
