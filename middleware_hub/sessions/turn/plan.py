"""The parts that the generations of one turn share: the conversation, its prompt, its sampling, and its worker request."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from middleware_hub import affinity
from middleware_hub.chat.answer import Answer
from middleware_hub.chat.messages import ChatRequest, Message
from middleware_hub.media.media import Media
from middleware_hub.radix.records import NO_PARENT, SampledReply
from middleware_hub.sessions.events import SessionLog, TurnNotes
from middleware_hub.sessions.prompt.composed_prompt import ComposedPrompt, PromptIds
from middleware_hub.sessions.trie.nodes import NewTurn, PreparedTurn
from middleware_hub.sessions.trie.trie import MessageTrie
from middleware_hub.spans.chain import SpanFlag, TokenSpan, began_with
from middleware_hub.spans.media import UNKNOWN, collapsed
from middleware_hub.trajectories.members import HEADERS
from router.engines.form import ranks
from router.engines.form.worker_request import WorkerRequest
from router.http.headers import HeaderList
from router.http.request_state import RequestState, RouteHint
from router.proxy.generate_call import GenerateCall

_PASSED_HEADERS = frozenset(
    {b"authorization", b"x-request-id", b"x-abort-policy", b"x-kv-salt", b"traceparent", b"tracestate", *ranks.HEADERS}
)
"""The client's headers that go to the worker; the others are about its own dialect."""
_PASSED_WITHOUT_SESSION = _PASSED_HEADERS | {b"x-radix-namespace", b"x-smg-routing-key", b"x-session-id", *HEADERS}


