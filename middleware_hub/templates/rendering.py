"""What a chat template writes around sampled turns: these themselves are never rendered, their tokens come from the store.

A start is the template's rendering of all messages. Every later turn renders only the **tail**: what the template writes
behind the turn that was sampled last. It is found by rendering a conversation with a sentinel in that turn: it stands behind.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nSENTINEL<|im_end|>\\n<|im_start|>user\\n...<|im_start|>assistant\\n
                                                                  `-- the tail ------------------------------------------'

    ...<tool_call>\\n{"name": "f", "arguments": {"x": "SENTINEL"}}\\n</tool_call><|im_end|>\\n<|im_start|>user\\n<tool_res...
                                                             `- own ---------'`-- the tail --------------------

A turn with calls holds the sentinel in their arguments, for many templates drop its content then, and what closes a call is
the turn's own, not the tail's. It is what such a turn writes more than one without calls, see `turn_forms`.

That conversation is a short one, a user's message in front and no tools, as long as the template's tails do not depend on
what came earlier, nor on tools. Whether they do is found out by trying (`_probe`), and remembered; if so, all is rendered.
Templates may also look for words in what came earlier (`/no_think` in a system prompt): where it holds one of those that
stand in the template, all is rendered, too (see `template_reads`). What is still missed is found by comparing
(`composing`), and from then on (`distrust`) this template has no short conversations any more.

A **transcript** is a rendering of everything with a sentinel in each of several turns, cut at these. In front of a sentinel
stands what opens the turn, and that is not always what the model was asked with (history has lost a `<think>`, or gained one):
it is known from short conversations, and cut off. A turn with another opening is not told from its surroundings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from middleware_hub.chat.messages import Message, Tool
from middleware_hub.templates.renderer import Options, RenderingError, check_options
from middleware_hub.templates.trials import CALL, CALLED, EARLIER, RESULT, SAID, SHORT, SPOKEN, TOOL
from middleware_hub.templates.turn_forms import CLOSED, NOT_ONCE, Own, TurnForms, options_key, remember
from router.errors import BadRequestError


class _Plan(NamedTuple):
    """How to find tails: in a short conversation or the full one, with tools in sight or without."""

    short: bool
    tools: bool


class Transcript(NamedTuple):
    """A rendering without some of its turns.

    Attributes:
        pieces: what stands in front of each of these turns, from the end of the one before; without what opens the turn.
        tail: what stands behind the last one.
    """

    pieces: tuple[str, ...]
    tail: str


class ChatTemplate(TurnForms):
    """Renders conversations, and what of a conversation stands around sampled turns.

    Args:
        template: Jinja source, as in `tokenizer_config.json`.
        special_tokens: variables that every rendering sees (`bos_token`, `eos_token`, ...).

    Raises:
        BadRequestError: the template cannot be compiled.
    """

    def __init__(self, template: str, special_tokens: Mapping[str, str]) -> None:
        super().__init__(template, special_tokens)
        self._plans: dict[tuple[object, ...], _Plan | None] = {}
        for tools in (False, True):
            for called in (False, True):
                self._plans[options_key({}), tools, called] = self._probe(
                    {}, tools, called
                )  # no request waits for these

    def tail(
        self,
        last: Message,
        behind: Sequence[Message],
        tools: Sequence[Tool] | None,
        options: Options,
        *,
        earlier: Sequence[Message],
        continue_final: bool = False,
        whole: bool | None = None,
    ) -> str:
        """What stands behind the text that the model sampled for `last`, an assistant's message, perhaps with calls.

        That is its closing (`<|im_end|>\\n`), the messages `behind`, and the generation prompt. `earlier` are the messages
        in front of `last`. With `continue_final` the last message behind is the assistant's, and the tail ends with its
        content; with none behind it is `last` itself that goes on, and the tail is empty. `whole`: whether all must be
        rendered; None: if these messages say so (`reads`).

        Raises:
            BadRequestError: the template refuses, in its own words.
            RenderingError: the tail cannot be told from the turn, or does not hold all the messages behind it.
        """
        if continue_final and not behind:
            return ""
        calls: Sequence[Message] = last.get("tool_calls") or ()
        check_options(options)
        following = [self._plain(message) for message in behind]
        if self.reads((*earlier, last, *behind)) if whole is None else whole:
            text = self._behind_all(earlier, last, following, tools, options, continue_final=continue_final)
        else:
            called = bool(calls) or any(message["role"] == "tool" or "tool_calls" in message for message in following)
            plan = self._plan(options, bool(tools), called)
            shown = tools if plan.tools else None
            if plan.short:
                own = self._own_of(calls, tools, shown, options) if calls else None
                text = self._behind(SHORT, calls, own, following, shown, options, continue_final=continue_final)
            else:
                text = self._behind_all(earlier, last, following, shown, options, continue_final=continue_final)
        for message in following:
            # Some templates write every system message at the head, where nothing can be added any more.
            if message["role"] in ("system", "developer") and not _holds(text, message["content"]):
                raise RenderingError(f"the template does not write a {message['role']} message where it stands")
        return text

    def transcript(
        self,
        messages: Sequence[Message],
        marked: Sequence[int],
        tools: Sequence[Tool] | None,
        options: Options,
        *,
        continue_final: bool = False,
    ) -> Transcript:
        """A rendering of the whole, cut at the turns `marked` (indices of the assistant's messages, rising).

        Raises:
            BadRequestError: the template refuses, in its own words.
            RenderingError: a turn cannot be told from what is around it.
        """
        check_options(options)
        plain = [self._plain(message) for message in messages]
        shown = [TOOL] if tools else None
        turns: list[tuple[str, Sequence[Message], Own | None]] = []
        for number, at in enumerate(marked):
            calls: Sequence[Message] = messages[at].get("tool_calls") or ()
            own = self._own_of(calls, tools, shown, options) if calls else None
            sentinel = f"{self._sentinel}{number:06}"
            turns.append((sentinel, calls, own))
            plain[at] = self._marked(calls, own.place if own else "content", sentinel)
        text = self._until_end(plain, tools, options, continue_final=continue_final)
        pieces, at = [], 0
        for number, (sentinel, calls, own) in enumerate(turns):
            first = text.find(sentinel, at)
            if first < 0 or text.count(sentinel) > (len(calls) or 1) or text.find(sentinel) < at:
                raise RenderingError(NOT_ONCE, "sentinel_collision", number)
            before = text[at:first]
            openings = self._openings_of(calls, own, tools, options)
            opening = max((one for one in openings if before.endswith(one)), key=len, default=None)
            if opening is None:
                opening = self._opening_here(plain, marked[number], sentinel, before, tools, options)
            if opening is None:
                raise RenderingError("the template opens an assistant's turn in an unknown way", "scaffold", number)
            pieces.append(before[: len(before) - len(opening)])
            at = text.rfind(sentinel) + len(sentinel)
            if own is not None:
                if not text.startswith(own.text, at):
                    raise RenderingError(CLOSED, "scaffold", number)
                at += len(own.text)
        return Transcript(tuple(pieces), text[at:])

    def closing(self, options: Options, *, calls: bool = False) -> str:
        """What closes an assistant's turn, one that ends with its text or with calls; empty where the next role does it."""
        turn: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]} if calls else SAID
        return self.tail(turn, (), None, options, earlier=SHORT).removesuffix(self.scaffold(None, options))

    def stop_literals(self, options: Options) -> tuple[str, ...]:
        """The special tokens that a model of this template ends its turns with, as far as their look tells.

        They are what a tail begins with: `("<|im_end|>",)`, or what opens the next role (`("<|user|>", "<|observation|>")`).
        """
        found: dict[str, None] = {}
        calling: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        for turn, behind in ((SAID, SHORT), (calling, [RESULT])):
            try:
                tail = self.tail(turn, behind, None, options, earlier=SHORT)
            except (BadRequestError, RenderingError):
                continue
            if (literal := self._special.match(tail)) is not None:
                found[literal[0]] = None
        return tuple(found)

    @property
    def takes_parts(self) -> bool:
        """Whether a user's text parts may stay a list. Where they may not, they are joined by a space, as a worker does it."""
        return "user" in self._roles_of_parts

    # Finding what is a turn's own -----------------------------------------------------------------------------------------

    def _behind(
        self,
        before: Sequence[Message],
        calls: Sequence[Message],
        own: Own | None,
        following: Sequence[Message],
        tools: Sequence[Tool] | None,
        options: Options,
        *,
        continue_final: bool = False,
    ) -> str:
        turn = self._marked(calls, own.place if own else "content", self._sentinel)
        text = self._until_end([*before, turn, *following], tools, options, continue_final=continue_final)
        rest = self._after(text, len(calls) or 1)
        if own is None:
            return rest
        if not rest.startswith(own.text):
            raise RenderingError(CLOSED)
        return rest[len(own.text) :]

    def _behind_all(
        self,
        earlier: Sequence[Message],
        last: Message,
        following: Sequence[Message],
        tools: Sequence[Tool] | None,
        options: Options,
        *,
        continue_final: bool,
    ) -> str:
        """The tail in the conversation itself. The turn keeps its own text in front of the sentinel, for who reads it."""
        before = [self._plain(message) for message in earlier]
        calls: Sequence[Message] = last.get("tool_calls") or ()
        if calls:
            with suppress(BadRequestError, RenderingError):
                own = self._own_of(calls, tools, tools, options)
                return self._behind(before, calls, own, following, tools, options, continue_final=continue_final)
            own = self._find_own(before, calls, tools, options)
            return self._behind(before, calls, own, following, tools, options, continue_final=continue_final)
        said = self._plain(last)
        if isinstance(said["content"], str) and said["content"]:
            turn = {**said, "content": said["content"] + self._sentinel}
            with suppress(RenderingError):
                text = self._until_end([*before, turn, *following], tools, options, continue_final=continue_final)
                return self._after(text, 1)
        return self._behind(before, (), None, following, tools, options, continue_final=continue_final)

    def _plan(self, options: Options, tools: bool, called: bool) -> _Plan:
        """Options seen for the first time are not tried: that takes some 10 ms, and a date may never be seen again."""
        key = (options_key(options), tools, called)
        if key not in self._plans:
            remember(self._plans, key, None)
            return _Plan(short=False, tools=tools)
        plan = self._plans[key]
        if plan is None:
            plan = self._plans[key] = self._probe(options, tools, called)
        return plan

    def _probe(self, options: Options, tools: bool, called: bool) -> _Plan:
        """Try a few shapes of conversations: are the tails of a short one those of longer ones, and do tools matter?

        Shapes that the template refuses tell nothing. With no shape left, nothing is known, and all is rendered.
        """
        shown = [TOOL] if tools else None
        short = self._tails(SHORT, shown, options, called)
        tried = False
        for earlier in EARLIER:
            for brief, full in zip(short, self._tails(earlier, shown, options, called), strict=True):
                if full is not None and full != brief:
                    return _Plan(short=False, tools=tools)
                tried = tried or full is not None
        if not tried:
            return _Plan(short=False, tools=tools)
        return _Plan(short=True, tools=tools and self._tails(SHORT, None, options, called) != short)

    def _tails(
        self, before: Iterable[Message], tools: Sequence[Tool] | None, options: Options, called: bool
    ) -> list[str | None]:
        """The tails of all shapes behind these messages; None for what is refused."""
        earlier = [self._plain(message) for message in before]
        found: list[str | None] = []
        owns: dict[int, Own | None] = {0: None}
        for calls, behind in CALLED if called else SPOKEN:
            try:
                if len(calls) not in owns:
                    owns[len(calls)] = self._find_own(earlier, calls, tools, options)
                own = owns[len(calls)]
                following = [self._plain(message) for message in behind]
                found.append(self._behind(earlier, calls, own, following, tools, options))
            except (BadRequestError, RenderingError):
                found.append(None)
        return found


def _holds(text: str, content: str | list[Message]) -> bool:
    pieces = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return all(piece.strip() in text for piece in pieces)
