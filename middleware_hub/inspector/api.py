"""The JSON API of the inspector, as pure ASGI. `middleware_hub/routes.py` has its paths;
docs/http-api/inspector.md describes its calls.

The API only reads. An answer is a window, or is bounded; long work is done in steps, or in a thread.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from itertools import chain as joined
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from starlette.types import Receive, Scope, Send

from middleware_hub import routes
from middleware_hub.inspector.branches import HEAVY, Branches
from middleware_hub.inspector.conversations.conversation import MOST_BRANCHES, ConversationView
from middleware_hub.inspector.conversations.sessions import SessionConversation, StoredSessions
from middleware_hub.inspector.conversations.texts import MOST_NAMESPACES, Standings, TenantTexts, Texts
from middleware_hub.inspector.finding import PARAMETERS, ConversationFilter, TimeSlices, find
from middleware_hub.inspector.gallery import Gallery
from middleware_hub.inspector.queries import QueryParameters, explain_request, path_segments
from middleware_hub.inspector.reports.drift import Drifts
from middleware_hub.inspector.reports.files import TYPES
from middleware_hub.inspector.reports.run import RunReports
from middleware_hub.media.media import Media
from middleware_hub.media.reading import NO_PICTURES, BodyReader
from middleware_hub.media.stock import Stock
from middleware_hub.media.viewer import Viewer
from middleware_hub.persistence.memory import Memory
from middleware_hub.radix.cut import end_of
from middleware_hub.radix.tree import RadixTree
from middleware_hub.retrieval.retrieval import RETOKENIZED, explained
from middleware_hub.sessions.registry import SessionRegistry
from middleware_hub.sessions.session import Session
from middleware_hub.spans.chain import INEXACT, STORE_UNREACHABLE
from middleware_hub.spans.trajectory import flatten
from middleware_hub.tokenizer.tokenizer import Tokenizer
from middleware_hub.trajectories.groups import Groups
from router.engines.form.limits import PromptLimits
from router.errors import NotFoundError
from router.http.bodies import read_json
from router.http.handlers import ByMethod
from router.http.headers import HeaderList
from router.http.offload import offload
from router.http.request_state import request_state
from router.http.responses import SEND_BYTES, send_json

ADVICE = {
    "retokenized": (
        "The text leaves what was recorded, and what follows was encoded from its characters.",
        "Send the reply on as it came: no strip(), no template that renders it again. If what follows is an observation that "
        "no worker was sent, nothing is wrong: it is context.",
    ),
    "cut_in_token": (
        "The text ends, or goes on, inside a sampled token, so that token was encoded again.",
        "Cut replies at stop strings that end with a token, or let the engine keep the stop string in the text "
        "(no_stop_trim).",
    ),
    "split_character": (
        "The reply begins or ends inside a character of several bytes.",
        "Nothing is lost as long as the reply is kept whole. Do not cut it at its edge.",
    ),
    "engine_mismatch": (
        "The ids that the engine sent do not spell the text that it sent with them.",
        "Compare --tokenizer-path with the tokenizer of the workers, added tokens too.",
    ),
    "version_uncertain": (
        "The weights changed while the reply was sampled, and the engine did not say where.",
        "Pause generations during an update, or use an engine that reports weight versions by token.",
    ),
    "no_logprobs": (
        "Some sampled tokens came without logprobs.",
        "Leave --force-logprobs on, or ask for logprobs in each request.",
    ),
    "multimodal": (
        "The prompt holds media that this model is not known to read: the worker gets it unchanged, and it is not recorded.",
        "Take the ids from the worker's own answer (return_logprob). Sessions refuse media of that kind.",
    ),
    "unknown_parent": (
        "A request named the reply that it continues, and that reply was not known.",
        "Send x-radix-parent with the id of a reply that this router, or its store, still has: raise --radix-max-tokens, or "
        "add --store.",
    ),
    "unknown_reply": (
        "A reply that the caller lists is not in this text.",
        "Look whether the text was rebuilt from other replies, or the reply was evicted.",
    ),
    "edited_turn": (
        "A reply was changed before it was sent back.",
        "Send replies back unchanged; a summary belongs into a message of its own.",
    ),
    "template_mismatch": (
        "The context is not what the chat template renders from the messages.",
        "Look at the template for turns that it rewrites, and try --history template.",
    ),
    "store_unreachable": (
        "The store could not be asked, and may know more.",
        "Look at the store's server or disk, then ask again.",
    ),
}
"""What each reason means, and what to do about it."""

UNKNOWN = ("Something kept this from being exact.", "docs/user-guide.md has a list of reasons.")


def advice(reasons: Iterable[str]) -> list[dict[str, str]]:
    """Return what to do about each of these reasons."""
    found = []
    for reason in reasons:
        what, do = ADVICE.get(reason, UNKNOWN)
        found.append({"reason": reason, "what": what, "do": do})
    return found


PREFIX = "/inspect/api"
GUARDS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
"""Headers of all answers of the inspector."""


class Sources(NamedTuple):
    """The parts of a router that the inspector reads. A missing part is None."""

    tokenizer: Tokenizer
    tree: RadixTree | None
    memory: Memory | None
    sessions: SessionRegistry | None
    behind: Callable[[str], int]
    """Returns how many versions a weight version is behind the current one."""
    groups: Groups
    media: Media | None
    stock: Stock


class _Sessions(NamedTuple):
    """A tenant's sessions in memory. `change` has grown if anything happened in them since the last look."""

    found: list[Session]
    tokens: int
    change: int


