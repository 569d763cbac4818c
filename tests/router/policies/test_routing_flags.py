"""The flags of the policies: SGLang's names and defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.config import CacheAwareConfig, RouterConfig
from router.engines.sglang.worker_request import route_prompt
from router.errors import BadRequestError
from router.flags import config_from_args, parser

PLAIN = ("--middleware", "none")


def parse_config(argv: tuple[str, ...]) -> RouterConfig:
    return config_from_args(parser().parse_args(argv))


def test_the_defaults_are_those_of_sglangs_gateway() -> None:
    assert parse_config(PLAIN).workers.cache_aware == CacheAwareConfig(
        threshold=0.3, balance_abs=64, balance_rel=1.5, eviction_interval=60.0, max_tree_size=1 << 26
    )


def test_every_flag_reaches_the_configuration() -> None:
    flags = (
        *("--policy", "cache_aware", "--cache-threshold", "0.5", "--balance-abs-threshold", "32"),
        *("--balance-rel-threshold", "1.1", "--eviction-interval-secs", "30", "--max-tree-size", "1000"),
        *("--kv-events", "--policy-snapshot", "/var/lib/router/policy", "--policy-snapshot-interval-secs", "5"),
    )
    made = parse_config((*PLAIN, *flags)).workers
    assert made.routes_by_prompt
    assert made.cache_aware == CacheAwareConfig(0.5, 32, 1.1, 30.0, 1000, Path("/var/lib/router/policy"), 5.0, True)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--cache-threshold", "1.1"),
        ("--cache-threshold", "nan"),
        ("--balance-abs-threshold", "-1"),
        ("--balance-rel-threshold", "0.9"),
        ("--balance-rel-threshold", "inf"),
        ("--eviction-interval-secs", "0"),
        ("--max-tree-size", "0"),
        ("--policy-snapshot-interval-secs", "0"),
        ("--max-idle-secs", "0"),
    ],
)
def test_invalid_values_are_refused_by_flag_name(flag: str, value: str) -> None:
    with pytest.raises(BadRequestError, match=flag):
        parse_config((*PLAIN, flag, value))


def test_manual_has_a_flag_for_idle_keys() -> None:
    assert parse_config((*PLAIN, "--policy", "manual")).workers.max_idle == 3600
    assert parse_config((*PLAIN, "--policy", "manual", "--max-idle-secs", "5")).workers.max_idle == 5


@pytest.mark.parametrize("flags", [("--kv-events",), ("--policy-snapshot", "file")])
def test_flags_that_the_policy_would_ignore_are_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(BadRequestError, match=f"{flags[0]}.*cache_aware"):
        parse_config((*PLAIN, "--policy", "round_robin", *flags))


@pytest.mark.parametrize(
    ("body", "text", "ids"),
    [
        (b'{"text": "a"}', "a", None),
        (b'{"text": ["a", "b"]}', "a", None),
        (b'{"input_ids": [1, 2]}', None, [1, 2]),
        (b'{"input_ids": [2147483648, 4294967295]}', None, [1 << 31, (1 << 32) - 1]),
        (b'{"input_ids": [[1, 2], [3]], "other": {}}', None, [1, 2]),
        (b'{"input_ids": [1, [2]]}', None, None),
        (b'{"input_ids": [[], [1]]}', None, None),
        (b'{"input_ids": [4294967296]}', None, None),
        (b'{"input_ids": [-1]}', None, None),
        (b'{"text": "", "input_ids": []}', None, None),
        (b'{"text": []}', None, None),
        (b'{"text": 5}', None, None),
        (b'{"text": "\xff"}', None, None),
        (b"[" * 100_000, None, None),
        (b"", None, None),
    ],
)
def test_the_prompt_of_a_body(body: bytes, text: str | None, ids: list[int] | None) -> None:
    assert route_prompt(body)[:2] == (text, ids)


@pytest.mark.parametrize(
    ("body", "alone"),
    [
        (b'{"text": "a"}', True),
        (b'{"text": ["a", "b"]}', False),
        (b'{"text": ["a"]}', False),
        (b'{"input_ids": [1, 2]}', True),
        (b'{"input_ids": [[1, 2]]}', False),
    ],
)
def test_whether_a_prompt_is_the_only_one(body: bytes, alone: bool) -> None:
    assert route_prompt(body).alone is alone
