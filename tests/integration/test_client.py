"""The client, against a whole router: what it sends, checks, repeats, and says when something is wrong."""

from __future__ import annotations

import asyncio
import base64
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from middleware_hub.client import (
    AsyncClient,
    AsyncConversation,
    AsyncSession,
    Client,
    Conversation,
    IncompleteStreamError,
    InconsistentAnswerError,
    NotAllowedError,
    NotExactError,
    NotUsableError,
    OverloadedError,
    RefusedError,
    Retries,
    Session,
    Trajectory,
    Transcript,
    UnknownReplyError,
    UnreachableError,
)
from middleware_hub.client.operations import plain
from middleware_hub.client.transport import Lines
from middleware_hub.client.wire import ClientCall, Reply
from router.config import AbortConfig
from tests.support.engine_server import free_port
from tests.support.stack import Stack, stack
from tests.support.usual import usual

ROOT = Path(__file__).parents[2]
QUICK = Retries(attempts=3, first=0.01, longest=0.02)
FEW = {"max_new_tokens": 12}


@pytest.fixture(scope="module")
def served() -> Iterator[Stack]:
    with stack("qwen", abort=AbortConfig(policy="return"), server={"max_batch": 64}) as made:
        yield made
        assert made.idle()


@pytest.fixture
def client(served: Stack, space: str) -> Iterator[Client]:
    for worker in served.workers:
        worker.forget_scripts()
    with Client(served.url, namespace=space, retries=QUICK) as made:
        yield made


def script(served: Stack, *texts: str, finish: Any = "eos", **meta: Any) -> None:
    """Let the next replies be these. One worker is left, so that they come in order."""
    for worker in served.workers:
        for text in texts:
            worker.script(text=text, finish=finish, **meta)


# -- what is loaded ----------------------------------------------------------------------------------------------------


def test_a_trainer_loads_nothing_of_the_server() -> None:
    heavy = ["transformers", "tokenizers", "uvicorn", "starlette", "numpy", "simdjson", "jinja2", "zmq"]
    program = f"import sys, middleware_hub.client; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


ENDS = ["", "client.close()", "import os\nif os.fork() == 0: raise SystemExit\nos.wait()"]


