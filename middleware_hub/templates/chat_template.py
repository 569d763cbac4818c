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
the template spells, everything is rendered as well (see `decisions`). A comparison (`sessions/prompt/tails.py`) finds what is
still missed, and from then on (`distrust`) this template gets no short conversations. If a template only copies the texts after
the turn, other texts are put into what it wrote around the first ones (see `slots`).

A **transcript** is a rendering of everything with a sentinel in each of several turns, cut at these. A sentinel follows the
opening of the turn, which is not always the generation prompt that the model got (the history has lost a `<think>`, or gained
one): short conversations show the opening, and it is cut off. A turn with an unknown opening cannot be separated.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from middleware_hub.chat.messages import ChatRequest, Message, argument_texts
from middleware_hub.spans.media import CLOSE, OPEN
from middleware_hub.templates.decisions import decisions_of
from middleware_hub.templates.renderer import Messages, Options, Renderer, RenderingError, Tools, check_options
from middleware_hub.templates.slots import Slots
from middleware_hub.templates.source import at_time, tells_time
from middleware_hub.templates.system_messages import LateSystem, SystemMessages
from middleware_hub.templates.trials import CALL, CALLED, EARLIER, RESULT, SAID, SHORT, SPOKEN, TOOL, Remembered
from middleware_hub.templates.turn_forms import CLOSED, NO_OWN_TEXT, NOT_ONCE, Own, TurnForms, options_key
from router.errors import BadRequestError

MOST_ASKED = 16
"""Generation prompts that are compared before one is rendered."""


class _Plan(NamedTuple):
    """How to find tails: in a short conversation or the full one, with tools or without."""

    short: bool
    tools: bool


class CutRendering(NamedTuple):
    """A rendering without some of its turns.

    Attributes:
        pieces: the text before each of these turns, from the end of the previous one, without the turn's opening.
        tail: the text after the last of these turns.
    """

    pieces: tuple[str, ...]
    tail: str


