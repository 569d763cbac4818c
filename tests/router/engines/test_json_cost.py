"""What may be read of a large body: neither text nor token ids are too much, and a million small things are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import Raw

from router.engines import json_cost
from router.engines.form import limits as limits_module
from router.engines.form.limits import PromptLimits, TextTooLongError
from router.engines.form.request import GenerateRequest
from router.engines.json_cost import check_weight
from router.errors import BadRequestError, BodyTooLargeError

N = 600_000
LIGHT = [
    b'{"text": "' + b"a, b: [c] {d} " * (N // 4) + b'"}',
    b'{"text": "' + b'\\"a\\": [1, 2], ' * (N // 4) + b'"}',
    b'{"text": "' + b"\\\\" * N + b'"}',
    json.dumps({"messages": [{"role": "user", "content": "a: b, " * 2000}] * 200}).encode(),
]
HEAVY = {
    "lists": b"[" + b"[]," * N + b"[]]",
    "objects": b"[" + b"{}," * N + b"{}]",
    "names": b"{" + b",".join(b'"%07d":0' % number for number in range(60_000)) + b"}",
    "names with white space": b"{" + b",".join(b'"%07d" \n : 0' % number for number in range(60_000)) + b"}",
    "strings": b"[" + b'"a",' * N + b'"a"]',
    "numbers": b"[" + b"1," * N + b"1]",
    "in the middle": b'{"text": "' + b"\\\\" * N + b'", "x": [' + b"[]," * N + b"[]]}",
}


@pytest.mark.parametrize("body", LIGHT)
def test_text_is_light_whatever_is_in_it(body: bytes) -> None:
    json.loads(body)
    check_weight(body)


@pytest.mark.parametrize("body", HEAVY.values(), ids=list(HEAVY))
def test_a_million_small_things_are_too_heavy(body: bytes) -> None:
    with pytest.raises(BodyTooLargeError, match="too many values"):
        check_weight(body)


def test_token_ids_have_a_limit_of_their_own() -> None:
    check_weight(b'{"input_ids": [' + b"1," * N + b"1]}", ids=True)


JSON = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a"\\,:[]{}\n\x01é', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='"\\:,[', max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)


def counted(value: Any) -> tuple[int, int]:
    """Names and containers, by walking it."""
    if isinstance(value, dict):
        inner = [counted(one) for one in value.values()]
        return len(value) + sum(a for a, _ in inner), 1 + sum(b for _, b in inner)
    if isinstance(value, list):
        inner = [counted(one) for one in value]
        return sum(a for a, _ in inner), 1 + sum(b for _, b in inner)
    return 0, 0


@settings(deadline=None)
@given(JSON, st.integers(0, 6), st.integers(0, 6), st.sampled_from([1, 2, 3, 64]), st.sampled_from([0, 3, 256]))
def test_what_is_inside_of_strings_does_not_count(value: Any, names: int, containers: int, step: int, few: int) -> None:
    """Held against a walk of the value, with limits so small, and in steps so short, that each place of a body is an edge."""
    body = json.dumps(value, ensure_ascii=False).encode()
    has_names, has_containers = counted(value)
    with pytest.MonkeyPatch.context() as patched:
        for name, limit in (
            ("LIGHT", 0),
            ("MAX_NAMES", names),
            ("MAX_CONTAINERS", max(containers, 50)),
            ("_STEP", step),
            ("_FAR", step),
            ("_FEW", few),
        ):
            patched.setattr(json_cost, name, limit)
        heavy = has_names > names or has_containers > max(containers, 50)
        try:
            check_weight(body)
        except BodyTooLargeError:
            assert heavy
        else:
            assert not heavy


def parsed(limits: PromptLimits, **fields: Any) -> GenerateRequest:
    return GenerateRequest.parse(json.dumps(fields).encode(), limits)


def test_the_limits_of_a_prompt() -> None:
    """A token more is refused on each way in; texts by their characters, before anybody has encoded them."""
    limits = PromptLimits(replies=4, tokens=10)
    for field, fits, long in (
        ("text", "é" * 80, "é" * 81),
        ("input_ids", [7] * 10, [7] * 11),
        ("prompt_segments", [{"ids": [7] * 10}], [{"ids": [7] * 6}, {"ids": [7] * 5}]),
        ("prompt_segments", [{"text": "a" * 80}], [{"text": "a" * 41}, {"text": "a" * 40}]),
    ):
        for batch in (False, True):
            parsed(limits, **{field: [fits] if batch else fits})
            with pytest.raises(BodyTooLargeError, match="--max-text-tokens"):
                parsed(limits, **{field: [fits, long] if batch else long})


@given(
    st.text(alphabet='aé你🙂"\\\n\x01', min_size=1, max_size=30), st.integers(1, 8), st.booleans(), st.integers(1, 5)
)
@example("a", 8, False, 5)  # as long as the limit, and its JSON two quotes longer
def test_a_text_within_the_limit_is_never_refused_unread(piece: str, count: int, ascii_only: bool, step: int) -> None:
    """However its characters are written; and one that is written plainly is refused as soon as it is too long."""
    text = piece * count
    raw = Raw(json.dumps(text, ensure_ascii=ascii_only).encode())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(limits_module, "_STEP", step)
        PromptLimits(tokens=-(-len(text) // 8)).check_raw_text(raw)
        if b"\\" not in bytes(raw) and len(text) > 8:
            with pytest.raises(TextTooLongError):
                PromptLimits(tokens=(len(text) - 1) // 8).check_raw_text(raw)


@pytest.mark.parametrize("field", ["text", "input_ids", "prompt_segments"])
def test_the_limit_of_a_batch_counts_prompts_times_samples(field: str) -> None:
    limits, prompt = PromptLimits(replies=4), {"text": "a", "input_ids": [7], "prompt_segments": [{"ids": [7]}]}[field]
    parsed(limits, **{field: [prompt] * 4})
    parsed(limits, **{field: [prompt] * 2}, sampling_params={"n": 2})
    for count, samples in ((5, 1), (2, 3)):
        with pytest.raises(BadRequestError, match="--max-batch"):
            parsed(limits, **{field: [prompt] * count}, sampling_params={"n": samples})
