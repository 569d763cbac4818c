"""The flags of the policies: SGLang's names and defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.config import RouterConfig
from router.errors import BadRequestError
from router.flags import config_from_args, parser
from router.policies.cache_aware import CacheAwareParameters
from router.policies.manual import ManualParameters

PLAIN = ("--middleware", "none")


def parse_config(argv: tuple[str, ...]) -> RouterConfig:
    return config_from_args(parser().parse_args(argv))


def test_the_defaults_are_those_of_sglangs_gateway() -> None:
    assert parse_config((*PLAIN, "--policy", "cache_aware")).workers.parameters == CacheAwareParameters(
        threshold=0.3, balance_abs=64, balance_rel=1.5, eviction_interval=60.0, max_tree_size=1 << 26
    )


def test_every_flag_reaches_the_configuration() -> None:
    flags = (
        *("--policy", "cache_aware", "--cache-threshold", "0.5", "--balance-abs-threshold", "32"),
        *("--balance-rel-threshold", "1.1", "--eviction-interval-secs", "30", "--max-tree-size", "1000"),
        *("--kv-events", "--policy-snapshot", "/var/lib/router/policy", "--policy-snapshot-interval-secs", "5"),
    )
    made = parse_config((*PLAIN, *flags)).workers
    assert made.policy == "cache_aware"
    assert made.parameters == CacheAwareParameters(0.5, 32, 1.1, 30.0, 1000, Path("/var/lib/router/policy"), 5.0, True)


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
    assert parse_config((*PLAIN, "--policy", "manual")).workers.parameters == ManualParameters(3600)
    assert parse_config((*PLAIN, "--policy", "manual", "--max-idle-secs", "5")).workers.parameters == ManualParameters(
        5
    )


@pytest.mark.parametrize("flags", [("--kv-events",), ("--policy-snapshot", "file")])
def test_flags_that_the_policy_would_ignore_are_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(BadRequestError, match=f"{flags[0]}.*cache_aware"):
        parse_config((*PLAIN, "--policy", "round_robin", *flags))