class ChatTemplate:
    """Renders conversations, and the text around the sampled turns of a conversation.

    Args:
        source: Jinja source, as in `tokenizer_config.json`.
        special_tokens: variables that every rendering sees (`bos_token`, `eos_token`, ...).
        late_system: the treatment of a system message that the template does not write where it stands.
        placeholder: the text that it writes for a picture; empty if the model reads none.

    Raises:
        BadRequestError: the template cannot be compiled.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        late_system: LateSystem = "in_place",
        placeholder: str = "",
    ) -> None:
        self._renderer = Renderer(source, special_tokens)
        self._renderer.placeholder = placeholder
        self._forms = TurnForms(self._renderer)
        self._systems = SystemMessages(self._renderer, late_system)
        # The renderer refuses a text with a character of marks if the model reads pictures.
        self._slots = Slots(source, (OPEN, CLOSE) if placeholder else ())
        self._decisions = decisions_of(source)
        self._late_system: LateSystem = late_system
        self._plans: Remembered[_Plan | None] = Remembered()
        for tools in (False, True):
            for called in (False, True):
                self._plans[options_key({}), tools, called] = None
        self._stripped: Remembered[bool] = Remembered()
        self._tells_time = tells_time(source)
        self._dated: Remembered[ChatTemplate] = Remembered()
        self._asked_before: tuple[str, ...] = ()
        """Generation prompts that no short conversation shows, the last ones first."""

    def warm(self) -> None:
        """Do now the work that the first request would wait for: import transformers, and find out how to render tails."""
        for tools in (False, True):
            for called in (False, True):
                self._plan(options_key({}), {}, tools, called)
            self.header([TOOL] if tools else None, {})
        _ = self.wants_short_ids
        self._systems.warm()

    def on_other_days(self, times: Iterable[float]) -> Iterator[ChatTemplate]:
        """Yield the template with the dates of `times` (seconds since 1970) that are not today's, if it writes the date."""
        if not self._tells_time:
            return
        source, special_tokens = self._renderer.source, self._renderer.special_tokens
        today = at_time(source, time.time())
        for dated in dict.fromkeys(at_time(source, moment) for moment in times):
            if dated != today:
                found = self._dated.get((dated,))
                if found is None:
                    found = ChatTemplate(
                        dated, special_tokens, late_system=self._late_system, placeholder=self._renderer.placeholder
                    )
                    self._dated[dated,] = found
                yield found

    # What the template does with messages -----------------------------------------------------------------------------------

    @property
    def wants_short_ids(self) -> bool:
        return self._renderer.wants_short_ids

    def reads(self, messages: Iterable[Message]) -> bool:
        """Return whether the template looks for something in these messages: then no others can stand for them."""
        found = self._decisions
        return found.opaque or (bool(found.words) and found.concern(messages))

    def distrust(self) -> bool:
        """Never let messages stand for others again. Return whether that changes anything."""
        new, self._decisions = not self._decisions.opaque, self._decisions._replace(opaque=True)
        return new

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
        text = self._renderer.until_end(self._renderer.plain(placed), tools, options, continue_final=continue_final)
        if placed is not messages:
            for at, message in enumerate(messages):
                if message["role"] == "system" and not _holds(text, message.get("content") or ""):
                    raise BadRequestError(
                        f"messages[{at}]: the chat template writes this system message in no place: put its text into the "
                        "first message, or into a message of the user's"
                    )
        return text

    def conversation(self, request: ChatRequest) -> str:
        """Render all messages of a request; see `whole`."""
        return self.whole(request.messages, request.tools, request.template, continue_final=request.continue_final)

    def tail_of(self, request: ChatRequest, covered: int, *, whole: bool) -> str:
        """Render what follows the first `covered` messages of a request; see `tail`."""
        messages = request.messages
        return self.tail(
            messages[covered - 1],
            messages[covered:],
            request.tools,
            request.template,
            earlier=messages[: covered - 1],
            continue_final=request.continue_final,
            whole=whole,
        )

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
        """Return the text after the sampled turn `last`, an assistant's message that may have calls.

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
        (last,) = self._forms.taken((last,))
        calls: Messages = last.get("tool_calls") or ()
        placed = behind
        for message in behind:
            if message["role"] == "system":
                placed = self._placed_behind(behind)
                break
        following, called = self._renderer.plain(placed), bool(calls)
        for message in following:
            called = called or message["role"] == "tool" or "tool_calls" in message
        shown, whole = tools, self.reads((*earlier, last, *placed)) if whole is None else whole
        if not whole:
            variant = options_key(options)
            plan = self._plan(variant, options, bool(tools), called)
            shown, whole = tools if plan.tools else None, not plan.short
        if whole:
            text = self._behind_all(
                earlier, last, following, tools=shown, options=options, continue_final=continue_final
            )
        else:
            own = self._forms.own_of(calls, tools, shown, options)
            render = partial(
                self._forms.behind, SHORT, calls, own, tools=shown, options=options, continue_final=continue_final
            )
            if shown or continue_final or not all(map(_plain_option, options.values())):
                text = render(following)
            else:
                key = (own, self._forms.called(calls) if calls else (), variant)
                text = self._slots.rendered(key, following, render)
        for message in behind:
            # Some templates write every system message at the beginning, where nothing can be added later, and some write
            # nothing of the tool's message to which it was appended.
            if message["role"] in ("system", "developer") and not _holds(text, message.get("content") or ""):
                raise RenderingError(f"the template does not write a {message['role']} message where it stands")
        return text

    def transcript(
        self, messages: Messages, marked: Sequence[int], tools: Tools, options: Options, *, continue_final: bool = False
    ) -> CutRendering:
        """Render everything, cut at the turns `marked` (indices of the assistant's messages, rising).

        Raises:
            BadRequestError: the template refuses, in its own words.
            RenderingError: a turn cannot be separated from its surroundings.
        """
        check_options(options)
        marked = _at_the_same_turns(messages, placed := self._systems.placed(messages), marked)
        plain = self._renderer.plain(placed)
        shown = [TOOL] if tools else None
        turns: list[tuple[str, Messages, Own]] = []
        for number, at in enumerate(marked):
            (turn,) = self._forms.taken((placed[at],))
            calls: Messages = turn.get("tool_calls") or ()
            own = self._forms.own_of(calls, tools, shown, options)
            sentinel = f"{self._forms.sentinel}{number:06}"
            turns.append((sentinel, calls, own))
            plain[at] = self._forms.marked(calls, own.place, sentinel)
        text = self._renderer.until_end(plain, tools, options, continue_final=continue_final)
        pieces, at = [], 0
        for number, (sentinel, calls, own) in enumerate(turns):
            first = text.find(sentinel, at)
            if first < 0 or text.count(sentinel) > (len(calls) or 1) or text.find(sentinel) < at:
                raise RenderingError(NOT_ONCE, "sentinel_collision", number)
            before = text[at:first]
            openings = self._forms.openings_of(calls, own, tools, options)
            opening = max((one for one in openings if before.endswith(one)), key=len, default=None)
            if opening is None:
                opening = self._forms.opening_here(
                    plain, marked[number], sentinel, before, tools=tools, options=options
                )
            if opening is None:
                raise RenderingError("the template opens an assistant's turn in an unknown way", "scaffold", number)
            pieces.append(before[: len(before) - len(opening)])
            at = text.rfind(sentinel) + len(sentinel)
            if not text.startswith(own.text, at):
                raise RenderingError(CLOSED, "scaffold", number)
            at += len(own.text)
        return CutRendering(tuple(pieces), text[at:])

    def remarks(self, messages: Messages, known: int) -> tuple[str, ...]:
        """Return a word for each thing that the template writes otherwise than the client, behind the first `known` messages.

        `system_in_place`: a system message, see `system_messages`. `arguments_text`: arguments of a call that are no JSON
        object, for a template that writes objects.
        """
        new, systems, calling = messages[known:], False, False
        for message in new:
            systems = systems or message["role"] == "system"
            calling = calling or "tool_calls" in message
        found = ("system_in_place",) * (systems and self._systems.in_place(messages, known))
        if calling and any(map(argument_texts, new)) and self._renderer.arguments_as_text != "written":
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

    # Generation prompts -------------------------------------------------------------------------------------------------

    def scaffolds(self, tools: Tools, options: Options) -> tuple[str, ...]:
        """Return all generation prompts with these options: after a user's message, and after a tool's answer."""
        return self._forms.scaffolds(tools, options)

    def header(self, tools: Tools, options: Options) -> str:
        """Return the beginning of every assistant's turn in short conversations (`<|im_start|>assistant\\n`)."""
        return self._forms.header(tools, options)

    def asked_with(self, text: str, messages: Messages, tools: Tools, options: Options) -> str | None:
        """Return the generation prompt at the end of a prompt, if it is known; None if it has to be rendered."""
        known = self._forms.scaffolds(tools, options)
        found = _ending(text, known)
        if found or ("" in known and not self.reads(messages)):
            return found
        return _ending(text, self._asked_before) or None

    def asked_here(self, text: str, messages: Messages, tools: Tools, options: Options) -> str:
        """Return the generation prompt rendered from these messages; empty if the text does not end with it."""
        try:
            plain = self._renderer.plain(self._systems.placed(messages))
            _, found = self._forms.parted(plain, tools, options)
        except BadRequestError:
            return ""
        if not found or not text.endswith(found):
            return ""
        self._asked_before = (found, *self._asked_before[: MOST_ASKED - 1])
        return found

    def stop_literals(self, options: Options) -> tuple[str, ...]:
        """Return the special tokens with which a model of this template ends its turns, judged by their look.

        They begin a tail: `("<|im_end|>",)`, or the opening of the next role (`("<|user|>", "<|observation|>")`).
        """
        found: dict[str, None] = {}
        calling: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        for turn, behind in ((SAID, SHORT), (calling, [RESULT])):
            try:
                tail = self.tail(turn, behind, None, options, earlier=SHORT)
            except (BadRequestError, RenderingError):
                continue
            if (literal := self._forms.special.match(tail)) is not None:
                found[literal[0]] = None
        return tuple(found)

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
            texts = []
            with suppress(BadRequestError, RenderingError):
                check_options(options)
                for text in (one, other):
                    plain = self._renderer.plain([*SHORT, {**turn, "content": text}])
                    texts.append(self._renderer.render(plain, [TOOL] if calls else None, options))
            found = self._stripped[key] = len(texts) == 2 and texts[0] == texts[1]
        return found

    def _placed_behind(self, behind: Messages) -> Messages:
        """Return the messages behind a turn as the template takes them. Raises RenderingError if one belongs before it."""
        if self._systems.belong_before(behind):
            raise RenderingError("a system message belongs to the beginning, which was written before (--late-system)")
        return self._systems.placed(behind, begins=False)

    # Finding what is a turn's own -----------------------------------------------------------------------------------------

    def _behind_all(
        self,
        earlier: Messages,
        last: Message,
        following: Messages,
        *,
        tools: Tools,
        options: Options,
        continue_final: bool,
    ) -> str:
        """Return the tail in the conversation itself. The turn keeps its own text, for templates that read it."""
        before = self._renderer.plain(self._forms.taken(self._systems.placed(earlier)))
        calls: Messages = last.get("tool_calls") or ()
        render = partial(
            self._forms.behind, following=following, tools=tools, options=options, continue_final=continue_final
        )
        if calls:
            with suppress(BadRequestError, RenderingError):
                return render(before, calls, self._forms.own_of(calls, tools, tools, options))
            return render(before, calls, self._forms.find_own(before, calls, tools, options))
        (said,) = self._renderer.plain((last,))
        if isinstance(said["content"], str) and said["content"]:
            turn = {**said, "content": said["content"] + self._forms.sentinel}
            with suppress(RenderingError):
                text = self._renderer.until_end(
                    [*before, turn, *following], tools, options, continue_final=continue_final
                )
                return self._forms.after(text, 1)
        return render(before, (), NO_OWN_TEXT)

    def _plan(self, variant: Hashable, options: Options, tools: bool, called: bool) -> _Plan:
        """Return the plan for options with this key. New ones are not tried: that takes 10 ms, and a date may never recur."""
        key = (variant, tools, called)
        if key not in self._plans:
            self._plans[key] = None
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
        earlier = self._renderer.plain(before)
        found: list[str | None] = []
        owns = {0: NO_OWN_TEXT}
        for calls, behind in CALLED if called else SPOKEN:
            try:
                if len(calls) not in owns:
                    owns[len(calls)] = self._forms.find_own(earlier, calls, tools, options)
                own = owns[len(calls)]
                following = self._renderer.plain(behind)
                found.append(self._forms.behind(earlier, calls, own, following, tools=tools, options=options))
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


def _ending(text: str, known: Sequence[str]) -> str:
    """Return the longest of `known` that a text ends with."""
    found = ""
    for one in known:
        if len(one) > len(found) and text.endswith(one):
            found = one
    return found


def _plain_option(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


def _holds(text: str, content: str | list[Message]) -> bool:
    pieces = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return all(piece.strip() in text for piece in pieces)
