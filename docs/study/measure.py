"""From recorded turns to numbers: does the next request begin with the last one's text and reply, and if not, why?"""

import dataclasses
from collections import Counter
from itertools import pairwise, takewhile
from typing import Any

from chains import Chain, Match, common_prefix, extend, match
from proxy import Turn
from vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class Step:
    """The step from one request to the next."""

    shape: str
    verbatim: bool
    verbatim_end: bool
    """The same with what ended the reply: the EOS token's literal, or the stop string."""
    cause: str
    reply_chars: int
    reply_kept: int
    """Characters of the reply in front of the divergence."""
    example: dict[str, str]


def end_literal(turn: Turn) -> str:
    """What ended the reply and is not in its text."""
    matched = turn.finish.get("matched")
    end = "<|im_end|>" if isinstance(matched, int) else matched or ""
    return "" if turn.reply.endswith(end) else end


def stop_left(turn: Turn) -> bool:
    """Whether the reply still ends in the beginning of the stop string that ended it (see stop_strings.py)."""
    matched = turn.finish.get("matched")
    if not isinstance(matched, str) or turn.reply.endswith(matched):
        return False
    return any(turn.reply.endswith(matched[:n]) for n in range(2, len(matched)))


def compare(turn: Turn, following: str) -> Step:
    """Measure one step."""
    whole = turn.text + turn.reply
    common = common_prefix(whole, following)
    verbatim = common == len(whole)
    return Step(
        turn.shape,
        verbatim,
        following.startswith(whole + end_literal(turn)),
        "" if verbatim else cause(turn, following, common),
        len(turn.reply),
        min(max(0, common - len(turn.text)), len(turn.reply)),
        {}
        if verbatim
        else {
            "common": whole[max(0, common - 30) : common],
            "reply_goes_on": whole[common : common + 40],
            "request_goes_on": following[common : common + 40],
        },
    )


def cause(turn: Turn, following: str, common: int) -> str:
    """Return why a request left the chain, from both texts; "other" is what these rules do not know."""
    kept = common - len(turn.text)
    reply, rest, new = turn.reply, turn.reply[max(kept, 0) :], following[common:]
    thought_end = reply.find("</think>")
    answer_start = len(reply) - len(reply[thought_end + len("</think>") :].lstrip())
    call = reply.find("<tool_call>")
    if kept < 0:
        return "generation prompt not in history" if turn.text[common:].startswith("<think>") else "prompt rewritten"
    if "</search>" in reply[:kept] or "</answer>" in reply[:kept]:
        return "cut by the workflow"
    if not rest.strip():
        return "trailing white space stripped"
    if thought_end >= 0 and kept <= thought_end and "</think>" not in new.split("<|im_end|>")[0]:
        return "thinking dropped"
    if thought_end >= 0 and kept < answer_start:
        return "white space around thinking rewritten"
    if call >= 0 and kept > call:
        return "tool call written anew"
    if call >= 0 and not reply[kept:call].strip():
        return "white space before tool call rewritten"
    if not reply[:kept].strip():
        return "white space in front rewritten"
    return "other"


def replay(turns: list[Turn], vocabulary: Vocabulary) -> tuple[list[Chain], list[Match]]:
    """Run one conversation through the matching model: its chains, and the match of each request but the first."""
    chains: list[Chain] = []
    matches: list[Match] = []
    for turn in turns:
        found = match(chains, turn.text)
        if chains:
            matches.append(found)
        chains.append(extend(found, turn, vocabulary))
    return chains, matches


def cover(chains: list[Chain]) -> list[Chain]:
    """Return the fewest chains that hold each reply whole, the last one first: what `"cover": true` answers with."""
    found = [chains[-1]]
    for chain in reversed(chains):
        if not any(one.continues(chain) for one in found):
            found.append(chain)
    return found


def summarize(conversations: list[list[Turn]], vocabularies: list[Vocabulary]) -> dict[str, Any]:
    """All conversations of one loop, variant and kind of reply."""
    steps = [compare(a, b.text) for turns in conversations for a, b in pairwise(turns)]
    shapes: dict[str, list[Step]] = {}
    for step in steps:
        shapes.setdefault(step.shape, []).append(step)
    causes = Counter(step.cause for step in steps if step.cause)
    row: dict[str, Any] = {
        "conversations": len(conversations),
        "turns": sum(map(len, conversations)),
        "next_requests": len(steps),
        "verbatim": sum(s.verbatim for s in steps),
        "verbatim_with_end": sum(s.verbatim_end for s in steps),
        "reply_chars": sum(s.reply_chars for s in steps),
        "reply_chars_before_divergence": sum(s.reply_kept for s in steps),
        "stop_string_left_in_reply": sum(stop_left(t) for turns in conversations for t in turns),
        "causes": dict(causes.most_common()),
        "verbatim_by_shape": {
            name: f"{sum(s.verbatim for s in found)}/{len(found)}" for name, found in sorted(shapes.items())
        },
        "examples": {name: next(s.example for s in steps if s.cause == name) for name in causes},
    }
    for vocabulary in vocabularies:
        row[vocabulary.name] = _tokens(conversations, vocabulary)
    return row


def _held(covering: list[Chain], chain: Chain, tokens: int) -> int:
    """Of a reply's tokens, which are the last of its chain, count those in the first covering chain that holds it."""
    one = next(one for one in covering if one.continues(chain))
    first = len(chain.ends) - tokens
    return len(list(takewhile(bool, one.sampled[first : first + tokens])))


def _tokens(conversations: list[list[Turn]], vocabulary: Vocabulary) -> dict[str, int]:
    """Count sampled tokens in all and in the last reply's chain, sampled characters in the requests, cuts in a token."""
    counts = Counter(sampled_tokens=0, in_last_chain=0, earlier_chars=0, earlier_chars_reused=0, cuts_in_a_token=0)
    counts.update(in_cover=0, cover_chains=0)
    for turns in conversations:
        chains, matches = replay(turns, vocabulary)
        counts["sampled_tokens"] += sum(len(vocabulary.sampled(t.output_ids).ends) for t in turns)
        counts["in_last_chain"] += sum(chains[-1].sampled)
        covering = cover(chains)
        counts["cover_chains"] += len(covering)
        counts["in_cover"] += sum(
            _held(covering, chain, len(vocabulary.sampled(turn.output_ids).ends))
            for chain, turn in zip(chains, turns, strict=True)
        )
        counts["cuts_in_a_token"] += sum(m.cut_in_token for m in matches)
        earlier = 0
        for turn, found in zip(turns, matches, strict=False):
            earlier += len(turn.reply)
            counts["earlier_chars"] += earlier
            counts["earlier_chars_reused"] += found.chars
    return dict(counts)