class TurnPlan(msgspec.Struct):
    """A turn on its way to the workers.

    Attributes:
        session_id: empty for a chat without a session.
        trie: of the session.
        headers: of the client's request.
        state: what is known of that request.
        request: the client's request.
        turn: the match of its conversation in the trie.
        prompt: the ids to send.
        lasting: whether the session will be exported (see `Session`). If not, the layers inside record the replies.
        unread: whether another router may have continued the session while the store is unreachable.
        sampling: `sampling_params`, complete; empty until they are worked out.
        asked: the digest of the request, see `RequestKey`.
        media: what is known of pictures; None if the model reads none.
        log, notes: of the session; None if it is not kept beyond this process.
    """

    session_id: str
    trie: MessageTrie
    headers: HeaderList
    state: RequestState
    request: ChatRequest
    turn: PreparedTurn
    prompt: ComposedPrompt
    lasting: bool
    unread: bool = False
    sampling: dict[str, Any] = {}
    asked: bytes = b""
    log: SessionLog | None = None
    notes: TurnNotes | None = None
    media: Media | None = None

    def of_sample(self, number: int) -> TurnPlan:
        """Return the plan of a further sample, which has a seed of its own: with one seed all samples would be equal."""
        seed = self.sampling.get("sampling_seed")
        if not isinstance(seed, int):
            return self
        # The sum is a signed number of 64 bits, too.
        return replace(self, sampling={**self.sampling, "sampling_seed": (seed + number + 2**63) % 2**64 - 2**63})

    @property
    def parent(self) -> str | None:
        """The generation after whose chain the layers inside record the replies, or NO_PARENT."""
        named = self.turn.named
        return named if self.turn.unknown_parent or named == NO_PARENT else self.prompt.parent

    @property
    def unsampled(self) -> bool:
        """Whether a message of the assistant has no sampled tokens in the prompt, and the request does not say so itself."""
        if self.turn.named == NO_PARENT:
            return False
        checkpoint = self.prompt.checkpoint
        sampled = set() if checkpoint is None else {id(turn.node) for turn in checkpoint.lineage()}
        return any(node.role == "assistant" and id(node) not in sampled for node in self.turn.node.path())

    def sampled(
        self, prompt: ComposedPrompt, reply: SampledReply, answer: Answer, *, kv_version: str | None
    ) -> NewTurn:
        """Return the turn that was sampled, for the trie. `prompt`: `self.prompt`, as the engine computed with it.

        If the turn continues the last message, its message is that one with what was sampled at its end.
        """
        request, named, in_place = self.request, self.turn.named, self.request.continue_final
        flags = reply.flags | SpanFlag.WHOLE
        if self.turn.unknown_parent and named is not None and self.trie.checkpoint(named) is None:
            flags |= SpanFlag.PARENT_LOST  # the request named a generation that this router does not remember
        span = TokenSpan(
            prompt.span,
            prompt.take,
            0,
            reply.ids,
            0,
            logprobs=reply.logprobs if self.lasting else None,
            versions=reply.versions,
            flags=flags,
            visible=-1 if reply.visible is None else reply.visible,
            request_ids=reply.request_ids,
            finish=reply.finish,
            kv_version=kv_version,
        )
        content, reasoning = answer.content, answer.reasoning
        if in_place:
            before = request.messages[-1].get("content")
            content = (before if isinstance(before, str) else "") + content
            reasoning = self.reasoning_before() + reasoning
        message: Message = {"role": "assistant", "content": content}
        if answer.tool_calls:
            message["tool_calls"] = [call.as_openai() for call in answer.tool_calls]
        shown = reply.tail[0].shown if reply.tail else 0
        return NewTurn(
            message,
            span,
            answer.finish,
            in_place=in_place,
            tail=reply.tail,
            shown=reply.text[-shown:] if shown else "",
            reasoning=reasoning,
            scaffold=prompt.scaffold,
            reasons=prompt.reasons,
            extra=answer.extra if self.lasting else {},
            edited=bool(prompt.edited),
            time=time.time(),
            asked=self.asked,
            lora=(request.lora or "") if request.extra else "",
        )

    def reasoning_before(self) -> str:
        """Return the reasoning of the message that the turn continues: as it was sampled, else as the client sent it."""
        checkpoint = self.prompt.checkpoint
        if checkpoint is not None and checkpoint.node is self.turn.node:
            return checkpoint.reasoning
        found = self.request.messages[-1].get("reasoning_content")
        return found if isinstance(found, str) else ""

    def generate(self, rid: str, *, logprobs: bool) -> GenerateCall:
        """Return the call for one generation: `rid` is its id, and `logprobs` says whether the worker returns logprobs.

        Raises MediaMissingError, and PlaceholderSampledError.
        """
        request, ids, lasting = self.request, self.prompt.ids, self.lasting
        fields: dict[str, Raw] = {
            **request.extra,
            "input_ids": Raw(ids.written),
            "sampling_params": Raw(msgspec.json.encode(self.sampling)),
            "stream": Raw(b"true" if request.stream else b"false"),
        }
        hinted = memoryview(ids.packed).cast("i")
        shown = self.prompt.media
        if self.media is not None and self.media.bias:
            biases = {**(self.sampling.get("logit_bias") or {}), **self.media.bias}
            fields["sampling_params"] = Raw(msgspec.json.encode({**self.sampling, "logit_bias": biases}))
        if shown and self.media is not None:
            self.media.check_prompt(ids.packed, shown)
            fields["input_ids"] = Raw(PromptIds.of(collapsed(ids.packed, shown)).written)
            hinted = hinted[: shown[0].start]
            asks = self.media.asks_ids(unknown=any(one.length == UNKNOWN for one in shown), stream=request.stream)
            tenant = self.state.caller.tenant
            fields |= self.media.chat_fields(tenant, [one.digest for one in shown], named=not lasting, asks_ids=asks)
        if logprobs:
            fields["return_logprob"] = Raw(b"true")
            if request.top_logprobs:
                fields["top_logprobs_num"] = Raw(b"%d" % request.top_logprobs)
        sent = WorkerRequest(fields, stream=request.stream, rids=(rid,), named=False)
        passed = _PASSED_HEADERS if lasting else _PASSED_WITHOUT_SESSION
        headers = [(b"content-type", b"application/json")]
        headers += [pair for pair in self.headers if pair[0] in passed]
        if not lasting and (parent := self.parent) is not None:
            headers.append((b"x-radix-parent", parent.encode()))
        state = self.state
        # Generations of one session have a prefix in common, so its id routes them.
        continues = self.prompt.checkpoint is not None
        hint = RouteHint(None, hinted, self.session_id or None, conversation=self._conversation, continues=continues)
        call = GenerateCall(sent.body, sent, headers, state.record, state.caller, hint, named=dict(reversed(headers)))
        call.began = self._began
        return call

    def _conversation(self) -> bytes:
        """Return the same for all turns that continue the first prompt. A session may have several conversations."""
        return affinity.of_chat((self.session_id,), self.request.messages)

    def _began(self) -> tuple[str | None]:
        """Return the weight version of the session's first turn, or of the chat's; see `GenerateCall.began`."""
        if not self.lasting:
            return (began_with(self.prompt.span, self.prompt.take),)
        first = self.trie.oldest
        return (None if first is None else began_with(first.span, first.span.count),)

    @property
    def unheard(self) -> bool:
        """Whether the prompt has replies of which nobody knows whether they were sampled."""
        return self.unread and not self.lasting and self.unsampled
