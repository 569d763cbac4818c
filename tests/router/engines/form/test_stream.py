"""Streams of `/generate`: splitting them into events, and assembling replies."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from router.engines.events import END_BYTES, EventSplitter, event_data, event_index, has_ended, has_event
from router.engines.form.reply import LOGPROB_FIELDS, Reply, UnreadableReplyError, edit_meta, read_reply
from router.engines.form.stream import StreamedReply
from tests.router.engines.form.json_values import compact

# Streams: bytes into events ----------------------------------------------------------------------------------------------

EVENTS = [
    b'data: {"text":"a\\n\\nb"}\n\n',
    b": ping\n\n",
    "data: é\n\n".encode(),
    b"data: x\ndata: y\n\n",
    b"id: 1\r\ndata: x\r\n\r\n",
    b"data: [DONE]\n\n",
]


@given(st.lists(st.sampled_from(EVENTS), max_size=6), st.sampled_from([b"", b"data: hal", b"\n"]), st.data())
def test_chunking_does_not_change_the_events(events: list[bytes], rest: bytes, data: st.DataObject) -> None:
    whole = b"".join(events) + rest
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    splitter, found = EventSplitter(), []
    for begin, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        found += list(splitter.feed(whole[begin:end]))
    assert found == events
    assert splitter.flush() == rest
    assert splitter.flush() == b""


@given(
    st.lists(st.sampled_from([*EVENTS, b"data: {}", b"\n", b"\n\n", b"data: {\n}\n\n", b"data: x}\n\n"]), max_size=5)
)
def test_an_event_alone_in_its_chunk_is_the_event_that_feeding_finds(chunks: list[bytes]) -> None:
    """And only with nothing before it that waits for its end."""
    splitter = EventSplitter()
    for chunk in chunks:
        only = splitter.only(chunk)
        found = list(splitter.feed(chunk))
        if only is not None:
            assert [event_data(event) for event in found] == [only]
            assert found == [chunk]


def test_events_byte_by_byte() -> None:
    splitter = EventSplitter()
    assert [event for byte in b"".join(EVENTS) for event in splitter.feed(bytes([byte]))] == EVENTS


@given(st.lists(st.binary(max_size=8)))
@example([b"\n", b"\n\n", b"\n"])
@example([b"\n\r", b"\n\r\n", b"\r"])
def test_no_byte_of_a_stream_is_lost(chunks: list[bytes]) -> None:
    splitter = EventSplitter()
    events = [event for chunk in chunks for event in splitter.feed(chunk)]
    assert b"".join(events) + splitter.flush() == b"".join(chunks)
    assert all(event.endswith((b"\n\n", b"\n\r\n")) for event in events)


def test_a_splitter_can_be_used_again_after_a_flush() -> None:
    splitter = EventSplitter()
    assert list(splitter.feed(b"data: a\n\ndata: b\n")) == [b"data: a\n\n"]
    assert splitter.flush() == b"data: b\n"
    assert list(splitter.feed(b"\ndata: c\n\n")) == [b"\ndata: c\n\n"]


PING = b": ping - 2026-11-28 04:10:46.123456+00:00\r\n\r\n"


@pytest.mark.parametrize(
    ("end", "ended"),
    [
        (b"data: [DONE]\n\n", True),
        (b"data:[DONE]", True),
        (b"event: end\r\ndata: [DONE] \r\n\r\n", True),
        (b"data: [DONE]\n\n" + 3 * PING, True),
        (b"data: [DONE]\n:\n\n: half a comm", True),
        (PING, False),
        (b": data: [DONE]\n\n", False),
        (b"data: [DONE]: more\n\n", False),
        (b"data: [DONE] x\n\n", False),
        (b"data: [DONE]\n\ndata: {}\n\n", False),
        (b"data: [DONE]\n\n" + PING + b"data: {}\n\n", False),
        (b'data: {"text":"data: [DONE]"}\n\n', False),
    ],
)
def test_only_comments_may_follow_the_end_of_a_stream(end: bytes, ended: bool) -> None:
    stream = b'data: {"text":"a"}\n\n' + end
    assert has_ended(stream) is has_ended(stream[-END_BYTES:]) is ended


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: [DONE]\n\n", b"[DONE]"),
        (b"data:x\n\n", b"x"),
        (b"data: \n\n", b""),
        (b": ping\n\n", None),
        (b"event: error\n\n", None),
        (b'data: {"a": 1}\r\n\r\n', b'{"a": 1}'),
        (b'event: message\r\nid: 7\r\ndata:{"a": 1}\r\n\r\n', b'{"a": 1}'),
        (b"data: x\ndata: y\n\n", b"x\ny"),
        (b"\n\n", None),
    ],
)
def test_the_payload_of_an_event(event: bytes, data: bytes | None) -> None:
    assert event_data(event) == data


@given(st.lists(st.sampled_from([b"\n", b"\r", b"data: x", b"\r\n", b": y\n\n"])))
def test_an_event_is_seen_wherever_a_splitter_finds_one(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    assert has_event(whole) is bool(list(EventSplitter().feed(whole)))


@pytest.mark.parametrize(
    ("data", "index"),
    [(b'{"index": 3}', 3), (b'{"text": "a"}', 0), (b'{"index": null}', 0), (b'{"index": "x"}', 0), (b"[DONE]", 0)],
)
def test_which_generation_an_event_belongs_to(data: bytes, index: int) -> None:
    assert event_index(data) == index


# Streams: events into a reply --------------------------------------------------------------------------------------------

Token = tuple[int, float, str]
TOKENS = st.tuples(st.integers(0, 300), st.floats(-50, 0, width=32), st.text(alphabet='ab ,[]{}"\\é\n', max_size=3))


def payloads(
    steps: list[list[Token]],
    style: str,
    *,
    logprobs: bool = True,
    texts: bool = False,
    compact: bool = True,
    counted: bool = True,
) -> list[bytes]:
    """Return the events of a generation in one of the three forms; the last event says how it ended."""
    out = []
    before: list[Token] = []
    for number, step in enumerate(steps):
        so_far = before + step
        ids = so_far if style == "cumulative" else step
        rest = step if style == "incremental" else so_far
        meta: dict[str, Any] = {
            "id": "x",
            "prompt_tokens": 4,
            "finish_reason": {"type": "length"} if number == len(steps) - 1 else None,
        }
        if counted:
            meta["completion_tokens"] = len(so_far)
        if logprobs:
            meta["output_token_logprobs"] = [[value, i, piece if texts else None] for i, value, piece in rest]
        event = {"text": "".join(t[2] for t in rest), "output_ids": [t[0] for t in ids], "meta_info": meta}
        out.append(json.dumps(event, separators=(",", ":") if compact else None).encode())
        before = so_far
    return out


def read(events: list[bytes]) -> StreamedReply:
    streamed = StreamedReply()
    for event in events:
        streamed.feed(event)
        assert streamed.error is None
    return streamed


STEPS = st.lists(st.lists(TOKENS, max_size=4), min_size=1, max_size=6).filter(lambda steps: bool(steps[0]))


def added(events: list[bytes]) -> list[str]:
    """Return what a reader gets that takes `added` after each event."""
    streamed, found = StreamedReply(added=[]), []
    for event in events:
        streamed.feed(event)
        assert streamed.added is not None
        found.append("".join(json.loads(piece) for piece in streamed.added))
        streamed.added.clear()
    return found


@pytest.mark.parametrize("style", ["cumulative", "incremental", "mixed"])
@given(steps=STEPS, compact=st.booleans())
def test_what_an_event_adds_to_the_text_is_reported_once(style: str, steps: list[list[Token]], compact: bool) -> None:
    expected = ["".join(text for _, _, text in step) for step in steps]
    assert added(payloads(steps, style, texts=False, compact=compact)) == expected


@pytest.mark.parametrize("style", ["cumulative", "incremental", "mixed"])
def test_what_is_added_is_reported_once_without_logprobs_too(style: str) -> None:
    steps = [[(1, -0.5, "one")], [(2, -0.5, " two")], [], [(3, -0.5, " three")]]
    events = payloads(steps, style, texts=False, compact=True, logprobs=False)
    assert added(events) == ["one", " two", "", " three"]


@pytest.mark.parametrize("style", ["cumulative", "incremental", "mixed"])
@given(steps=STEPS, texts=st.booleans(), compact=st.booleans())
@example(steps=[[(1, -0.5, "a")], [(12, -0.5, "b")], []], texts=False, compact=True)
@example(steps=[[(1, -0.5, "a")], [(1, -0.5, "a")], [(1, -0.5, "a")]], texts=True, compact=True)
def test_every_form_of_stream_gives_the_same_reply(
    style: str, steps: list[list[Token]], texts: bool, compact: bool
) -> None:
    """Even if events bring nothing new, or the logprobs contain texts that look like JSON."""
    tokens = [token for step in steps for token in step]
    reply = read(payloads(steps, style, texts=texts, compact=compact)).reply()
    assert reply == Reply(
        ids=[t[0] for t in tokens],
        text="".join(t[2] for t in tokens),
        logprobs=[t[1] for t in tokens],
        logprob_ids=[t[0] for t in tokens],
        request_id="x",
        prompt_tokens=4,
        completion_tokens=len(tokens),
        version="default",
        versions=None,
        finish_type="length",
        matched=None,
    )


@pytest.mark.parametrize("style", ["cumulative", "incremental", "mixed"])
@given(steps=STEPS, compact=st.booleans(), data=st.data())
def test_a_stream_that_is_cut_anywhere_is_the_plain_reply(
    style: str, steps: list[list[Token]], compact: bool, data: st.DataObject
) -> None:
    """The same bytes, however a network cuts them: between events, inside of them, or several events at once."""
    events = payloads(steps, style, compact=compact)
    stream = b"".join(b"data: %b\n\n" % event for event in events) + b"data: [DONE]\n\n"
    ends = [end + 2 for end in range(len(stream)) if stream.startswith(b"\n\n", end)]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)) | st.sampled_from(ends), max_size=12)))
    splitter, streamed = EventSplitter(), StreamedReply()
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        for event in splitter.feed(stream[begin:end]):
            payload = event_data(event)
            assert payload is not None
            streamed.feed(payload)
    assert (streamed.done, streamed.error, splitter.flush()) == (True, None, b"")
    plain = payloads([[token for step in steps for token in step]], "cumulative")[0]
    assert streamed.reply() == read_reply(plain)[0]


@pytest.mark.parametrize("style", ["cumulative", "incremental", "mixed"])
@given(steps=STEPS)
def test_without_logprobs_one_of_two_readings_is_the_reply(style: str, steps: list[list[Token]]) -> None:
    """If ids are deltas, only the ids can show whether the text is one, too."""
    tokens = [token for step in steps for token in step]
    reply = read(payloads(steps, style, logprobs=False)).reply()
    assert reply is not None
    assert reply.ids == [t[0] for t in tokens]
    assert reply.logprobs is None
    assert "".join(t[2] for t in tokens) in (reply.text, reply.other_text)
    if style == "cumulative":
        assert reply.other_text is None, "there is no doubt"


@given(steps=STEPS, logprobs=st.booleans(), texts=st.booleans(), data=st.data())
def test_a_cumulative_stream_may_be_ahead_of_its_own_count(
    steps: list[list[Token]], logprobs: bool, texts: bool, data: st.DataObject
) -> None:
    """SGLang counts the tokens when it makes an event and prints them when it sends it. Only the last event is exact."""
    events = [json.loads(event) for event in payloads(steps, "cumulative", logprobs=logprobs, texts=texts)]
    counted = 1
    for event in events[:-1]:
        counted = data.draw(st.integers(counted, event["meta_info"]["completion_tokens"]))
        event["meta_info"]["completion_tokens"] = counted
    tokens = [token for step in steps for token in step]
    raw = [compact(event) for event in events]
    reply = read(raw).reply()
    assert reply is not None
    assert (reply.ids, reply.text) == ([t[0] for t in tokens], "".join(t[2] for t in tokens))
    assert reply.logprobs == ([t[1] for t in tokens] if logprobs else None)
    assert reply.fault(4, logprobs_asked=logprobs) is None
    so_far = read(raw[: data.draw(st.integers(1, len(raw)))]).reply()
    assert so_far is not None
    assert so_far.fault(4, logprobs_asked=logprobs) is None


@pytest.mark.parametrize("joined", [False, True], ids=["alone", "joined to the delta before"])
@given(steps=STEPS)
def test_the_repetition_at_the_end_of_a_stream_of_deltas_is_removed(joined: bool, steps: list[list[Token]]) -> None:
    """SGLang repeats the end of an aborted stream that a pause had retracted. Nothing is lost or doubled."""
    events = [json.loads(event) for event in payloads(steps, "incremental")]
    tokens = [token for step in steps for token in step]
    events[-1]["meta_info"]["finish_reason"] = None
    again = {"text": "".join(t[2] for t in tokens), "output_ids": [tokens[-1][0]]}
    entries = [[t[1], t[0], None] for t in tokens]
    meta = {**events[-1]["meta_info"], "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}
    if joined:
        last = events.pop()
        again = {key: last[key] + again[key] for key in again}
        entries = last["meta_info"]["output_token_logprobs"] + entries
    events.append({**again, "meta_info": {**meta, "output_token_logprobs": entries}})
    reply = read([json.dumps(event).encode() for event in events]).reply()
    assert reply is not None
    assert reply.ids == [t[0] for t in tokens]
    assert reply.text == "".join(t[2] for t in tokens)
    assert reply.logprobs == [t[1] for t in tokens]
    assert reply.fault(4, logprobs_asked=True) is None


@given(steps=STEPS)
def test_a_stream_without_counts_is_read_by_the_start_of_its_events(steps: list[list[Token]]) -> None:
    reply = read(payloads(steps, "cumulative", counted=False)).reply()
    assert reply is not None
    assert reply.ids == [token[0] for step in steps for token in step]
    assert reply.logprob_ids == reply.ids
    assert reply.text == "".join(token[2] for step in steps for token in step)


@given(steps=STEPS, style=st.sampled_from(["cumulative", "incremental", "mixed"]), data=st.data())
def test_a_stream_is_a_reply_at_any_moment(steps: list[list[Token]], style: str, data: st.DataObject) -> None:
    """So what a client saw before it left can be recorded."""
    count = data.draw(st.integers(1, len(steps)))
    streamed = read(payloads(steps, style)[:count])
    tokens = [token for step in steps[:count] for token in step]
    reply = streamed.reply()
    assert reply is not None
    assert (reply.ids, reply.text) == ([t[0] for t in tokens], "".join(t[2] for t in tokens))
    assert reply.fault(4, logprobs_asked=True) is None
    assert streamed.finished is (count == len(steps))
    assert not streamed.done


@given(steps=st.lists(st.lists(TOKENS, min_size=1, max_size=4), min_size=4, max_size=8), logprobs=st.booleans())
def test_the_news_of_a_cumulative_event_can_be_edited_and_completed(steps: list[list[Token]], logprobs: bool) -> None:
    """The client gets the same as if the whole event had been edited. The last one only says how the generation ended.

    So it is with events that are decoded; test_event_shape.py has those that are like one before.
    """
    streamed = StreamedReply()
    for number, event in enumerate(payloads([*steps, []], "cumulative", logprobs=logprobs)):
        streamed.decode(event)
        assert (streamed.news is not None) is (number > 1), (
            "from the third on it is clear that the stream is cumulative"
        )
        if streamed.news is not None:
            assert len(streamed.news) <= len(event)
            edited = streamed.whole(edit_meta(streamed.news, drop=LOGPROB_FIELDS, add={"trajectory": b"[1]"}))
            assert edited == edit_meta(event, drop=LOGPROB_FIELDS, add={"trajectory": b"[1]"})


def test_an_event_that_takes_text_back_is_read_whole() -> None:
    """The last event of a reply that ran into a stop string has less text than those before it."""
    events = payloads([[(1, -0.5, "a")], [(2, -0.5, "b")], [(3, -0.5, "c")], [(4, -0.5, "d")]], "cumulative")
    events[-1] = events[-1].replace(b'"abcd"', b'"ab"')
    streamed = read(events)
    assert streamed.news is None
    reply = streamed.reply()
    assert reply is not None
    assert (reply.ids, reply.text, len(reply.logprobs or ())) == ([1, 2, 3, 4], "ab", 4)


def test_an_event_whose_counts_do_not_fit_is_read_whole() -> None:
    """It starts with what came before, but reports more tokens than it has: one was lost."""
    events = payloads([[(1, -0.5, "a")], [(2, -0.5, "b")], [(3, -0.5, "c")], [(4, -0.5, "d")]], "cumulative")
    events[-1] = events[-1].replace(b'"completion_tokens":4', b'"completion_tokens":5')
    streamed = read(events)
    assert streamed.news is None
    reply = streamed.reply()
    assert reply is not None
    assert reply.fault(4, logprobs_asked=True) is not None


def test_a_stream_without_output_ids_has_those_of_its_logprobs() -> None:
    """Versions before `output_ids` send such streams."""
    streamed = read([b'{"text":"a","meta_info":{"output_token_logprobs":[[-1.0,5,null]],"completion_tokens":1}}'])
    reply = streamed.reply()
    assert reply is not None
    assert reply.ids == [5]


@pytest.mark.parametrize("text", [b"5", b"null", b'"\xff"'])
def test_a_stream_with_an_invalid_text_cannot_be_read(text: bytes) -> None:
    streamed = StreamedReply()
    streamed.feed(b'{"text":' + text + b',"output_ids":[1],"meta_info":{}}')
    with pytest.raises(UnreadableReplyError, match="text"):
        streamed.reply()


@pytest.mark.parametrize("text", [None, 3, ["a"]])
def test_an_aborted_stream_with_an_invalid_text_cannot_be_read(text: Any) -> None:
    """Its last event is compared with the text before it, in case it repeats that."""
    streamed = StreamedReply()
    for finish in (None, {"type": "abort"}):
        meta = {"finish_reason": finish, "completion_tokens": 1, "output_token_logprobs": [[-0.5, 7, None]]}
        streamed.feed(json.dumps({"text": text, "output_ids": [7], "meta_info": meta}).encode())
    assert streamed.unreadable


def test_a_float_of_a_stream_is_the_same_float() -> None:
    values = [-3.3467748165130615, -0.1, -1e-300, -0.0]
    steps = [[(i, value, "a")] for i, value in enumerate(values)]
    for style in ("cumulative", "incremental", "mixed"):
        reply = read(payloads(steps, style)).reply()
        assert reply is not None
        assert list(map(repr, reply.logprobs or ())) == list(map(repr, values))


def test_the_last_event_decides_on_versions() -> None:
    streamed = StreamedReply()
    for version in ("1", "2"):
        streamed.feed(b'{"text":"a","output_ids":[1],"meta_info":{"weight_version":"%s"}}' % version.encode())
    reply = streamed.reply()
    assert reply is not None
    assert reply.version == "2"


def test_before_the_first_event_there_is_no_reply() -> None:
    streamed = StreamedReply()
    assert streamed.reply() is None
    assert not streamed.finished
    assert not streamed.done


def test_a_stream_without_done_is_not_done() -> None:
    events = payloads([[(1, -0.5, "a")], [(2, -0.5, "b")]], "cumulative")
    streamed = read(events)
    assert streamed.finished
    assert not streamed.done
    streamed.feed(b"[DONE]")
    assert streamed.done
    assert streamed.error is None


def test_done_alone_is_no_reply() -> None:
    streamed = read([b"[DONE]"])
    assert streamed.done
    assert streamed.reply() is None


def test_an_error_in_a_stream_is_kept_with_what_came_before_it() -> None:
    """By then, SGLang has already answered with status 200."""
    streamed = read(payloads([[(1, -0.5, "a")], [(2, -0.5, "b")]], "incremental")[:1])
    streamed.feed(b'{"error": {"message": "out of memory", "code": 500}}')
    assert streamed.error == '{"message": "out of memory", "code": 500}'
    reply = streamed.reply()
    assert reply is not None
    assert (reply.ids, reply.text) == ([1], "a")


@given(STEPS, st.sampled_from(["cumulative", "incremental", "mixed"]), st.booleans())
@example([[(9, -0.5, "")], [(8, -0.5, "")]], "cumulative", True)
def test_a_stream_that_counts_too_many_tokens_is_never_exact(
    steps: list[list[Token]], style: str, logprobs: bool
) -> None:
    """Its lists look like those of another form: a cumulative list must not be taken for what is new."""
    events = []
    for raw in payloads(steps, style, logprobs=logprobs):
        event = json.loads(raw)
        event["meta_info"]["completion_tokens"] += 1
        events.append(json.dumps(event, separators=(",", ":")).encode())
    reply = read(events).reply()
    assert reply is not None
    assert reply.fault(4, logprobs_asked=logprobs)
    if style == "cumulative":
        assert list(reply.ids) == [token[0] for step in steps for token in step]


@pytest.mark.parametrize("missing", ["output_token_logprobs", "output_ids"])
@given(steps=STEPS, data=st.data())
def test_a_cumulative_event_that_lacks_tokens_at_its_end_repeats_no_text(
    missing: str, steps: list[list[Token]], data: st.DataObject
) -> None:
    """It is no event of another form: the text is read once, and the reply contradicts itself."""
    events = payloads(steps, "cumulative")
    last = json.loads(events[-1])
    found = last["meta_info"] if missing in last["meta_info"] else last
    known = sum(map(len, steps[:-1]))
    del found[missing][data.draw(st.integers(known, max(known, len(found[missing]) - 1))) :]
    if missing == "output_ids":  # nobody can tell a list that was cut to its new part from one that has only that
        assume(found[missing] != [token[0] for token in steps[-1]])
    told = [*events[:-1], json.dumps(last, separators=(",", ":")).encode()]
    text = "".join(token[2] for step in steps for token in step)
    reply = read(told).reply()
    assert reply is not None
    assert reply.text == text
    assert "".join(added(told)) == text
    assert (reply.fault(4, logprobs_asked=True) is None) == (not steps[-1])


@given(STEPS)
@example([[(9, -0.5, "a")], [(9, -0.5, "a")], [(9, -0.5, "a")]])
def test_logprobs_that_come_one_event_late_are_those_of_their_tokens(steps: list[list[Token]]) -> None:
    events = payloads(steps, "cumulative")
    late = []
    for raw in events[:-1]:
        event = json.loads(raw)
        event["meta_info"]["output_token_logprobs"].pop()
        late.append(json.dumps(event, separators=(",", ":")).encode())
    reply = read([*late, events[-1]]).reply()
    assert reply is not None
    assert reply.fault(4, logprobs_asked=True) is None
    assert list(reply.logprobs or ()) == [token[1] for step in steps for token in step]


def test_a_long_error_is_shortened() -> None:
    streamed = StreamedReply()
    streamed.feed(json.dumps({"error": "x" * 10_000}).encode())
    assert streamed.error is not None
    assert len(streamed.error) == 500


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"oops",
        b"[]",
        b"{}",
        b'{"text":"a"}',
        b'{"text":"a","output_ids":[1],"meta_info":null}',
        b'{"text":"a","output_ids":["1"],"meta_info":{}}',
        b'{"text":"a","output_ids":[1],"meta_info":{"completion_tokens":"1"}}',
        b'{"text":"a","output_ids":[1],"meta_info":{"output_token_logprobs":[[1]]}}',
        b'{"text":"a","output_ids":[1],"meta_info":{"output_token_logprobs":5}}',
        b'{"output_ids":[1],"meta_info":{}}',
        b'{"text":"a","output_ids":[1],"meta_info":{"id":"\xff"}}',
        b'{"text":"\\ud800","output_ids":[1],"meta_info":{}}',
    ],
    ids=repr,
)
def test_an_event_that_cannot_be_read_is_an_error(data: bytes) -> None:
    streamed = StreamedReply()
    streamed.feed(data)
    assert streamed.error is not None
    assert streamed.error.startswith("an event that cannot be read: ")
