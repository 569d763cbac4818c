"""Request ids that nobody can name: put onto a request, and taken off its reply, wherever that is cut into pieces."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.engines.form.worker_request import WorkerRequest
from router.errors import BadRequestError
from router.http.upstream import Take
from router.proxy.in_flight import RID_LENGTH
from router.proxy.request_ids import RequestIds, with_private_ids
from router.proxy.worker_reply import WorkerReply

NAMES = st.lists(st.text(max_size=40), min_size=1, max_size=4)


def replies(ids: RequestIds, count: int) -> list[bytes]:
    return [
        json.dumps({"text": f"{rid}!", "meta_info": {"id": rid, "finish_reason": None}}).encode()
        for rid in ids.rids[:count]
    ]


@given(names=NAMES)
def test_ids_are_like_any_others(names: list[str]) -> None:
    """As long as those that workers make up, all different, and others each time."""
    first, second = RequestIds(names), RequestIds(names)
    assert {len(rid) for rid in first.rids} == {RID_LENGTH}
    assert len({*first.rids, *second.rids}) == 2 * len(names)


@given(names=NAMES | st.lists(st.sampled_from(["a" * RID_LENGTH, "s:1", "s:12"]), min_size=1, unique=True))
def test_ids_that_begin_with_the_names(names: list[str]) -> None:
    """For a worker that is asked a second time. Not for names that JSON spells in several ways; no id begins another."""
    ids = RequestIds(names, begin_with_names=True)
    for reply, rid, name in zip(replies(ids, len(names)), ids.rids, names, strict=True):
        assert rid.startswith(name) or not name.isascii() or not name.replace(":", "").isalnum()
        assert rid != name
        assert json.loads(ids.restored(reply))["meta_info"]["id"] == name
        odd = json.dumps([f"x{rid}", f"{rid}0", rid[1:], rid.upper()]).encode()
        if rid.startswith(name) and name:
            assert ids.restored(odd) == odd
    assert not any(one != other and one.startswith(other) for one in ids.rids for other in ids.rids)


@given(names=NAMES)
def test_only_whole_strings_are_names(names: list[str]) -> None:
    """What merely looks like an id is left as it is: a longer string, or a number that was not given."""
    ids = RequestIds(names)
    for reply, name in zip(replies(ids, len(names)), names, strict=True):
        shown = json.loads(ids.restored(reply))
        assert shown["meta_info"]["id"] == name
    stem = ids.rids[0][:-1]
    others = {ids.rids[0] + "0", stem + "f", stem, ids.rids[0].upper()} - {ids.rids[0]}  # an id may have no letter
    odd = json.dumps(sorted(others)).encode()
    assert ids.restored(odd) == odd


class Rest:
    """The rest of a reply."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = [piece for piece in pieces if piece]

    async def read(self) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""

    async def flow(self, take: Take) -> None:
        while self.pieces and take(self.pieces.pop(0)):
            pass

    def close(self) -> None: ...


@given(names=NAMES, cuts=st.lists(st.integers(0, 2000)), stream=st.booleans())
def test_a_reply_in_pieces(names: list[str], cuts: list[int], stream: bool) -> None:
    """Whatever the pieces, the client gets whole JSON under its names."""
    ids = RequestIds(names)
    found = replies(ids, len(names))
    body = b"".join(b"data: %b\n\n" % one for one in found) if stream else b"[%b]" % b",".join(found)
    places = sorted({min(cut, len(body)) for cut in cuts})
    pieces = [body[begin:end] for begin, end in zip([0, *places], [*places, len(body)], strict=True)]
    reply = WorkerReply(
        200, [], pieces[0] if stream else body, stream=stream, rest=Rest(pieces[1:]) if stream else None
    )
    reply.edit(ids)
    asyncio.run(reply.gather())
    got = reply.body
    shown: list[Any] = [json.loads(event[6:]) for event in got.split(b"\n\n")[:-1]] if stream else json.loads(got)
    assert [one["meta_info"]["id"] for one in shown] == names


def made(body: dict[str, Any]) -> tuple[dict[str, Any], RequestIds | None]:
    """The request that goes out for this one."""
    raw = msgspec.json.encode(body)
    out, request, ids = with_private_ids(raw, WorkerRequest.parse(raw))
    return msgspec.json.decode(out if request is None else request.body), ids


def test_a_name_does_not_go_out() -> None:
    for body in (
        {"text": "a", "rid": "mine"},
        {"text": ["a", "b"], "rid": "mine"},
        {"text": ["a", "b"], "rid": ["mine", "mine too"]},
        {"input_ids": [1], "rid": "mine", "stream": True},
        {"text": "a", "rid": "mine", "sampling_params": {"n": 2}},
        {"input_embeds": [[0.5]], "rid": "mine"},
    ):
        out, ids = made(body)
        assert "mine" not in json.dumps(out)
        assert out.keys() - {"rid"} == body.keys() - {"rid"}
        assert (ids is None) is ("rid" not in out)


def test_what_has_no_name_needs_no_ids() -> None:
    for body in ({"text": "a"}, {"text": "a", "rid": None}, {"input_embeds": [[0.5]]}):
        out, ids = made(body)
        assert ids is None
        assert out.get("rid") != ""


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b'{"text": "a", "rid": ["x"]}', b'{"text": ["a"], "rid": "x'])
def test_what_cannot_be_looked_at_does_not_go_out(raw: bytes) -> None:
    with pytest.raises(BadRequestError):
        with_private_ids(raw, WorkerRequest.parse(raw))
