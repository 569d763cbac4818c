"""The text that a chat template writes around sampled turns. The turns are never rendered, because their tokens exist.

The first turn is the template's rendering of all messages. Every later turn renders only the **tail**: what the template
writes after the turn that was sampled last. It is found by rendering a conversation with a sentinel in that turn:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nSENTINEL<|im_end|>\\n<|im_start|>user\\n...<|im_start|>assistant\\n
                                                                  `-- the tail ------------------------------------------'

    ...<tool_call>\\n{"name": "f", "arguments": {"x": "SENTINEL"}}\\n</tool_call><|im_end|>\\n<|im_start|>user\\n<tool_res...
                                                             `- own ---------'`-- the tail --------------------

A turn with calls holds the sentinel in their arguments, because many templates drop its content then. The text that closes
a call belongs to the turn, not to the tail: it is what such a turn writes in addition to one without calls (`turn_forms`).

The rendered conversation is a short one, with one user's message before the turn and no tools, if the template's tails depend
neither on earlier messages nor on tools; otherwise everything is rendered. `_probe` finds that out by trying, and the result is
remembered. Templates may also look for words in earlier messages (`/no_think` in a system prompt): if these hold a word that
the template spells, everything is rendered as well (see `reads`). A comparison (`sessions/prompt/tails.py`) finds what is still
missed, and from then on (`distrust`) this template gets no short conversations. If a template only copies the texts after the
turn, other texts are put into what it wrote around the first ones (see `slots`).

A **transcript** is a rendering of everything with a sentinel in each of several turns, cut at these. A sentinel follows the
opening of the turn, which is not always the generation prompt that the model got (the history has lost a `<think>`, or gained
one): short conversations show the opening, and it is cut off. A turn with an unknown opening cannot be separated.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from middleware_hub.chat.messages import Message, argument_texts
from middleware_hub.templates.clock import at_time, tells_time
from middleware_hub.templates.renderer import (
    Messages,
    Options,
    RenderingError,
    Tools,
    check_options,
    remember,
)
from middleware_hub.templates.slots import Slots
from middleware_hub.templates.system_messages import LateSystem
from middleware_hub.templates.trials import CALL, CALLED, EARLIER, RESULT, SAID, SHORT, SPOKEN, TOOL
from middleware_hub.templates.turn_forms import CLOSED, NOT_ONCE, Own, TurnForms, options_key
from router.errors import BadRequestError


class _Plan(NamedTuple):
    """How to find tails: in a short conversation or the full one, with tools or without."""

    short: bool
    tools: bool


class Transcript(NamedTuple):
    """A rendering without some of its turns.

    Attributes:
        pieces: the text before each of these turns, from the end of the previous one, without the turn's opening.
        tail: the text after the last of these turns.
    """

    pieces: tuple[str, ...]
    tail: str


class ChatTemplate(TurnForms):
    """Renders conversations, and the text around the sampled turns of a conversation.

    Args:
        template: Jinja source, as in `tokenizer_config.json`.
        special_tokens: variables that every rendering sees (`bos_token`, `eos_token`, ...).
        late_system: what becomes of a system message that the template does not write where it stands.

    Raises:
        BadRequestError: the template cannot be compiled.
    """

    def __init__(
        self, template: str, special_tokens: Mapping[str, str], *, late_system: LateSystem = "in_place"
    ) -> None:
        super().__init__(template, special_tokens, late_system)
        self._late_system: LateSystem = late_system
        self._slots = Slots(template, f"slot{secrets.token_hex(12)}")
        self._plans: dict[tuple[object, ...], _Plan | None] = {
            (options_key({}), tools, called): None for tools in (False, True) for called in (False, True)
        }
        self._stripped: dict[tuple[object, ...], bool] = {}
        self._tells_time = tells_time(template)
        self._dated: dict[tuple[object, ...], ChatTemplate] = {}

    def warm(self) -> None:
        """Do now the work that the first request would wait for: import transformers, and find out how to render tails."""
        for tools in (False, True):
            for called in (False, True):
                self._plan((), {}, tools, called)
            self.header([TOOL] if tools else None, {})
        _ = self.wants_short_ids
        self._systems.warm()

    def on_other_days(self, times: Iterable[float]) -> Iterator[ChatTemplate]:
        """Yield the template with the dates of `times` (seconds since 1970) that are not today's, if it writes the date."""
        if not self._tells_time:
            return
        today = at_time(self._template, time.time())
        for source in dict.fromkeys(at_time(self._template, moment) for moment in times):
            if source == today:
                continue
            found = self._dated.get((source,))
            if found is None:
                found = ChatTemplate(source, self._special_tokens, late_system=self._late_system)
                remember(self._dated, (source,), found)
            yield found

    def whole(self, messages: Messages, tools: Tools, options: Options, *, continue_final: bool = False) -> str:
        """Return the text of a start: of a whole conversation, up to where the model continues.

        With `continue_final` the last message is the assistant's, and the text ends with its content, whitespace kept.

        Raises:
            BadRequestError: the template refuses, in its own words, or has no place for a system message.
            RenderingError: the end of the message to be continued cannot be found.
        """
        if not messages:
            raise BadRequestError("messages: at least one is needed")
        if options:
            check_options(options)
        placed = self._systems.placed(messages)
        plain = [self._plain(message) for message in placed]
        text = self._until_end(plain, tools, options, continue_final=continue_final)
        if placed is not messages:
            for at, message in enumerate(messages):
                if message["role"] == "system" and not _holds(text, message.get("content") or ""):
                    raise BadRequestError(
                        f"messages[{at}]: the chat template writes this system message in no place: put its text into the "
                        "first message, or into a message of the user's"
                    )
        return text

    def tail(
        self,
        last: Message,
        behind: Messages,
        tools: Tools,
        options: Options,
        *,
        earlier: Messages,
        continue_final: bool = False,
        whole: bool | None = None,
    ) -> str:
        """Return the text after what the model sampled for `last`, an assistant's message that may have calls.

        That is its closing (`<|im_end|>\\n`), the messages `behind`, and the generation prompt. `earlier` are the messages in
        front of `last`. With `continue_final` the last message of `behind` is the assistant's, and the tail ends with its
        content; if `behind` is empty, `last` itself goes on, and the tail is empty. `whole` says whether everything must be
        rendered; None: decide by these messages (`reads`).

        Raises:
            BadRequestError: the template refuses, in its own words.
            RenderingError: the tail cannot be separated from the turn, or does not hold all messages after it.
        """
        if continue_final and not behind:
            return ""
        if options:
            check_options(options)
        last = self._taken(last)
        calls: Messages = last.get("tool_calls") or ()
        following, called = [], bool(calls)
        for message in behind:
            if message["role"] == "system":
                behind = self._placed_behind(behind)
                break
        for message in behind:
            following.append(self._plain(message))
            called = called or message["role"] == "tool" or "tool_calls" in following[-1]
        if self.reads((*earlier, last, *behind)) if whole is None else whole:
            text = self._behind_all(earlier, last, following, tools, options, continue_final=continue_final)
        else:
            named = options_key(options)
            plan = self._plan(named, options, bool(tools), called)
            shown = tools if plan.tools else None
            if plan.short:
                own = self._own_of(calls, tools, shown, options) if calls else None
                behind_short = partial(
                    self._behind, SHORT, calls, own, tools=shown, options=options, continue_final=continue_final
                )
                if shown or continue_final or not all(map(_plain_option, options.values())):
                    text = behind_short(following)
                else:
                    key = (own, self._called(calls) if calls else (), named)
                    text = self._slots.rendered(key, following, behind_short)
            else:
                text = self._behind_all(earlier, last, following, shown, options, continue_final=continue_final)
        for message in following:
            # Some templates write every system message at the beginning, where nothing can be added later.
            if message["role"] in ("system", "developer") and not _holds(text, message["content"]):
                raise RenderingError(f"the template does not write a {message['role']} message where it stands")
        return text

    def transcript(
        self, messages: Messages, marked: Sequence[int], tools: Tools, options: Options, *, continue_final: bool = False
    ) -> Transcript:
        """Render everything, cut at the turns `marked` (indices of the assistant's messages, rising).

        Raises:
            BadRequestError: the template refuses, in its own words.
            RenderingError: a turn cannot be separated from its surroundings.
        """
        check_options(options)
        marked = _at_the_same_turns(messages, placed := self._systems.placed(messages), marked)
        plain = [self._plain(message) for message in placed]
        shown = [TOOL] if tools else None
        turns: list[tuple[str, Messages, Own | None]] = []
        for number, at in enumerate(marked):
            calls: Messages = self._taken(placed[at]).get("tool_calls") or ()
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

    def remarks(self, messages: Messages, known: int) -> tuple[str, ...]:
        """Return what is written otherwise than the client wrote it, behind the first `known` messages, one word each.

        `system_in_place`: a system message, see `system_messages`. `arguments_text`: arguments of a call that are no JSON
        object, for a template that writes objects.
        """
        new, systems, calling = messages[known:], False, False
        for message in new:
            systems = systems or message["role"] == "system"
            calling = calling or "tool_calls" in message
        found = ("system_in_place",) * (systems and self._systems.in_place(messages, known))
        if calling and any(map(argument_texts, new)) and self.arguments_as_text != "written":
            found += ("arguments_text",)
        return found

    def turn(self, messages: Messages, tools: Tools, options: Options) -> str:
        """Return the text of the last message, the assistant's, as it would be written where it stands, its opening included.

        Raises:
            BadRequestError: the template refuses, in its own words.
            RenderingError: the turn cannot be separated from its surroundings.
        """
        (before,), after = self.transcript(messages, [len(messages) - 1], tools, options)
        text = self.whole(messages, tools, options)
        if not text.startswith(before) or not text.endswith(after) or len(before) + len(after) > len(text):
            raise RenderingError("what the template writes around a turn depends on what was said in it")
        return text[len(before) : len(text) - len(after)]

    def closing(self, options: Options, *, calls: bool = False) -> str:
        """Return what closes an assistant's turn that ends with text, or with calls; empty if the next role closes it."""
        turn: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]} if calls else SAID
        return self.tail(turn, (), None, options, earlier=SHORT).removesuffix(self.scaffold(None, options))

    def stop_literals(self, options: Options) -> tuple[str, ...]:
        """Return the special tokens with which a model of this template ends its turns, judged by their look.

        They begin a tail: `("<|im_end|>",)`, or what opens the next role (`("<|user|>", "<|observation|>")`).
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
        """Return whether a user's text parts may stay a list. Otherwise a space joins them, as in a worker."""
        return "user" in self._roles_of_parts

    def strips_alike(self, one: str, other: str, *, reasoning: bool, calls: bool, options: Options) -> bool:
        """Return whether two contents of a turn, which differ in the white space around them, are written alike.

        The turn is the last message, as it was when it was sampled: many templates write earlier turns otherwise.

        Args:
            reasoning, calls: whether the turn has any.
        """
        edges = tuple((text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]) for text in (one, other))
        key = (edges, bool(one.strip()), reasoning, calls, options_key(options))
        found = self._stripped.get(key)
        if found is None:
            turn: Message = {"role": "assistant", **({"reasoning_content": "Hm."} if reasoning else {})}
            if calls:
                turn["tool_calls"] = [CALL]
            with suppress(BadRequestError, RenderingError):
                check_options(options)
                texts = [
                    self._render([*SHORT, self._plain({**turn, "content": text})], [TOOL] if calls else None, options)
                    for text in (one, other)
                ]
                found = texts[0] == texts[1]
            remember(self._stripped, key, bool(found))
        return bool(found)

    def _placed_behind(self, behind: Messages) -> Messages:
        """Return the messages behind a turn as the template takes them. Raises RenderingError if one belongs before it."""
        if self._systems.belong_before(behind):
            raise RenderingError("a system message belongs to the beginning, which was written before (--late-system)")
        return self._systems.placed(behind, begins=False)

    # Finding what is a turn's own -----------------------------------------------------------------------------------------

    def _behind(
        self,
        before: Messages,
        calls: Messages,
        own: Own | None,
        following: Messages,
        tools: Tools,
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
        earlier: Messages,
        last: Message,
        following: Messages,
        tools: Tools,
        options: Options,
        *,
        continue_final: bool,
    ) -> str:
        """Return the tail in the conversation itself. The turn keeps its own text, for templates that read it."""
        before = [self._plain(self._taken(message)) for message in self._systems.placed(earlier)]
        calls: Messages = last.get("tool_calls") or ()
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

    def _plan(self, named: tuple[object, ...], options: Options, tools: bool, called: bool) -> _Plan:
        """Return the plan for these options, whose `options_key` is `named`.

        New options are not tried: that takes 10 ms, and a date may never recur.
        """
        key = (named, tools, called)
        if key not in self._plans:
            remember(self._plans, key, None)
            return _Plan(short=False, tools=tools)
        plan = self._plans[key]
        if plan is None:
            plan = self._plans[key] = self._probe(options, tools, called)
        return plan

    def _probe(self, options: Options, tools: bool, called: bool) -> _Plan:
        """Try a few conversations: does a short one have the tails of longer ones, and do tools matter?

        Shapes that the template refuses show nothing. If no shape is left, everything is rendered.
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

    def _tails(self, before: Iterable[Message], tools: Tools, options: Options, called: bool) -> list[str | None]:
        """Return the tails of all shapes after these messages; None for each shape that is refused."""
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


def _at_the_same_turns(messages: Messages, placed: Messages, marked: Sequence[int]) -> Sequence[int]:
    """Return where turns of the assistant's are among messages as the template takes them."""
    if len(placed) == len(messages):
        return marked
    turns = [at for at, message in enumerate(placed) if message["role"] == "assistant"]
    number: dict[int, int] = {}
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            number[at] = turns[len(number)]
    return [number[at] for at in marked]


def _plain_option(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


def _holds(text: str, content: str | list[Message]) -> bool:
    pieces = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return all(piece.strip() in text for piece in pieces)