class Api:
    """See the top of this file."""

    def __init__(
        self,
        sources: Sources,
        bodies: BodyReader | None = None,
        *,
        max_body_bytes: int,
        limits: PromptLimits,
        processes: int,
    ) -> None:
        """`processes`: the number that share this port, each with its own texts in memory."""
        self._sources = sources
        self._processes = processes
        self._max_body_bytes = max_body_bytes
        self._bodies = bodies
        self._limits = limits
        self._vocabulary = sources.tokenizer.vocabulary
        tree, groups = sources.tree, sources.groups
        self._texts = None if tree is None else Texts(tree, sources.tokenizer.spell_prompt, groups.standing)
        self._standings = Standings(groups, lambda: () if tree is None else tree.roots)
        self._stored = None if sources.sessions is None else StoredSessions(sources.sessions)
        self._session_changes: dict[str, tuple[tuple[int, int, float], int]] = {}
        self._drifts = Drifts(sources.tokenizer)
        self._gallery = Gallery(sources.stock)
        self._runs = RunReports(self._vocabulary, self._drifts, sources.behind, self._gallery)
        self._branches = Branches(self._vocabulary, self._drifts, self._gallery)
        calls: dict[str, Callable[..., Awaitable[None]]] = {
            "conversations": self._list,
            "conversation": self._show,
            "branch": partial(self._of_branch, ""),
            **{place: partial(self._of_branch, place) for place in ("tokens", "find", "drift")},
            "download": self._download,
            "compare": self._compare,
            "explain": self._explain,
            "run": self._run,
        }
        self._calls = routes.bound(routes.INSPECTOR_API, calls, f"{PREFIX}/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call. Raises RouterError."""
        found = routes.find(self._calls, path_segments(scope, PREFIX))
        if found is None:
            raise NotFoundError(f"the inspector has nothing at {scope['path']}")
        calls, names = found
        await ByMethod({method: partial(call, *names) for method, call in calls.items()})(scope, receive, send)

    async def _answer(self, send: Send, answer: Any) -> None:
        await send_json(send, 200, msgspec.json.encode(answer), [(b"cache-control", b"no-store"), *GUARDS])

    # Conversations -----------------------------------------------------------------------------------------------------

    async def _shelf(self, tenant: str) -> TenantTexts:
        return TenantTexts(0) if self._texts is None else await self._texts.shelf(tenant)

    async def _sessions(self, tenant: str, stored: int = 0) -> _Sessions:
        """Look through a tenant's sessions in memory. `stored` is how many more are known to be in the store."""
        source, slices = self._sources.sessions, TimeSlices()
        found = [] if source is None else source.of(tenant)
        tokens, samples, used = 0, 0, 0.0
        for one in found:
            tokens, samples, used = tokens + one.tokens, samples + one.samples, max(used, one.used)
            await slices.pause()
        state = len(found) + stored, samples, used
        known, number = self._session_changes.get(tenant, (None, 0))
        if known != state:
            number += 1
            self._session_changes[tenant] = state, number
        return _Sessions(found, tokens, number)

    async def _list(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = request_state(scope).caller.tenant
        query = QueryParameters(scope, PARAMETERS)
        wanted, since = ConversationFilter.of(query), query.number("changed_since", -1, -1, 2**62)
        if wanted.name is not None:
            await self._look_in_store(tenant, wanted.name, query.exactly("namespace") or "")
        stored, more = ([], False) if self._stored is None else await self._stored.of(tenant)
        entered = await self._standings.look(tenant)
        sessions = await self._sessions(tenant, len(stored))
        shelf = await self._shelf(tenant)
        change = shelf.changes + sessions.change + entered
        if since == change:
            headers = [(b"cache-control", b"no-store"), *GUARDS]
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        listed: list[ConversationView] = [*map(SessionConversation, sessions.found), *stored]
        found, cursor = await find(wanted, shelf.newest_first, listed, self._vocabulary)
        remembered = {
            "conversations": len(shelf.order) + len(listed),
            "sessions": len(listed),
            "more": more,
            "tokens": shelf.tokens + sessions.tokens,
            "processes": self._processes,
        }
        await self._answer(send, {"conversations": found, "next": cursor, "remembered": remembered, "change": change})

    async def _look_in_store(self, tenant: str, name: str, namespace: str = "") -> None:
        """Bring the session or reply of this name into memory, if only the store has it.

        A reply is looked for in the namespaces that are known here, and in the given one: a store separates names by namespace.
        """
        sessions, tree, memory = self._sources.sessions, self._sources.tree, self._sources.memory
        inner = name.partition(":")[2] if name.startswith(("session:", "text:")) else name
        if sessions is not None and not name.startswith("text:"):
            await sessions.reach(tenant, inner)
        if tree is not None and memory is not None and not name.startswith("session:"):
            reply = inner.partition("~")[0]
            places = {(tenant, "", namespace), *(place for place in tree.roots if place[0] == tenant)}
            for place in sorted(places)[:MOST_NAMESPACES]:
                if reply and tree.reply(place, reply) is None:
                    await memory.cover(place, " ", [reply])

    async def _conversation(self, tenant: str, name: str) -> ConversationView:
        """Return a conversation by its id. Raises NotFoundError."""
        kind, _, inner = name.partition(":")
        if kind == "session" and self._sources.sessions is not None:
            session = await self._sources.sessions.reach(tenant, inner)
            if session is not None:
                return SessionConversation(session)
        found = (await self._shelf(tenant)).ids.get(name)
        if found is None and kind == "text":
            await self._look_in_store(tenant, name)
            found = (await self._shelf(tenant)).ids.get(name)
        if found is None:
            raise NotFoundError(f"no conversation {name[:200]!r} is remembered: it may have been evicted, or deleted")
        memory = self._sources.memory
        if found.doubtful and memory is not None:
            for leaf in found.leaves()[:MOST_BRANCHES]:
                await memory.asked_late(found.namespace, end_of(leaf.span))
        return found

    async def _about(self, tenant: str, conversation: ConversationView) -> dict[str, Any]:
        """Return everything known of a conversation except its tokens."""
        slices = TimeSlices()
        summary = conversation.summary()
        nodes, truncated = conversation.nodes()
        branches = []
        for branch in islice(conversation.branches(), MOST_BRANCHES):
            branches.append(branch.described(branch.chain()))
            await slices.pause()
        about = await self._gallery.about(tenant, joined.from_iterable(node["pictures"] for node in nodes))
        for node in nodes:
            node["preview"] = node["preview"]()
            node["pictures"] = [about[digest] for digest in node["pictures"]]
            await slices.pause()
        truncated = truncated or summary["branches"] > MOST_BRANCHES
        return {**summary, "tree": nodes, "branches_list": branches, "truncated": truncated}

    async def _show(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        QueryParameters(scope, ())
        tenant = request_state(scope).caller.tenant
        conversation = await self._conversation(tenant, name)
        await self._standings.look(tenant)
        await self._answer(send, await self._about(tenant, conversation))

    async def _of_branch(self, place: str, name: str, branch: str, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = request_state(scope).caller.tenant
        if not place:
            await self._standings.look(tenant)
        conversation = await self._conversation(tenant, name)
        await self._answer(send, await self._branches.answer(conversation, branch, place, scope))

    async def _download(self, name: str, branch: str, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = request_state(scope).caller.tenant
        conversation = await self._conversation(tenant, name)
        about = await self._about(tenant, conversation)
        form, content = await self._branches.file(conversation, branch, scope, about)
        named = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{name}-{branch}")[:100]
        headers = [
            (b"content-type", TYPES[form]),
            (b"content-disposition", f'attachment; filename="{named}.{form}"'.encode()),
            (b"content-security-policy", b"default-src 'none'; sandbox"),
            (b"cache-control", b"no-store"),
        ]
        await send_whole(send, content, [*headers, *GUARDS])

    async def _compare(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = request_state(scope).caller.tenant
        query = QueryParameters(scope, ("a", "a_branch", "b", "b_branch"))
        one, other = [
            (await self._conversation(tenant, query.required(side)), query.text(f"{side}_branch"))
            for side in ("a", "b")
        ]
        await self._answer(send, await self._branches.compare(tenant, one, other))

    # The whole run -----------------------------------------------------------------------------------------------------

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        QueryParameters(scope, ())
        tenant = request_state(scope).caller.tenant
        sessions = await self._sessions(tenant)
        shelf = await self._shelf(tenant)

        def everything() -> tuple[int, Iterable[ConversationView]]:
            listed = [SessionConversation(session) for session in sessions.found]
            return len(shelf.order) + len(listed), joined((one for _, one in shelf.newest_first(None)), listed)

        await self._answer(send, await self._runs.report(tenant, shelf.changes + sessions.change, everything))

    # Explain -----------------------------------------------------------------------------------------------------------

    async def _explain(self, scope: Scope, receive: Receive, send: Send) -> None:
        QueryParameters(scope, ())
        tenant = request_state(scope).caller.tenant
        pictures = NO_PICTURES
        if self._bodies is None:
            body = await read_json(scope, receive, self._max_body_bytes)
        else:
            body, _, pictures = await self._bodies.read(scope, receive)
        request = await offload(len(body) > 64 * 1024, explain_request, body, self._limits)
        tree, memory = self._sources.tree, self._sources.memory
        if tree is None:
            raise NotFoundError("this router remembers sessions only, and no texts")
        namespace = tenant, request.adapter, request.namespace
        text, media, viewer = request.text, self._sources.media, None
        if media is not None:
            held = await media.bring(tenant, request.image_data, pictures)
            digests, _ = media.named(tenant, request.image_data, pictures, held.unasked)
            del held  # only what is known of them is shown
            text, viewer = media.key(text, digests), Viewer(media, tenant)
        asked = memory is None or await memory.cover(namespace, text)
        recall = tree.recall(namespace, text, note=False)
        assert recall is not None, "no reply was named"
        cut = recall.cut
        if asked and memory is not None:
            await memory.asked_late(namespace, cut)
        flat = await offload(cut.tokens > HEAVY, flatten, cut.span, cut.take)
        reasons = list(flat.reasons if asked else flat.because(STORE_UNREACHABLE).reasons)
        if cut.recut and "cut_in_token" not in reasons:
            reasons.append("cut_in_token")
        if cut.start < len(text):
            reasons.append(RETOKENIZED)
        answer = {
            **explained(tree, namespace, text, viewer, stored=memory is not None, asked=asked),
            "tokens": cut.tokens,
            "exact": recall.exact and INEXACT.isdisjoint(reasons),
            "reasons": reasons,
            "advice": advice(reasons),
        }
        await self._answer(send, answer)


async def send_whole(send: Send, content: bytes, headers: HeaderList) -> None:
    """Send a file, in pieces."""
    start = [*headers, (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": 200, "headers": start})
    for at in range(0, len(content), SEND_BYTES):
        await send({"type": "http.response.body", "body": content[at : at + SEND_BYTES], "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"", "more_body": False})
