"""One branch: its head, windows of its tokens, and searches in it; and the comparison of two branches."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.types import Scope

from middleware_hub.drift import sequences
from middleware_hub.inspector.conversations.chain import Chain, CompactIds, matches
from middleware_hub.inspector.conversations.conversation import Branch, ConversationView
from middleware_hub.inspector.gallery import Gallery
from middleware_hub.inspector.queries import MOST_TEXT, QueryParameters
from middleware_hub.inspector.reports import files
from middleware_hub.inspector.reports.drift import ChainDrift, Drifted, Drifts
from middleware_hub.spans.chain import TokenSpan
from middleware_hub.tokenizer.vocabulary import Vocabulary
from router.errors import BadRequestError, NotFoundError
from router.http.offload import offload
from router.http.request_state import request_state

MOST_TOKENS = 5_000
"""Tokens of one window."""
MOST_MATCHES = 1_000
MOST_DRIFTED = 200
"""Tokens that are shown of one place where re-encoding gives other tokens."""
PATIENCE = 0.02
"""Seconds that an answer waits for a drift that is not known yet."""
MOST_RUNS = 2_000
"""Runs of a comparison."""
MOST_CHAINS = 64
MOST_CHAIN_TOKENS = 4_000_000
"""Chains that are kept for further reads, and the tokens of all of them."""
HEAVY = 20_000
"""Work on more tokens than this is done in a thread."""


_PARAMETERS = {"": (), "tokens": ("start", "end"), "find": ("text", "token_ids", "from", "limit"), "drift": ("from",)}
_Json = Mapping[str, Any]


class Branches:
    """See the top of this file. It keeps the chains that were read last."""

    def __init__(self, vocabulary: Vocabulary, drifts: Drifts, gallery: Gallery) -> None:
        self._vocabulary = vocabulary
        self._drifts = drifts
        self._gallery = gallery
        self._chains: OrderedDict[TokenSpan, tuple[Branch, Chain]] = OrderedDict()

    async def answer(self, conversation: ConversationView, branch: str, place: str, scope: Scope) -> dict[str, Any]:
        """Answer a call below a branch's path. Raises NotFoundError, BadRequestError."""
        known = _PARAMETERS.get(place)
        if known is None:
            raise NotFoundError(f"the inspector has nothing at {scope['path']}")
        query = QueryParameters(scope, known)
        found, chain = self.chain(conversation, branch)
        match place:
            case "tokens":
                return await self._window(chain, query)
            case "find":
                return await self._find(chain, query)
            case "drift":
                return await self._next_drift(chain, query)
        return await self._head(found, chain, PATIENCE, _tenant(scope))

    async def file(self, conversation: ConversationView, branch: str, scope: Scope, about: _Json) -> tuple[str, bytes]:
        """Return a branch as a file, and the name of its format. `about` describes the conversation.

        Raises NotFoundError, BadRequestError.
        """
        query = QueryParameters(scope, ("format",))
        form = query.choice("format", files.TYPES) or "json"
        found, chain = self.chain(conversation, branch)
        head = await self._head(found, chain, None, _tenant(scope))
        if form == "parquet":
            return form, await offload(True, files.as_parquet, about, head, chain, self._vocabulary)
        drift = await self._drifts.soon(chain, None)
        places = None if drift is None else await offload(True, self._each_drifted, chain, drift)
        tokens = await offload(True, files.tokens, chain, self._vocabulary, places)
        if form == "json":
            return form, await offload(True, files.as_json, about, head, tokens)
        shown = [one.digest for one in chain.media] + [
            one["digest"] for node in about["tree"] for one in node["pictures"]
        ]
        pictures = await self._gallery.embedded(_tenant(scope), shown)
        return form, await offload(True, files.as_page, about, head, tokens, pictures)

    async def _head(self, branch: Branch, chain: Chain, patience: float | None, tenant: str) -> dict[str, Any]:
        drift = await self._drifts.soon(chain, patience)
        head = await offload(chain.total > HEAVY, self._described, branch, chain, drift)
        return {**head, "images": await self._gallery.shown(tenant, chain.media)}

    async def _next_drift(self, chain: Chain, query: QueryParameters) -> dict[str, Any]:
        drift = await self._drifts.soon(chain, PATIENCE)
        if drift is None:
            return {"next": None, "known": False}
        following = drift.next(query.number("from", 0, 0, 2**31))
        place = None if following is None else {"start": following.start, "end": following.end}
        return {"next": place, "known": True}

    def _each_drifted(self, chain: Chain, drift: ChainDrift) -> list[dict[str, Any]]:
        return [self._drifted(chain, one) for one in drift.found]

    def chain(self, conversation: ConversationView, name: str | None) -> tuple[Branch, Chain]:
        """Return a branch (without a name, the newest) and its chain. Raises NotFoundError."""
        found = conversation.branch(name) if name is not None else next(conversation.branches(), None)
        if found is None:
            raise NotFoundError(f"conversation {conversation.id[:200]!r} has no branch {(name or '')[:200]!r}")
        kept = self._chains.pop(found.span, None)
        chain = found.chain() if kept is None or kept[0] != found else kept[1]
        self._chains[found.span] = found, chain
        while len(self._chains) > MOST_CHAINS or (
            len(self._chains) > 1 and sum(len(one) for _, one in self._chains.values()) > MOST_CHAIN_TOKENS
        ):
            self._chains.popitem(last=False)
        return found, chain

    def _described(self, branch: Branch, chain: Chain, drift: ChainDrift | None) -> dict[str, Any]:
        line = branch.described(chain)
        vocabulary, ids = self._vocabulary, chain.compact().ids
        return {
            "id": branch.id,
            "total": chain.total,
            "chars": int(vocabulary.begun(array("i", ids.tobytes()))[-1]) if chain.total else 0,
            "exact": line["exact"],
            "reasons": line["reasons"],
            "versions": chain.versions,
            "turns": [_turn(turn, chain, drift) for turn in chain.turns],
            "logprobs": quantiles(chain),
            "drift": None if drift is None else drift.described(),
            "reward": branch.reward,
            "text_preview": vocabulary.spell(ids[:200].tolist())[:400],
        }

    async def _window(self, chain: Chain, query: QueryParameters) -> dict[str, Any]:
        start = query.number("start", 0, 0, 2**31)
        end = query.number("end", min(start + 2_000, chain.total), 0, 2**31)
        if end - start > MOST_TOKENS:
            raise BadRequestError(f"a window has at most {MOST_TOKENS} tokens, not {end - start}")
        if end < start:
            raise BadRequestError("`end` is before `start`")
        end = min(end, chain.total)
        start = min(start, end)
        window = chain.window(start, end, self._vocabulary)
        drift = await self._drifts.soon(chain, PATIENCE)
        found = None if drift is None else [self._drifted(chain, one) for one in drift.between(start, end)]
        return {**window, "drift": found}

    def _drifted(self, chain: Chain, one: Drifted) -> dict[str, Any]:
        """Return a place where re-encoding gives other tokens, with both spellings."""
        literal = self._vocabulary.literal
        sampled = chain.ids(one.start, min(one.end, one.start + MOST_DRIFTED)).tolist()
        encoded = one.encoded[:MOST_DRIFTED]
        return {
            "start": one.start,
            "end": one.end,
            "text": one.text[: 8 * MOST_DRIFTED],
            "sampled": sampled,
            "encoded": list(encoded),
            "sampled_texts": [literal(each) for each in sampled],
            "encoded_texts": [literal(each) for each in encoded],
        }

    async def _find(self, chain: Chain, query: QueryParameters) -> dict[str, Any]:
        text, ids = query.text("text", MOST_TEXT), query.ids("token_ids")
        wanted = text if ids is None else ids
        if wanted is None or (text is not None and ids is not None):
            raise BadRequestError("give `text` or `token_ids`")
        first, most = query.number("from", 0, 0, 2**31), query.number("limit", 100, 1, MOST_MATCHES)
        found, more = await offload(chain.total > HEAVY, matches, chain, self._vocabulary, wanted, first, most)
        return {"matches": found, "more": more}

    async def compare(
        self, tenant: str, one: tuple[ConversationView, str | None], other: tuple[ConversationView, str | None]
    ) -> dict[str, Any]:
        """Return two branches, their runs, and where they differ first. Raises NotFoundError."""
        heads, chains = [], []
        for conversation, name in (one, other):
            branch, chain = self.chain(conversation, name)
            shown = await self._gallery.shown(tenant, chain.media)
            about = {"conversation": conversation.id, **branch.described(chain), "total": chain.total}
            heads.append({**about, "images": shown})
            chains.append(chain)
        heavy = sum(map(len, chains)) > HEAVY
        return {"a": heads[0], "b": heads[1], **await offload(heavy, compared, *chains)}


