"""Exact sequences as the router answers them, with their numbers checked against each other."""

from __future__ import annotations

import binascii
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from middleware_hub.client.errors import InconsistentAnswerError, NotUsableError, not_usable
from middleware_hub.client.images import MultiModalData
from middleware_hub.client.scores import Scores, scores_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class VersionRun:
    """Tokens `start` to `end`, all sampled under one weight version."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Turn:
    """A sampled reply in a sequence: tokens `start` to `end`; `finish` is `stop`, `length` or `abort`.

    `version` is the weight version of its last token, `kv_version` the oldest one by which the cache of the tokens before it
    may have been computed: None if that is not known, as without `--kv-salt`.
    """

    request_id: str
    start: int
    end: int
    version: str
    finish: str
    kv_version: str | None = None


@dataclass(frozen=True)
class TokenRows:
    """Numbers of the engine with a row for each token but the last: `routed_experts`, `indexer_topk`.

    Attributes:
        shape: rows, numbers in a row.
        told: `(name of the reply, first row, end)`: the reply that reported these rows. Rows that no reply reported are all -1.
        data: int32, little-endian.
    """

    shape: tuple[int, int]
    told: tuple[tuple[str, int, int], ...]
    data: bytes = field(repr=False)

    @property
    def whole(self) -> bool:
        """Return whether some reply reported every row."""
        return sum(end - start for _, start, end in self.told) == self.shape[0]

    def array(self) -> NDArray[np.int32]:
        """Return the rows in `shape`."""
        import numpy as np

        return np.frombuffer(self.data, "<i4").reshape(self.shape)

    @classmethod
    def of(cls, name: str, found: Mapping[str, Any], tokens: int) -> TokenRows:
        """Read the field of an answer about `tokens` tokens. Raises InconsistentAnswerError."""
        rows, width = found["shape"]
        data = binascii.a2b_base64(found["base64"])
        if len(data) != 4 * rows * width or rows != max(tokens - 1, 0):
            raise InconsistentAnswerError(
                f"`{name}` has {len(data)} bytes in the shape {rows}, {width} for {tokens} tokens: the router's version does "
                "not fit this client's"
            )
        told = tuple((one.get("request_id") or one["generation_id"], one["start"], one["end"]) for one in found["told"])
        return cls((rows, width), told, data)


@dataclass(frozen=True)
class TopP:
    """The ids from which each token was drawn: `ids[offsets[i]:offsets[i + 1]]` for token `i`. Both are int32 bytes."""

    ids: bytes = field(repr=False)
    offsets: bytes = field(repr=False)

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return ids and offsets; there is one more offset than there are tokens."""
        import numpy as np

        return np.frombuffer(self.ids, "<i4"), np.frombuffer(self.offsets, "<i4")

    @classmethod
    def of(cls, found: Mapping[str, Any], tokens: int) -> TopP:
        """Read the field of an answer about `tokens` tokens. Raises InconsistentAnswerError."""
        ids, offsets = binascii.a2b_base64(found["token_ids"]), binascii.a2b_base64(found["offsets"])
        last = int.from_bytes(offsets[-4:], "little")
        if len(offsets) != 4 * (tokens + 1) or last * 4 != len(ids):
            raise InconsistentAnswerError(
                f"`top_p` has {len(offsets) // 4} offsets for {tokens} tokens, and {len(ids) // 4} ids where {last} are said: "
                "the router's version does not fit this client's"
            )
        return cls(ids, offsets)