@pytest.mark.parametrize("end", usual(ENDS, ""))
def test_a_client_that_nobody_closed_ends_with_its_program(served: Stack, end: str) -> None:
    program = f"""if True:
        from middleware_hub.client import Client
        client = Client({served.url!r})
        print(len(client.generate("one two", {FEW!r}).output_ids))
    """
    run = [sys.executable, "-X", "dev", "-W", "ignore::DeprecationWarning", "-c", f"{program}\n{end}"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split()[0] == "12"
    assert "fork" in end or not done.stderr  # the copy in the fork was not to be used, and not to hang


# -- generating --------------------------------------------------------------------------------------------------------


def test_a_reply_is_what_the_worker_said(served: Stack, client: Client) -> None:
    reply = client.generate("one two", FEW, return_logprob=True, rid="mine")
    (record,) = [one for worker in served.workers for one in worker.log if one.rid == "mine"]
    assert reply.id == "mine"
    assert reply.output_ids == record.output_ids
    assert reply.logprobs == record.logprobs
    assert reply.recorded == "exact"
    assert (reply.version, reply.prompt_tokens, reply.completion_tokens) == ("default", len(record.input_ids), 12)


def test_ids_are_a_prompt_too(client: Client) -> None:
    reply = client.generate([9707, 11, 1879], FEW, return_trajectory=True)
    assert reply.trajectory is not None
    assert reply.trajectory.tokens[:3] == [9707, 11, 1879]
    assert reply.trajectory.tokens[3:] == reply.output_ids


def test_a_batch_comes_prompt_by_prompt(client: Client) -> None:
    found = client.generate_batch(["a b c", "d e f"], FEW, n=3)
    assert [len(replies) for replies in found] == [3, 3]
    assert len({reply.id for replies in found for reply in replies}) == 6
    for prompt, replies in zip(["a b c", "d e f"], found, strict=True):
        for reply in replies:
            whole = client.retrieve(prompt + reply.text, expect_request_ids=[reply.id], request_id=reply.id)
            assert whole.require_exact().tokens[whole.prompt_length :] == reply.output_ids


def test_each_prompt_of_a_batch_names_its_own_parent(client: Client) -> None:
    first = client.generate_batch(["a b c", "d e f"], FEW)
    texts = ["a b c" + first[0][0].text + "\nx", "d e f" + first[1][0].text + "\ny"]
    second = client.generate_batch(texts, FEW, parent=[first[0][0].id, first[1][0].id])
    for text, one, two in zip(texts, first, second, strict=True):
        found = client.retrieve(text + two[0].text, expect_request_ids=[one[0].id, two[0].id])
        assert found.exact
        assert [turn.request_id for turn in found.turns] == [one[0].id, two[0].id]


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([], {}, "empty"),
        (["a", ""], {}, "empty"),
        (["a", [1]], {}, "not both"),
        (["a", "b"], {"parent": ["x"]}, "1 parents for 2"),
        (["a"], {"sampling_params": {"n": 2}}, "as the argument"),
    ],
)
def test_what_cannot_be_meant_is_not_sent(client: Client, prompts: Any, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        client.generate_batch(prompts, **options)


@pytest.mark.parametrize("style", ["cumulative", "incremental", "mixed"])
def test_a_stream_gives_pieces_and_then_the_reply(served: Stack, client: Client, style: Any) -> None:
    for worker in served.workers:
        worker.wire.stream_style = style
    said = "line one\nline\u2028two\x85three and a longer rest"
    script(served, said)
    pieces = list(client.stream("Say it:", {"max_new_tokens": 40}))
    assert "".join(piece.text for piece in pieces) == said
    assert all(piece.last is None for piece in pieces[:-1])
    reply = pieces[-1].last
    assert reply is not None
    assert reply.text == said
    found = client.retrieve("Say it:" + said, expect_request_ids=[reply.id])
    assert found.require_exact().tokens[found.prompt_length :] == reply.output_ids
    assert found.logprobs is not None
    assert found.logprobs[found.prompt_length :] == reply.logprobs
    for worker, number in zip(served.workers, ("cumulative", "incremental", "mixed"), strict=True):
        worker.wire.stream_style = number  # type: ignore[assignment]


def test_a_stream_that_breaks_off_says_so(served: Stack, client: Client) -> None:
    script(served, "some words that are many", fault="dies")
    with pytest.raises(IncompleteStreamError, match="continues its tokens"):
        list(client.stream("Say it:", {"max_new_tokens": 40}))


def test_lines_end_at_line_feeds_only() -> None:
    lines = Lines()
    assert lines.feed("data: a\u2028b\x85".encode()) == []
    assert lines.feed(b"c\n\nx") == ["data: a\u2028b\x85c".encode(), b""]


# -- conversations -----------------------------------------------------------------------------------------------------


def test_a_conversation_names_its_parents_and_lists_its_replies(served: Stack, client: Client) -> None:
    talk = Conversation(client, "Q: how long?\n", FEW)
    for _ in range(3):
        talk.say()
        talk.append("\nAgain.\n")
    last = talk.say()
    found = talk.retrieve().require_exact()
    assert [turn.request_id for turn in found.turns] == talk.transcript.names
    assert len(talk.transcript.names) == 4
    assert talk.text.endswith(last.text)
    assert talk.transcript.turn == last.text
    assert found.token_versions().count("default") == found.sampled == sum(found.loss_mask)
    (record,) = [one for worker in served.workers for one in worker.log if one.rid == last.id]
    assert found.tokens == record.input_ids + record.output_ids


def test_a_prompt_that_was_sampled_elsewhere_is_context(client: Client) -> None:
    other = Conversation(client, "Q: how long?\n", FEW)
    other.say()
    talk = Conversation(client, other.text + "\nAnd?", FEW)
    talk.say()
    found = talk.retrieve().require_exact()
    assert len(found.turns) == 1


def test_a_transcript_survives_its_process(client: Client) -> None:
    talk = Conversation(client, "Q: how long?\n", FEW)
    talk.say()
    state = talk.transcript.state()
    later = Conversation(client, Transcript.of(state), FEW)
    later.append("\nAgain.\n")
    later.say()
    assert len(later.retrieve().require_exact().turns) == 2
    assert later.transcript.response == later.text.removeprefix("Q: how long?\n")


def test_an_aborted_turn_goes_on(served: Stack, client: Client) -> None:
    script(served, "first half", finish="abort")
    talk = Conversation(client, "Q: ", {"max_new_tokens": 30})
    assert talk.say().finish == "abort"
    for worker in served.workers:
        worker.forget_scripts()
    script(served, " and the second")
    assert talk.say().finish == "stop"
    assert talk.transcript.turn == "first half and the second"
    assert len(talk.retrieve().require_exact().turns) == 2


def test_a_lost_reply_makes_the_sequence_unusable(client: Client) -> None:
    talk = Conversation(client, "Q: how long?\n", FEW)
    talk.say()
    talk.transcript.names.append("lost")
    found = talk.retrieve()
    assert not found.exact
    with pytest.raises(NotUsableError, match="unknown_reply: a reply that you list was lost"):
        found.require_exact()
    with pytest.raises(NotUsableError, match="lost"):
        talk.cover().require_exact()

    async def main() -> None:
        async with AsyncClient(client.url) as other:
            found = AsyncConversation(other, Transcript.of(talk.transcript.state()))
            assert "lost" in (await found.cover()).missing

    asyncio.run(main())


def remedies(text: str, client: Client, names: list[str]) -> list[str]:
    """Return the reasons for which the error of a retrieval says what to do."""
    found = client.retrieve(text, expect_request_ids=names)
    with pytest.raises(NotUsableError) as raised:
        found.require_exact()
    assert raised.value.reasons == found.reasons
    return re.findall(r"\b([a-z]+_[a-z]+|retokenized): ", str(raised.value))


def test_an_error_has_the_remedy_of_the_cause_alone(served: Stack, client: Client) -> None:
    """What was cut off, or never sent, was encoded again: that the loop changed a reply, or named a lost one, is the cause."""
    script(served, "It is the Elbe, and no other river.")
    reply = client.generate("Q: which?\n", {"max_new_tokens": 30})
    name = reply.meta_info["id"]
    whole = "Q: which?\n" + reply.text
    assert remedies(whole + "\nObservation: 1,094 km\n", client, [name]) == ["retokenized"]
    assert remedies(whole[:-6] + "lake", client, [name]) == ["edited_turn"]
    assert remedies("Q: who?\n" + reply.text, client, [name]) == ["unknown_reply"]
    with pytest.raises(
        NotUsableError, match="another key or x-radix-namespace, or before a restart without --store"
    ) as told:
        client.retrieve("Who asked?\n" + reply.text).require_exact()
    assert told.value.reasons == ("retokenized",)
    later = client.generate("Q: and?\n" + reply.text, {"max_new_tokens": 5}, parent="lost")
    assert remedies("Q: and?\n" + reply.text + later.text, client, ["lost"]) == ["unknown_parent"]


def test_a_reply_of_which_only_the_end_was_stripped_is_still_continued() -> None:
    """Its text is whole up to white space, which may form one token with a mark before it, and not with a word."""

    def reply(name: str, text: str) -> Reply:
        return Reply(text, [1, 2], name, "stop", {})

    talk = Transcript("Q")
    talk.take(reply("first", "Yes \n"))
    talk.text = "QYes"
    assert talk.parent == "first"
    talk.append("\nSure?")
    talk.take(reply("second", "No. \n"))
    talk.text = talk.text.removesuffix(" \n")
    assert talk.parent == "second"
    talk.text = "QYes\nOr not?"
    assert talk.parent == "first"
    marks = Transcript("Q")
    marks.take(reply("marks", "?!\n"))
    marks.text = "Q?!"
    assert marks.parent == "none"


def test_a_loop_that_strips_trains_on_everything_it_sampled(served: Stack, client: Client) -> None:
    script(served, "\n\n four. \n", "\n\n five. \n", "\n\n six. \n")
    talk = Conversation(client, "Q: 2+2?", {"max_new_tokens": 30})
    sampled = 0
    for question in (" And 2+3?", " And 2+4?", ""):
        before = len(talk.text)
        sampled += talk.say().completion_tokens
        talk.transcript.text = talk.text[:before] + talk.text[before:].strip()
        talk.append(question)
    whole = talk.cover().require_exact()
    assert sum(one.sampled for one in whole) == sampled
    assert talk.retrieve().sampled < sampled


TIDIES = (
    str,
    str.strip,
    str.rstrip,
    str.lstrip,
    lambda turn: turn.replace("  ", " "),
    lambda turn: turn.partition("</think>")[2] or turn,
    lambda turn: turn[: len(turn) // 2],
    lambda turn: turn[:1],
    lambda turn: "",
    lambda turn: "AI: " + turn,
)
WORDS = (
    "\n\n",
    " ",
    "  ",
    "<think>so</think>",
    "four",
    " five",
    "5.0e0",
    "caf\u00e9",
    "\U0001f600",
    "x" * 20,
    ".",
    "\n",
)


@pytest.mark.parametrize("seed", range(60))
def test_whatever_a_loop_does_to_its_history_every_sampled_token_is_trained_on_once(
    served: Stack, client: Client, seed: int
) -> None:
    chance = random.Random(seed)
    talk = Conversation(client, "Q: 2+2?", {"max_new_tokens": 60})
    sampled = 0
    for _ in range(chance.randint(2, 7)):
        for worker in served.workers:
            worker.forget_scripts()
        script(served, "".join(chance.choices(WORDS, k=chance.randint(1, 8))), finish=chance.choice(["eos", "abort"]))
        reply = talk.say()
        sampled += reply.completion_tokens
        if reply.finish == "abort":
            continue  # the next turn goes on with it
        turn = talk.transcript
        turn.text = turn.text[: turn.begin] + chance.choice(TIDIES)(turn.turn)
        if chance.random() < 0.2:
            turn.text = "Summary: " + turn.text[-9:]
        talk.append(f" Q: 2+{chance.randint(3, 5)}?")
        if chance.random() < 0.3:
            talk = Conversation(client, Transcript.of(talk.transcript.state()), talk.sampling_params)
    whole = talk.cover()
    assert not whole.missing
    assert [one.reasons for one in whole if not one.exact] == []
    assert sum(one.sampled for one in whole) == sampled


def test_per_token_versions(served: Stack, client: Client) -> None:
    talk = Conversation(client, "Q: how long?\n", FEW)
    talk.say()
    served.set_weight_version("3")
    talk.append("\nAgain.\n")
    talk.say()
    served.set_weight_version("default")
    found = talk.retrieve(max_staleness=0)
    versions = found.token_versions()
    assert [versions[turn.start] for turn in found.turns] == ["default", "3"]
    assert found.stale_tokens == 12


# -- what engines say of each token -------------------------------------------------------------------------------------


def test_rows_and_sets_fit_the_tokens(served: Stack, client: Client) -> None:
    prompt = client.generate("Q: 2+2?", FEW).prompt_tokens
    ids = served.workers[0].vocabulary.encode_bare("four")
    count = prompt + len(ids) + 1
    rows = np.arange((count - 1) * 6, dtype="<i4")
    sets = [[1, 2, 3]] * (len(ids) + 1)
    meta = {
        "routed_experts": base64.b64encode(rows.tobytes()).decode(),
        "top_p_token_ids": base64.b64encode(np.array(sets, "<i4").tobytes()).decode(),
        "top_p_token_offsets": base64.b64encode(np.arange(0, 3 * len(sets) + 1, 3, dtype="<i4").tobytes()).decode(),
    }
    script(served, "four", extra_meta=meta)
    talk = Conversation(client, "Q: 2+2?", {"max_new_tokens": 30}, return_routed_experts=True)
    talk.say()
    found = talk.retrieve(return_routed_experts=True, return_top_p=True)
    assert found.extras["routed_experts"].whole
    assert (found.extras["routed_experts"].array() == rows.reshape(count - 1, 6)).all()
    assert found.top_p is not None
    kept, offsets = found.top_p.arrays()
    assert offsets.tolist() == [0] * (prompt + 1) + [3 * number for number in range(1, len(sets) + 1)]
    assert kept.tolist() == [1, 2, 3] * len(sets)


ANSWER: dict[str, Any] = {
    "tokens": [1, 2, 3],
    "loss_mask": [0, 1, 1],
    "token_length": 3,
    "loss_mask_length": 3,
    "rollout_logp": [0.0, -1.0, -2.0],
    "response": "abc",
    "exact": True,
    "exact_chars": 3,
    "reasons": [],
    "response_length": 2,
    "weight_versions": [{"version": "1", "start": 1, "end": 3}],
    "turns": [{"request_id": "r", "start": 1, "end": 3, "version": "1", "finish": "stop"}],
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss_mask": [0, 1]},
        {"loss_mask": [1, 1, 1]},
        {"rollout_logp": [0.0]},
        {"token_length": 4},
        {"response_length": 4},
        {"weight_versions": [{"version": "1", "start": 1, "end": 9}]},
        {"routed_experts": {"shape": [3, 2], "told": [], "base64": "AAAA"}},
        {"routed_experts": {"shape": [3, 1], "told": [], "base64": "A" * 16}},
        {"top_p": {"token_ids": "", "offsets": "AAAA"}},
        {"top_p": {"token_ids": "", "offsets": base64.b64encode(bytes(12) + b"\1\0\0\0").decode()}},
    ],
)
def test_an_answer_that_contradicts_itself_is_an_error(wrong: dict[str, Any]) -> None:
    assert Trajectory.of(ANSWER).response_length == 2
    with pytest.raises(InconsistentAnswerError):
        Trajectory.of({**ANSWER, **wrong})


# -- errors ------------------------------------------------------------------------------------------------------------


def test_errors_say_what_to_do(served: Stack, client: Client) -> None:
    with pytest.raises(UnknownReplyError, match="evicted"):
        client.retrieve("nobody said this", request_id="nobody")
    with pytest.raises(NotExactError, match="explain") as caught:
        client.retrieve("nobody said this", strict=True)
    assert caught.value.details["exact_chars"] == 0
    with pytest.raises(RefusedError, match="`max_staleness`"):
        client.retrieve("x", max_staleness=-1)
    with pytest.raises(InconsistentAnswerError, match="is this address"):
        client.run(plain(ClientCall("GET", "/metrics")))


def test_a_key_is_asked_for() -> None:
    with (
        stack("qwen", styles=("cumulative",), server={"api_keys": ("team:word",)}) as made,
        Client(made.url, retries=QUICK) as bare,
        Client(made.url, api_key="word") as keyed,
    ):
        with pytest.raises(NotAllowedError, match="api_key="):
            bare.generate("a")
        assert keyed.generate("a", FEW).recorded == "exact"


def test_a_router_without_workers_took_nothing_and_is_asked_again() -> None:
    with stack("qwen", styles=()) as made, Client(made.url, retries=QUICK) as client:
        with pytest.raises(OverloadedError, match="POST /add_worker"):
            client.generate("a")
        assert len([line for line in made.get("/metrics").content.decode().splitlines() if "503" in line]) >= 1


def test_a_worker_that_fails_is_no_reason_to_sample_again(served: Stack, client: Client) -> None:
    before = [len(worker.log) for worker in served.workers]
    for worker in served.workers:
        worker.fault("http_500")
    with pytest.raises(RefusedError) as caught:
        client.generate("a", FEW)
    assert caught.value.status in (500, 502)
    # The router tried each worker once, and the client did not begin again.
    assert [len(worker.log) for worker in served.workers] == [count + 1 for count in before]


def test_the_next_router_is_asked_if_the_first_is_gone(served: Stack, space: str) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    with Client([gone, served.url], namespace=space, retries=QUICK) as client:
        talk = Conversation(client, "Q: how long?\n", FEW)
        talk.say()
        assert client.url == served.url
        assert talk.retrieve().exact
    with Client(gone, retries=QUICK) as client, pytest.raises(UnreachableError, match="after 3 attempts"):
        client.generate("a")


def test_an_address_without_a_scheme_is_no_address() -> None:
    with pytest.raises(ValueError, match="begins with http"):
        Client("127.0.0.1:30000")


def test_workers_that_differ_are_an_error(served: Stack, client: Client) -> None:
    assert client.to_workers("/update_weight_version", {"new_version": "default", "abort_all_requests": False})[
        "success"
    ]
    assert {worker["url"] for worker in client.workers()} == {worker.url for worker in served.workers}
    with stack("qwen", styles=("cumulative",) * 2) as made, Client(made.url) as other:
        made.workers[1].kill()
        with pytest.raises(RefusedError, match="may be at different versions") as caught:
            other.to_workers("/update_weight_version", {"new_version": "2", "abort_all_requests": False})
        assert caught.value.status == 207
        assert len(caught.value.details["workers"]) == 2


# -- awaiting ----------------------------------------------------------------------------------------------------------


def test_the_async_client_does_the_same(served: Stack, space: str) -> None:
    async def one(client: AsyncClient, number: int) -> int:
        talk = AsyncConversation(client, f"Q{number}: how long?\n", FEW)
        await talk.say()
        talk.append("\nAgain.\n")
        await talk.say()
        found = (await talk.retrieve()).require_exact()
        assert [turn.request_id for turn in found.turns] == talk.transcript.names
        return found.sampled

    async def run() -> None:
        async with AsyncClient(served.url, namespace=space, retries=QUICK) as client:
            assert await asyncio.gather(*[one(client, number) for number in range(30)]) == [24] * 30
            pieces = [piece async for piece in client.stream("Say it:", FEW)]
            assert pieces[-1].last is not None
            assert "".join(piece.text for piece in pieces) == pieces[-1].last.text
            ((reply,),) = await client.generate_batch(["x y"], FEW)
            assert (await client.cover("x y" + reply.text, [reply.id])).require_exact().trajectories[0].sampled == 12
            async with await AsyncSession.create(client, metadata={"task": 1}) as session:
                await session.chat([{"role": "user", "content": "Hello"}], max_tokens=8)
                assert (await session.finalize()).require_exact().trajectories[0].sampled == 8

    asyncio.run(run())


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_a_session(served: Stack, client: Client) -> None:
    with Session(client, sampling_params={"max_tokens": 12}) as session:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
        for _ in range(2):
            reply = session.chat(messages)
            messages += [reply["choices"][0]["message"], {"role": "user", "content": "And?"}]
        session.reward({"score": 0.5}, branch=session.replies[-1])
        whole = session.finalize().require_exact()
        (found,) = whole
        assert len(whole) == 1
        assert [turn.request_id for turn in found.turns] == session.replies
        assert found.sampled == 24
        assert found.reward_info == {"score": 0.5}
        assert session.finalize(expect_request_ids=["lost"]).missing == ("lost",)
    with pytest.raises(UnknownReplyError):
        session.finalize()