def _turn(turn: dict[str, Any], chain: Chain, drift: ChainDrift | None) -> dict[str, Any]:
    """Return a turn with its figures."""
    start, end = turn["start"], turn["end"]
    reasons = chain.reasons_between(start, end)
    if not turn["sampled"]:
        none = {"sampled_tokens": 0, "drifted": None if drift is None else 0, "logprob": None}
        return {**turn, "reasons": reasons, **none}
    return {
        **turn,
        "reasons": reasons,
        "sampled_tokens": end - start,
        "drifted": None if drift is None else drift.within(start, end),
        "logprob": chain.mean_logprob(start),
    }


def compared(one: Chain, other: Chain) -> dict[str, Any]:
    """Return the runs of two chains, and where they differ first. An image is equal to none but itself."""
    compact, others = one.compact(), other.compact()
    numbers: dict[str, int] = {}
    sides = _told_apart(one, compact, numbers), _told_apart(other, others, numbers)
    first = sequences.first_difference(*sides)
    runs, truncated = sequences.compare(*sides, most=MOST_RUNS)
    return {
        "first_difference": None if first is None else {"a": compact.place(first), "b": others.place(first)},
        "runs": [
            {
                "op": run.op,
                "a": [compact.place(run.start), compact.place(run.end)],
                "b": [others.place(run.other_start), others.place(run.other_end)],
            }
            for run in runs
        ],
        "truncated": truncated,
    }


def _told_apart(chain: Chain, compact: CompactIds, numbers: dict[str, int]) -> NDArray[np.int32]:
    """Return compact ids in which each image has a number of its own, which is no id. `numbers` are those given before."""
    if not chain.media:
        return compact.ids
    found = compact.ids.copy()
    for start, _, digest in chain.media:
        found[compact.at(start)] = -1 - numbers.setdefault(digest, len(numbers))
    return found


def _tenant(scope: Scope) -> str:
    return request_state(scope).caller.tenant


def quantiles(chain: Chain) -> dict[str, Any]:
    """Return the distribution of the logprobs of a chain's sampled tokens; without any, the numbers are null."""
    numbers = chain.logprobs
    if not len(numbers):
        return {"p01": None, "p50": None, "p99": None, "min": None, "max": None, "count": 0}
    low, middle, high = np.percentile(numbers, (1, 50, 99)).tolist()
    extremes = {"min": float(numbers.min()), "max": float(numbers.max())}
    return {"p01": low, "p50": middle, "p99": high, **extremes, "count": len(numbers)}
