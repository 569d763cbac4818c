"""Events that are read by comparing them with one that was decoded: nobody can tell the difference, whatever comes."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Raw

from router.engines.events import event_data
from router.engines.form.event_shape import EventLayout, layout_of
from router.engines.form.reply import LOGPROB_FIELDS, Reply, UnreadableReplyError, edit_meta
from router.engines.form.stream import StreamedReply
from router.proxy.worker_reply import EventEditor
from tests.router.engines.form.json_values import compact

Token = tuple[int, float, str]
TOKENS = st.tuples(st.integers(0, 300), st.floats(-50, 0, width=32), st.text(alphabet='ab ,[]{}"\\é\n😀', max_size=3))
STEPS = st.lists(st.lists(TOKENS, min_size=1, max_size=4), min_size=1, max_size=12)
STYLES = "cumulative", "incremental", "mixed"


def events(steps: list[list[Token]], style: str, *, logprobs: bool = True, **more: Any) -> list[bytes]:
    """Return the events of a generation as SGLang 0.5.23 prints them, except for the one that ends it."""
    out, before = [], list[Token]()
    for step in steps:
        so_far = before + step
        ids, rest = so_far if style == "cumulative" else step, step if style == "incremental" else so_far
        entries: dict[str, Any] = {
            "input_token_logprobs": [],
            "output_token_logprobs": [[v, i, None] for i, v, _ in rest],
        }
        meta = {
            "id": "r1",
            "finish_reason": None,
            "prompt_tokens": 4,
            "weight_version": "3",
            "num_retractions": 0,
            **({**entries, "output_token_logprobs_length": len(so_far)} if logprobs else {}),
            "reasoning_tokens": len(so_far) // 2,
            "completion_tokens": len(so_far),
            "cached_tokens": 0,
            "dp_rank": None,
            **more,
        }
        out.append(compact({"text": "".join(t[2] for t in rest), "output_ids": [t[0] for t in ids], "meta_info": meta}))
        before = so_far
    return out


def decoded(**given: Any) -> StreamedReply:
    """Return a reader that decodes every event: the oracle."""
    return StreamedReply(_tries=0, **given)


def outcome(streamed: StreamedReply) -> Reply | str | None:
    try:
        return streamed.reply()
    except UnreadableReplyError as error:
        return str(error)


def json_of(fields: dict[str, Raw]) -> Any:
    return {name: json.loads(bytes(raw)) for name, raw in fields.items() if name != "output_token_logprobs"}


def shown(streamed: StreamedReply, event: bytes) -> bytes:
    """Return what a client sees who did not ask for logprobs."""
    if streamed.values is None:
        return edit_meta(event, drop=LOGPROB_FIELDS)
    assert streamed.shape is not None
    cut = streamed.shape.cut(partial(edit_meta, drop=LOGPROB_FIELDS))
    data = event_data(cut.print(cut.choose(streamed.values)))
    assert data is not None
    return data


@pytest.mark.parametrize("style", STYLES)
@given(steps=STEPS, logprobs=st.booleans(), asked=st.sets(st.integers(0, 11)))
def test_every_event_reads_and_looks_as_if_it_had_been_decoded(
    style: str, steps: list[list[Token]], logprobs: bool, asked: set[int]
) -> None:
    """Also at any moment in between, at which somebody asks for the reply so far (`asked`)."""
    fast, slow = StreamedReply(added=[]), decoded(added=[])
    for number, event in enumerate(events(steps, style, logprobs=logprobs)):
        for streamed in (fast, slow):
            streamed.feed(event)
            assert streamed.error is None
        assert shown(fast, event) == edit_meta(event, drop=LOGPROB_FIELDS)
        assert fast.added is not None
        assert slow.added is not None
        assert [json.loads(one) for one in fast.added] == [json.loads(one) for one in slow.added]
        if number in asked:
            assert fast.reply() == slow.reply()
            assert (fast.ids, fast.logprobs) == (slow.ids, slow.logprobs)
            assert json_of(fast.last_meta) == json_of(slow.last_meta)
    assert fast.reply() == slow.reply()


@pytest.mark.parametrize("style", STYLES)
@given(steps=STEPS, logprobs=st.booleans(), data=st.data())
def test_a_stream_looks_the_same_wherever_its_bytes_are_cut(
    style: str, steps: list[list[Token]], logprobs: bool, data: st.DataObject
) -> None:
    """Also where several events come together, or half of one, or a comment between them."""
    good = events(steps, style, logprobs=logprobs)
    framed = [b"data: %b\n\n" % event for event in good]
    comments = data.draw(st.sets(st.integers(0, len(good))))
    whole = b"".join((b": hm\n\n" if number in comments else b"") + event for number, event in enumerate(framed))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1)))) if data.draw(st.booleans()) else []
    if data.draw(st.booleans()):  # at the ends of events
        cuts = [at + 2 for at in range(len(whole) - 2) if whole.startswith(b"\n\n", at) and data.draw(st.booleans())]
    streamed = StreamedReply()

    def alike(event: bytes) -> bytes | None:
        return b"data: %b\n\n" % shown(streamed, event) if streamed.alike(event) else None

    def event(data: bytes) -> bytes:
        streamed.decode(data)
        return shown(streamed, data)

    editor = EventEditor(event, alike)
    found = b"".join(editor(piece) for begin, end in pairwise([0, *cuts, len(whole)]) if (piece := whole[begin:end]))
    expected = decoded()
    for one in good:
        expected.feed(one)
        whole = whole.replace(b"data: %b\n\n" % one, b"data: %b\n\n" % edit_meta(one, drop=LOGPROB_FIELDS), 1)
    assert found + editor(b"") == whole
    assert streamed.reply() == expected.reply()


@pytest.mark.parametrize("style", ["cumulative", "incremental"])
def test_a_client_who_asked_for_logprobs_keeps_them_all_where_something_else_is_left_out(style: str) -> None:
    streamed, edit = StreamedReply(), partial(edit_meta, drop=frozenset({"dp_rank"}))
    for event in events([[(7, -0.5, "a")]] * 6, style):
        streamed.feed(event)
    assert streamed.shape is not None
    assert streamed.values is not None
    cut = streamed.shape.cut(edit)
    assert cut.print(cut.choose(streamed.values)) == b"data: %b\n\n" % edit(event)


def test_an_event_behind_half_a_line_is_none() -> None:
    """It ends that line, a comment here, and no reader of events sees it."""
    good = [b"data: %b\n\n" % event for event in events([[(7, -0.5, "a")]] * 8, "incremental")]
    streamed = StreamedReply()
    editor = EventEditor(
        lambda data: streamed.decode(data) or data, lambda event: event if streamed.alike(event) else None
    )
    for piece in (*good[:6], b": hm ", good[6], good[7]):
        editor(piece)
    assert len(streamed.ids) == 7


@pytest.mark.parametrize("style", ["cumulative", "incremental"])
def test_the_shortcut_is_taken(style: str) -> None:
    """From the fourth event on; the first three show the form of the stream, and that two events are alike."""
    streamed, taken = StreamedReply(), []
    for event in events([[(7, -0.5, "a")]] * 10, style):
        streamed.feed(event)
        taken.append(streamed.values is not None)
    assert taken == [False, False, False, *[True] * 7]


def spoiled(data: st.DataObject, event: bytes, others: list[bytes]) -> bytes:
    """Return an event in which something is wrong, or only unusual."""
    at = data.draw(st.integers(0, len(event) - 1))
    kind = data.draw(st.sampled_from(["byte", "gone", "twice", "cut", "other", "word", "word", "word"]))
    match kind:
        case "byte":
            return event[:at] + bytes([data.draw(st.integers(32, 255))]) + event[at + 1 :]
        case "gone":
            return event[:at] + event[at + 1 :]
        case "twice":
            return event[: at + 1] + event[at:]
        case "cut":
            return event[:at] + event[at + data.draw(st.integers(1, 30)) :]
        case "other":
            return data.draw(st.sampled_from(others))
    old, new = data.draw(st.sampled_from(WORDS))
    return event.replace(old, new)


WORDS = [
    (b'"finish_reason":null', b'"finish_reason":{"type":"abort","message":"x"}'),
    (b'"finish_reason":null', b'"finish_reason":{"type":"stop","matched":2}'),
    (b'"weight_version":"3"', b'"weight_version":"4"'),
    (b'"id":"r1"', b'"id":"r2"'),
    (b'"prompt_tokens":4', b'"prompt_tokens":5'),
    (b'"text":"', b'"text":"\\ud83d'),
    (b'"text":"', b'"text":"\\"'),
    (b'"text":"', b'"text":"\xff'),
    (b'"text":"', b'"text":"","text":"'),
    (b'"output_ids":[', b'"output_ids":[0'),
    (b'"output_ids":[', b'"output_ids":[1,'),
    (b'"output_ids":[', b'"output_ids":[99999999999999999999,'),
    (b'"output_ids":[', b'"output_ids":[-1,'),
    (b"null]]", b'"a"]]'),
    (b"[[-", b"[[1e"),
    (b"[[-", b"[[-0"),
    (b"[[-", b"[[null,1,null],[-"),
    (b'"completion_tokens":', b'"completion_tokens":1'),
    (b'"meta_info"', b'"error":{"message":"x"},"meta_info"'),
    (b'"dp_rank":null', b'"dp_rank":1'),
    (b'"dp_rank":null', b'"dp_rank":null,"routed_experts":"AAA"'),
    (b'{"text"', b'{ "text"'),
]


@pytest.mark.parametrize("style", ["cumulative", "incremental"])
@given(steps=st.lists(st.lists(TOKENS, min_size=1, max_size=3), min_size=5, max_size=10), data=st.data())
@example(steps=[[(7, -0.5, "a")]] * 6, data=None)
def test_a_fault_shows_as_if_every_event_had_been_decoded(
    style: str, steps: list[list[Token]], data: st.DataObject | None
) -> None:
    """Whether the reply so far is the same, and whether something was unreadable, at the latest at the end."""
    good = events(steps, style)
    spoils = [*good]
    if data is None:
        spoils[-2] = spoils[-2].replace(b'"output_ids":[', b'"output_ids":[0')
    else:
        for number in data.draw(st.sets(st.integers(0, len(good) - 1), min_size=1, max_size=2)):
            spoils[number] = spoiled(data, good[number], good)
    fast, slow = StreamedReply(), decoded()
    for event in spoils:
        fast.feed(event)
        slow.feed(event)
    found, expected = outcome(fast), outcome(slow)
    assert (fast.error is None) == (slow.error is None)
    if slow.error is None:
        assert found == expected
        assert (fast.ids, fast.logprobs, fast.finished) == (slow.ids, slow.logprobs, slow.finished)
    elif isinstance(found, Reply):
        # With what cannot be read, more may be lost here: then the counts show it.
        assert found == expected or found.fault(4, logprobs_asked=True) is not None


@pytest.mark.parametrize("style", ["cumulative", "incremental"])
@pytest.mark.parametrize("spoil", [lambda event: event + b"x", lambda event: event + event, lambda event: event[:-1]])
def test_an_event_with_more_or_less_at_its_end_cannot_be_read(style: str, spoil: Any) -> None:
    good = events([[(7, -0.5, "a")]] * 8, style)
    streamed = StreamedReply()
    for event in (*good[:7], spoil(good[7])):
        streamed.feed(event)
    assert streamed.unreadable
    assert len(streamed.ids) == 7


def test_tokens_that_are_lost_with_unreadable_ones_are_counted() -> None:
    """What is kept is decoded together: if one id cannot be read, the reply lacks the others too, and its count tells."""
    good = events([[(7, -0.5, "a")]] * 8, "incremental")
    streamed = StreamedReply()
    for event in (*good[:6], good[6].replace(b'"output_ids":[7]', b'"output_ids":[07]'), good[7]):
        streamed.feed(event)
    reply = streamed.reply()
    assert reply is not None
    assert streamed.unreadable
    assert reply.fault(4, logprobs_asked=True) is not None


def test_events_are_decoded_in_time() -> None:
    """A stream may be long, and what is kept must not be."""
    streamed = StreamedReply()
    for event in events([[(7, -0.5, "a")]] * 500, "incremental"):
        streamed.feed(event)
        assert streamed._kept.count < 64
    assert len(streamed._ids) > 430


@pytest.mark.parametrize("more", [{"queue_time": 0.5}, {"e2e_latency": 1e-05, "cached_tokens_details": {"device": 0}}])
def test_other_values_have_to_be_the_same(more: dict[str, Any]) -> None:
    one, other = (
        events([[(7, -0.5, "a")]] * 6, "incremental", **given) for given in (more, {**more, "queue_time": 0.75})
    )
    streamed = StreamedReply()
    for event in one:
        streamed.feed(event)
    assert streamed.values is not None
    streamed.feed(other[-1].replace(b'"completion_tokens":6', b'"completion_tokens":7'))
    assert streamed.values is None
    assert bytes(streamed.last_meta["queue_time"]) == b"0.75"


@given(st.lists(TOKENS, min_size=1, max_size=3))
def test_a_layout_puts_an_event_together_again(step: list[Token]) -> None:
    (event,) = events([step], "incremental")
    found = layout_of(event)
    assert found is not None
    layout, values = found
    assert isinstance(layout, EventLayout)
    pieces = zip(layout.literals, (*values, b""), strict=True)
    assert b"".join(piece for pair in pieces for piece in pair) == b"data: %b\n\n" % event


@pytest.mark.parametrize(
    "event",
    [
        b'{"text":"a","output_ids":[1],"meta_info":{}}',
        b'{"text":"a","meta_info":{"completion_tokens":1}}',
        b'{"text": "a","output_ids":[1],"meta_info":{"completion_tokens":1}}',
        b'{"text":null,"output_ids":[1],"meta_info":{"completion_tokens":1}}',
        b'{"text":"a","output_ids":[1],"meta_info":{"completion_tokens":1},"more":{"completion_tokens":1}}',
    ],
)
def test_an_event_without_a_layout(event: bytes) -> None:
    assert layout_of(event) is None


@pytest.mark.parametrize("style", ["cumulative", "incremental"])
@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("lost", lambda found: [*found[:6], *found[7:]]),
        ("twice", lambda found: [*found[:7], found[6], *found[7:]]),
        (
            "one id too many",
            lambda found: [*found[:6], found[6].replace(b'"output_ids":[', b'"output_ids":[7,'), *found[7:]],
        ),
        (
            "one logprob too many",
            lambda found: [
                *found[:6],
                found[6].replace(b'"output_token_logprobs":[', b'"output_token_logprobs":[[-0.5,7,null],'),
                *found[7:],
            ],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tokens_that_are_missing_or_doubled_show(style: str, name: str, spoil: Any) -> None:
    """Exactly as if every event had been decoded: the reply is the same, also where it is no exact one."""
    fast, slow = StreamedReply(), decoded()
    for event in spoil(events([[(7, -0.5, "a")]] * 10, style)):
        fast.feed(event)
        slow.feed(event)
    assert outcome(fast) == outcome(slow)
    reply = fast.reply()
    assert reply is not None
    if style == "incremental" and name == "lost":
        assert reply.fault(4, logprobs_asked=True) is not None