@dataclass(frozen=True)
class Trajectory:
    """One exact sequence: every id as a worker read or sampled it. All lists have one entry for each token.

    Attributes:
        tokens: prompt and response.
        loss_mask: 1 where a token was sampled and is to be trained here.
        logprobs: the worker's; 0.0 for context; None if they were not asked for, or a sampled token came without one.
        prompt_length: tokens before the first sampled one; all, if none was sampled.
        versions, turns: offsets count from the first token of the prompt.
        text: of the whole sequence. Empty for sequences of sessions, which have `messages` instead.
        exact: whether it may be trained on; `reasons` say why not.
        exact_chars: how much of the text was recorded.
        finish: how the last reply ended; empty if none was sampled.
        extras: `routed_experts` and `indexer_topk`, if requested and reported.
        top_p: the sampling sets, if requested and reported.
        details: the other fields of the answer: `branch`, `messages`, `reward_info`, `variants`, ...
        missing_tokens: how many sampled tokens of the listed replies are not in it.
        multi_modal_data: its images.
        scores: what each scorer says of its tokens from `prompt_length` on, if that was asked for.
    """

    tokens: list[int]
    loss_mask: list[int]
    logprobs: list[float] | None
    prompt_length: int
    versions: tuple[VersionRun, ...]
    turns: tuple[Turn, ...]
    text: str
    exact: bool
    exact_chars: int
    reasons: tuple[str, ...]
    finish: str
    extras: Mapping[str, TokenRows]
    top_p: TopP | None
    details: Mapping[str, Any] = field(repr=False)
    missing_tokens: int = 0
    multi_modal_data: MultiModalData = field(default_factory=MultiModalData)
    scores: Mapping[str, Scores] = field(default_factory=dict)

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def sampled(self) -> int:
        """Return the number of tokens with mask 1."""
        return sum(self.loss_mask)

    @property
    def stale_tokens(self) -> int:
        """Return how many tokens are older than `max_staleness`; 0 if that was not given."""
        return int(self.details.get("stale_tokens", 0))

    @property
    def reward_info(self) -> dict[str, Any]:
        """Return the reward that its session, or its branch, was given; empty if none was, and for a text."""
        return dict(self.details.get("reward_info") or {})

    def as_branch(self) -> dict[str, Any]:
        """Return its tokens under the names of a session's trajectory over HTTP, cut where the prompt ends."""
        cut = self.prompt_length
        return {
            "prompt_ids": self.tokens[:cut],
            "response_ids": self.tokens[cut:],
            "response_mask": self.loss_mask[cut:],
            "response_logprobs": None if self.logprobs is None else self.logprobs[cut:],
            "reward_info": self.reward_info,
            "exact": self.exact,
        }

    def token_versions(self) -> list[str | None]:
        """Return the weight version of each token; None for context."""
        found: list[str | None] = [None] * len(self.tokens)
        for run in self.versions:
            found[run.start : run.end] = [run.version] * (run.end - run.start)
        return found

    def require_exact(self) -> Trajectory:
        """Return it. Raises NotUsableError if it must not be trained on."""
        if not self.exact:
            if self.text and not self.exact_chars and self.reasons == ("retokenized",):
                raise NotUsableError(
                    "no recorded text begins like this one: was it sampled with another key or x-radix-namespace, or "
                    "before a restart without --store? POST /radix_tree/explain shows what is recorded",
                    self.reasons,
                )
            what = "the sequence is not exact"
            if self.text:  # a session has messages
                what += f" after character {self.exact_chars}"
            if self.missing_tokens:
                what = f"the sequence lacks {self.missing_tokens} sampled tokens of the listed replies"
            elif missed := self.details.get("missed_request_ids"):
                what = f"a prompt was made without the replies {', '.join(missed)}, while the store could not be asked"
            raise not_usable(what, self.reasons)
        return self

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Trajectory:
        """Read an answer of `/retrieve_from_text`. Raises InconsistentAnswerError."""
        tokens, mask = found["tokens"], found["loss_mask"]
        length = found["response_length"]
        extras = {
            name: TokenRows.of(name, found[name], len(tokens))
            for name in ("routed_experts", "indexer_topk")
            if found.get(name) is not None
        }
        turns = tuple(_turn(one, 0) for one in found["turns"])
        made = cls(
            tokens=tokens,
            loss_mask=mask,
            logprobs=found["rollout_logp"],
            prompt_length=len(tokens) - length,
            versions=_runs(found["weight_versions"], 0),
            turns=turns,
            text=found["response"],
            exact=found["exact"],
            exact_chars=found["exact_chars"],
            reasons=tuple(found["reasons"]),
            finish=turns[-1].finish if turns else "",
            extras=extras,
            top_p=TopP.of(found["top_p"], len(tokens)) if found.get("top_p") is not None else None,
            details={name: value for name, value in found.items() if name not in _READ},
            missing_tokens=found.get("missing_tokens", 0),
            multi_modal_data=MultiModalData.of(found.get("multi_modal_data")),
        )
        if not found["token_length"] == found["loss_mask_length"] == len(tokens):
            raise InconsistentAnswerError(f"the answer has {len(tokens)} tokens, and says {found['token_length']}")
        return made._checked()

    @classmethod
    def of_branch(cls, found: Mapping[str, Any]) -> Trajectory:
        """Read a trajectory of a session. Raises InconsistentAnswerError."""
        prompt, response = found["prompt_ids"], found["response_ids"]
        begin, logprobs = len(prompt), found["response_logprobs"]
        more = found["extra_fields"]
        tokens = prompt + response
        turns = tuple(_turn(one, begin) for one in found["turns"])
        extras = {
            name: TokenRows.of(name, more[name], len(tokens))
            for name in ("routed_experts", "indexer_topk")
            if isinstance(more.get(name), dict)
        }
        return cls(
            tokens=tokens,
            loss_mask=[0] * begin + found["response_mask"],
            logprobs=None if logprobs is None else [0.0] * begin + logprobs,
            prompt_length=begin,
            versions=_runs(found["weight_versions"], begin),
            turns=turns,
            text="",
            exact=found["exact"],
            exact_chars=0,
            reasons=tuple(found["reasons"]),
            finish=found["finish_reason"],
            extras=extras,
            top_p=TopP.of(more["top_p"], len(tokens)) if "top_p" in more else joined_top_p(more, turns, len(tokens)),
            details={
                name: value for name, value in found.items() if name not in _READ and not name.endswith("_logprobs")
            },
            multi_modal_data=MultiModalData.of(found.get("multi_modal_data")),
            scores=scores_of(found, begin, len(tokens)),
        )._checked()

    def _checked(self) -> Trajectory:
        """Return it, if its parts fit together. Raises InconsistentAnswerError."""
        count = len(self.tokens)
        wrong = []
        if len(self.loss_mask) != count:
            wrong.append(f"{len(self.loss_mask)} mask values")
        if self.logprobs is not None and len(self.logprobs) != count:
            wrong.append(f"{len(self.logprobs)} logprobs")
        if not 0 <= self.prompt_length <= count:
            wrong.append(f"a prompt of {self.prompt_length} tokens")
        spans = [(run.start, run.end) for run in self.versions] + [(turn.start, turn.end) for turn in self.turns]
        ends = [end for span in spans for end in span]
        if ends and not 0 <= min(ends) <= max(ends) <= count:
            wrong.append(f"ranges from {min(ends)} to {max(ends)}")
        if wrong:
            raise InconsistentAnswerError(
                f"a sequence of {count} tokens came with {', '.join(wrong)}: the router's version does not fit this client's"
            )
        if any(self.loss_mask[: self.prompt_length]):
            raise InconsistentAnswerError("a token of the prompt has mask 1")
        self.multi_modal_data.check(self.loss_mask)
        return self


