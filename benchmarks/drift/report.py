"""From rollouts to figures, and from figures to tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tokenizers import Tokenizer

from benchmarks.drift.counts import LENGTHS, Change, Share, changes, cut, pooled, wilson
from benchmarks.drift.sampling import Played, Rollout
from benchmarks.pages import table
from middleware_hub.drift.cli import LoggedReply

Figures = dict[str, Any]
TRAINED, RANDOM = "trained", "random"
"""The models, by their names in tables."""


def logged(one: Rollout) -> LoggedReply:
    """Return a rollout as `tito-router drift` reads it."""
    return LoggedReply(0, "", one["prompt"], one["text"], one["ids"])


def by_kind(rollouts: Sequence[Rollout], tokenizer: Tokenizer) -> list[Figures]:
    """Return a row for each kind and temperature, and one for all kinds at each temperature."""
    found = changes([logged(one) for one in rollouts], tokenizer)
    groups: dict[tuple[str, float], list[Change]] = defaultdict(list)
    for one, change in zip(rollouts, found, strict=True):
        groups[one["kind"], one["temperature"]].append(change)
        groups["all", one["temperature"]].append(change)
    return [
        {
            "kind": kind,
            "temperature": temperature,
            "rollouts": len(each),
            "tokens": asdict(pooled([(one.alone, one.sampled) for one in each])),
            "tokens_whole": asdict(pooled([(one.whole, one.sampled) for one in each])),
            "changed": asdict(wilson(sum(one.alone > 0 for one in each), len(each))),
            "examples": [one.example for one in each if one.example != ("", "")][:4],
        }
        for (kind, temperature), each in groups.items()
    ]


def by_length(rollouts: Sequence[Rollout], tokenizer: Tokenizer) -> list[Figures]:
    """Return a row for each temperature and length: the rollouts that have as many tokens, as if they had ended there."""
    rows: list[Figures] = []
    for temperature in sorted({one["temperature"] for one in rollouts}):
        same = [logged(one) for one in rollouts if one["temperature"] == temperature]
        for length in LENGTHS:
            short = [one for each in same if (one := cut(each, length, tokenizer)) is not None]
            if not short:
                continue
            found = changes(short, tokenizer)
            rows.append(
                {
                    "temperature": temperature,
                    "length": length,
                    "tokens": asdict(pooled([(one.alone, one.sampled) for one in found])),
                    "changed": asdict(wilson(sum(one.alone > 0 for one in found), len(found))),
                }
            )
    return rows


def by_loop(played: Sequence[Played], tokenizer: Tokenizer) -> list[Figures]:
    """Return a row for each loop: what its last sequence has, what all have, and what encoding each reply again loses."""
    groups: dict[str, list[Played]] = defaultdict(list)
    for one in played:
        groups[one["loop"]].append(one)
    rows: list[Figures] = []
    for name, each in groups.items():
        replies = [
            LoggedReply(0, "", reply["prompt"], reply["text"], reply["output_ids"])
            for one in each
            for reply in one["replies"]
            if reply["output_ids"]
        ]
        found = changes(replies, tokenizer)
        rows.append(
            {
                "loop": name,
                "conversations": len(each),
                "next_requests": sum(one["next_requests"] for one in each),
                "verbatim": sum(one["verbatim"] for one in each),
                "last": asdict(pooled([(one["last"], one["sampled"]) for one in each])),
                "covered": asdict(pooled([(one["covered"], one["sampled"]) for one in each])),
                "sequences": sum(one["sequences"] for one in each) / len(each),
                "again": asdict(pooled([(one.alone, one.sampled) for one in found])),
                "replies": len(found),
                "replies_changed": sum(one.alone > 0 for one in found),
            }
        )
    return rows


def percent(found: Mapping[str, Any], digits: int = 1) -> str:
    """Return a share with its interval: `1.2% (0.8-1.7)`; and `-` of nothing."""
    one = Share(**found)
    if not one.whole:
        return "-"
    return f"{100 * one.value:.{digits}f}% ({100 * one.low:.{digits}f}-{100 * one.high:.{digits}f})"


def kinds_table(models: Mapping[str, Sequence[Figures]]) -> str:
    """Return the table of kinds: for each model and temperature the share of tokens, and of rollouts that change at all."""
    columns = [
        (name, temperature)
        for name, rows in models.items()
        for temperature in sorted({row["temperature"] for row in rows})
        if name == TRAINED or temperature == 1.0  # a random model is much the same at any
    ]
    head = ["kind of text"]
    for name, temperature in columns:
        head += [f"{name}, {temperature}: tokens that change", "rollouts that change"]
    kinds = list(dict.fromkeys(row["kind"] for rows in models.values() for row in rows if row["kind"] != "all"))
    rows = []
    for kind in [*kinds, "all"]:
        cells = [f"**{kind}**" if kind == "all" else kind]
        for name, temperature in columns:
            same = [row for row in models[name] if (row["kind"], row["temperature"]) == (kind, temperature)]
            cells += [percent(same[0]["tokens"], 2), percent(same[0]["changed"], 0)] if same else ["-", "-"]
        rows.append(cells)
    return table(head, rows)


def loops_table(rows: Iterable[Figures]) -> str:
    """Return the table of loops."""
    head = ("loop", "verbatim", "tokens in the last sequence", "sequences", "in all of them", "lost by encoding again")
    return table(
        head,
        [
            [
                row["loop"],
                f"{row['verbatim']} of {row['next_requests']}",
                percent(row["last"], 0),
                f"{row['sequences']:.1f}",
                f"{100 * Share(**row['covered']).value:.0f}%",
                percent(row["again"], 2),
            ]
            for row in rows
        ],
    )


def gradients_table(models: Mapping[str, Sequence[Figures]]) -> str:
    """Return the table of gradients: a row for each step."""
    head = ["model", "rollouts of", "tokens", "change", "rollouts that change", "mean difference of logprobs: our ids"]
    head += ["encoded again: mean, largest", "cosine of the gradients", "of those that change alone"]
    rows = []
    for name, steps in models.items():
        for one in steps:
            drifted = "-" if one["drifted"] is None else f"{one['mean_drifted']:.2f}, {one['drifted']:.1f}"
            alone = "-" if one["cosine_changed"] is None else f"{one['cosine_changed']:.3f}"
            rows.append(
                [
                    name,
                    one["kind"],
                    f"{one['sampled']:,}",
                    f"{100 * one['wrong'] / one['sampled']:.1f}%",
                    f"{one['rollouts_changed']} of {one['rollouts']}",
                    f"{one['mean_difference']:.6f}",
                    drifted,
                    f"{one['cosine']:.3f}",
                    alone,
                ]
            )
    return table(head, rows, words=2)
