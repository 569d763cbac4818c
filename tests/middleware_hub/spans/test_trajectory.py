"""A chain laid flat is what a list of its tokens would be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from middleware_hub.spans.chain import (
    SpanFlag,
    TokenSpan,
    Versions,
    chain_ids,
    pack_ids,
    unpack_ids,
)
from middleware_hub.spans.trajectory import flatten
from tests.middleware_hub.spans.test_chain import DOUBLES, INT32, SINGLES, bits, context, sampled


@dataclass
class Token:
    id: int
    mask: int
    logprob: float | None
    version: str


@st.composite
def forests(draw: st.DrawFn) -> list[tuple[TokenSpan, list[Token], SpanFlag]]:
    """Spans hung below each other at random, each with the plain list of tokens that its whole chain is."""
    made: list[tuple[TokenSpan, list[Token], SpanFlag]] = []
    serial = 0
    for _ in range(draw(st.integers(1, 8))):
        parent, before, flags = None, [], SpanFlag.NONE
        take = 0
        if made and draw(st.booleans()):
            parent, whole, flags = made[draw(st.integers(0, len(made) - 1))]
            take = draw(st.integers(0, len(parent)))
            before = whole[: parent.offset + take]
        count = draw(st.integers(0, 5))
        ids = list(range(serial, serial + count))
        serial += count
        own = draw(st.sampled_from([SpanFlag.NONE, SpanFlag.UNCERTAIN, SpanFlag.SPLIT, SpanFlag.BOS, SpanFlag.RECUT]))
        if count == 0 or draw(st.booleans()):
            tokens = [Token(i, 0, 0.0, "") for i in ids]
            span = context(ids, parent, take, own)
        else:
            names = draw(st.lists(st.sampled_from(["1", "2", "default"]), min_size=count, max_size=count))
            logprobs = draw(st.none() | st.lists(DOUBLES | SINGLES, min_size=count, max_size=count))
            versions: Versions = names[0]
            if len(set(names)) > 1 or draw(st.booleans()):  # runs as an engine may write them: neighbours may be equal
                joined = draw(st.booleans())
                ends = [
                    end for end in range(1, count + 1) if not joined or names[end - 1 : end] != names[end : end + 1]
                ]
                versions = tuple((names[end - 1], end) for end in ends)
            tokens = [Token(i, 1, None if logprobs is None else logprobs[k], names[k]) for k, i in enumerate(ids)]
            span = sampled(ids, parent, take, versions=versions, logprobs=logprobs, flags=own)
        made.append((span, before + tokens, flags | own))
    return made


@given(forests(), st.data())
def test_a_chain_laid_flat_is_the_list_of_its_tokens(
    forest: list[tuple[TokenSpan, list[Token], SpanFlag]], data: st.DataObject
) -> None:
    """Whatever forks where: ids, mask, logprobs and versions are those of a plain list of tokens."""
    span, whole, flags = data.draw(st.sampled_from(forest))
    take = data.draw(st.integers(0, len(span)))
    tail = data.draw(st.lists(INT32, max_size=3))
    tokens = whole[: span.offset + take] + [Token(i, 0, 0.0, "") for i in tail]

    flat = flatten(span, take, pack_ids(tail))

    assert flat.token_ids.tolist() == [t.id for t in tokens]
    assert unpack_ids(chain_ids(span, take)) == [t.id for t in tokens[: len(tokens) - len(tail)]]
    assert flat.loss_mask.tolist() == [t.mask for t in tokens]
    logprobs = [t.logprob for t in tokens if t.logprob is not None]
    if len(logprobs) < len(tokens):
        assert flat.logprobs is None
        assert "no_logprobs" in flat.reasons
    else:
        assert flat.logprobs is not None
        assert bits(flat.logprobs.tolist()) == bits(logprobs)
        assert "no_logprobs" not in flat.reasons
    runs: list[tuple[str, int, int]] = []
    for k, token in enumerate(tokens):
        if token.mask and runs and runs[-1][0] == token.version and runs[-1][2] == k:
            runs[-1] = (token.version, runs[-1][1], k + 1)
        elif token.mask:
            runs.append((token.version, k, k + 1))
    assert list(flat.weight_versions) == runs
    first = next((k for k, t in enumerate(tokens) if t.mask), len(tokens))
    assert flat.response_length == len(tokens) - first
    for flag, name in ((SpanFlag.UNCERTAIN, "version_uncertain"), (SpanFlag.RECUT, "cut_in_token")):
        assert (name in flat.reasons) == bool(flags & flag)


def test_nothing_laid_flat_is_empty() -> None:
    flat = flatten(None, 0)
    assert (len(flat.token_ids), flat.weight_versions, flat.reasons, flat.response_length) == (0, (), (), 0)
    assert chain_ids(None, 0) == b""


def test_a_run_of_versions_ends_where_a_fork_leaves_its_span() -> None:
    reply = sampled([10, 11, 12, 13, 14], context([1]), 1, versions=(("1", 1), ("2", 4), ("3", 5)))
    flat = flatten(context([7], reply, 2), 1)
    assert flat.weight_versions == (("1", 1, 2), ("2", 2, 3))


def test_a_fork_inside_a_span_goes_through_as_many_tokens_as_it_says() -> None:
    reply = sampled([10, 11, 12, 13], context([1, 2]), 2, logprobs=[-1.0, -2.0, -3.0, -4.0])
    fork = context([7], reply, 2)
    flat = flatten(fork, 1)
    assert flat.token_ids.tolist() == [1, 2, 10, 11, 7]
    assert flat.loss_mask.tolist() == [0, 0, 1, 1, 0]
    assert flat.logprobs is not None
    assert flat.logprobs.tolist() == [0.0, 0.0, -1.0, -2.0, 0.0]
    assert flat.weight_versions == (("1", 2, 4),)
    assert fork.offset == 4


def test_versions_in_runs_are_cut_by_a_fork_and_joined_across_spans() -> None:
    reply = sampled([1, 2, 3, 4], versions=(("6", 1), ("7", 3), ("8", 4)))
    following = sampled([5, 6], reply, 3, versions="7")
    assert flatten(following, 2).weight_versions == (("6", 0, 1), ("7", 1, 5))
    assert flatten(following, 0).weight_versions == (("6", 0, 1), ("7", 1, 3))
    assert flatten(reply, 1).weight_versions == (("6", 0, 1),)


def test_runs_with_context_between_them_are_not_joined() -> None:
    first = sampled([1])
    second = sampled([3], context([2], first, 1), 1)
    assert flatten(second, 1).weight_versions == (("1", 0, 1), ("1", 2, 3))


def test_the_response_begins_at_the_first_sampled_token_whatever_follows() -> None:
    reply = sampled([3, 4], context([1, 2]), 2)
    assert flatten(context([5, 6, 7], reply, 2), 3).response_length == 5


def test_reasons_come_from_every_span_of_the_chain_once_each() -> None:
    first = sampled([1], flags=SpanFlag.MISMATCH | SpanFlag.UNCERTAIN, logprobs=[-1.0])
    second = sampled([2], first, 1, flags=SpanFlag.UNCERTAIN, logprobs=[-1.0])
    assert flatten(second, 1).reasons == ("version_uncertain", "engine_mismatch")


def test_a_span_of_which_no_token_is_taken_needs_no_logprobs() -> None:
    """Only tokens that are in the chain count: what a fork left out took its missing logprobs with it."""
    without = sampled([9, 9])
    assert flatten(context([1], without, 0), 1).logprobs is not None


def test_one_sampled_token_without_a_logprob_makes_all_of_them_unknown() -> None:
    with_them = sampled([1], logprobs=[-1.0])
    flat = flatten(sampled([2], with_them, 1), 1)
    assert flat.logprobs is None
    assert flat.reasons == ("no_logprobs",)


def test_arrays_have_the_types_that_are_promised() -> None:
    flat = flatten(sampled([1], logprobs=[-1.0]), 1)
    assert flat.logprobs is not None
    assert (flat.token_ids.dtype, flat.loss_mask.dtype, flat.logprobs.dtype) == (np.int32, np.uint8, np.float64)