_READ = frozenset(
    "tokens loss_mask rollout_logp response token_length loss_mask_length exact exact_chars reasons response_length "
    "weight_versions turns routed_experts indexer_topk top_p prompt_ids response_ids response_mask "
    "response_logprobs finish_reason missing_tokens multi_modal_data".split()
)


@dataclass(frozen=True)
class Cover:
    """All sequences that hold the replies of a rollout, each reply with mask 1 once; the sequence of the text comes first.

    Attributes:
        missing: listed replies that the router does not know.
    """

    trajectories: tuple[Trajectory, ...]
    missing: tuple[str, ...]

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)

    def require_exact(self) -> Cover:
        """Return it. Raises NotUsableError if a reply is missing, or a sequence is not exact."""
        if self.missing:
            raise not_usable(
                f"{len(self.missing)} replies are missing ({', '.join(self.missing[:5])})", ["unknown_reply"]
            )
        for one in self.trajectories:
            one.require_exact()
        return self


def _runs(found: Sequence[Mapping[str, Any]], begin: int) -> tuple[VersionRun, ...]:
    return tuple(VersionRun(one["version"], begin + one["start"], begin + one["end"]) for one in found)


_TOP_P_NAMES = (("top_p_token_ids", "top_p_token_offsets"), ("top_p_kept_token_ids", "top_p_kept_token_offsets"))


def _turn(found: Mapping[str, Any], begin: int) -> Turn:
    """Return a turn of an answer whose positions count from `begin`. A router of an earlier version tells no `kv_version`."""
    names = found["request_id"], begin + found["start"], begin + found["end"], found["version"], found["finish"]
    return Turn(*names, found.get("kv_version"))


def joined_top_p(fields: Mapping[str, Any], turns: Sequence[Turn], tokens: int) -> TopP | None:
    """Join the sets of each turn to the sets of a session's branch; None if a turn has none, or in another form.

    Args:
        fields: `extra_fields` of the trajectory: `{"generation_id", "value"}` of each turn, with base64 of int32 as the value.
        turns: the replies of the branch, in order.
        tokens: the number in the whole branch.
    """
    for ids_name, offsets_name in _TOP_P_NAMES:
        ids = {one["generation_id"]: one["value"] for one in fields.get(ids_name) or ()}
        offsets = {one["generation_id"]: one["value"] for one in fields.get(offsets_name) or ()}
        if ids and turns and all(turn.request_id in ids and turn.request_id in offsets for turn in turns):
            return _in_order([(turn, ids[turn.request_id], offsets[turn.request_id]) for turn in turns], tokens)
    return None


def _in_order(told: Sequence[tuple[Turn, str, str]], tokens: int) -> TopP | None:
    all_ids, all_offsets = array("i"), array("i", [0])
    for turn, ids_text, offsets_text in told:
        ids, offsets = array("i", binascii.a2b_base64(ids_text)), array("i", binascii.a2b_base64(offsets_text))
        count = turn.end - turn.start
        # A branch may leave out the stop token of a turn: then it has fewer tokens than the turn reported.
        if len(offsets) <= count or offsets[-1] != len(ids):
            return None
        all_offsets.extend([len(all_ids)] * (turn.start + 1 - len(all_offsets)))
        base = len(all_ids)
        all_offsets.extend(base + end for end in offsets[1 : count + 1])
        all_ids.extend(ids[: offsets[count]])
    all_offsets.extend([len(all_ids)] * (tokens + 1 - len(all_offsets)))
    return TopP(all_ids.tobytes(), all_offsets.tobytes())
