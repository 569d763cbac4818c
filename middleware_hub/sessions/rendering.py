"""What a chat template writes around sampled turns: these themselves are never rendered, their tokens come from the store.

A start is the template's rendering of all messages. Every later turn renders only the **tail**: what the template writes
behind the turn that was sampled last. It is found by rendering a conversation with a sentinel in that turn: it stands behind.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nSENTINEL<|im_end|>\\n<|im_start|>user\\n...<|im_start|>assistant\\n
                                                                  `-- the tail ------------------------------------------'

    ...<tool_call>\\n{"name": "f", "arguments": {"x": "SENTINEL"}}\\n</tool_call><|im_end|>\\n<|im_start|>user\\n<tool_res...
                                                             `- own ---------'`-- the tail --------------------

A turn with calls holds the sentinel in their arguments, for many templates drop its content then, and what closes a call is
the turn's own, not the tail's. It is what such a turn writes more than one without calls, see `_cut`.

That conversation is a short one, a user's message in front and no tools, as long as the template's tails do not depend on
what came earlier, nor on tools. Whether they do is found out by trying (`_probe`), and remembered; if so, all is rendered.

A **transcript** is a rendering of everything with a sentinel in each of several turns, cut at these. In front of a sentinel
stands what opens the turn, and that is not always what the model was asked with (history has lost a `<think>`, or gained one):
it is known from short conversations, and cut off. A turn with another opening is not told from its surroundings.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

from middleware_hub.sessions.chat import Message, Tool
from middleware_hub.sessions.renderer import Options, Renderer, RenderingError, check_options
from middleware_hub.sessions.template_trials import ASKED, CALL, CALLED, EARLIER, ONE, RESULT, SAID, SHORT, SPOKEN, TOOL
from router.errors import BadRequestError

REMEMBERED = 1024
"""How many sets of options, and of names of tools, something is remembered for. Clients choose both."""

# What most special tokens look like: `<|im_end|>`, `<turn|>`, `<｜User｜>`, `<end_of_turn>`, `</s>`, `[/INST]`.
_SPECIAL_LOOK = r"<[|｜][^<>\s]{1,40}>|<[^<>\s]{1,40}[|｜]>|<(?:start|end)_of_[a-z]+>|</?s>|\[/?[A-Z_]{2,40}\]"


_NOT_ONCE = "the template drops an assistant's turn, or writes it more than once"
_CLOSED = "the template closes calls in more than one way"


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


class _Own(NamedTuple):
    """What a turn with calls writes of its own behind the sentinel, and where that one is."""

    place: Literal["arguments", "content"]
    text: str


_ASKING: tuple[list[Message], ...] = (
    SHORT,
    [*SHORT, ONE, RESULT],
    [*SHORT, SAID, ASKED],
    [*SHORT, ONE, RESULT, SAID, ASKED],
)
"""Behind these a model is asked to speak."""
_PLACES: tuple[Literal["arguments", "content"], ...] = ("arguments", "content")


class ChatTemplate(Renderer):
    """Renders conversations, and what of a conversation stands around sampled turns.

    Args:
        template: Jinja source, as in `tokenizer_config.json`.
        special_tokens: variables that every rendering sees (`bos_token`, `eos_token`, ...).

    Raises:
        BadRequestError: the template cannot be compiled.
    """

    def __init__(self, template: str, special_tokens: Mapping[str, str]) -> None:
        super().__init__(template, special_tokens, f"end{secrets.token_hex(12)}")
        # Letters and digits: no filter escapes, strips or splits them. Random: no client can write them.
        self._sentinel = f"sentinel{secrets.token_hex(12)}"
        named = sorted((token for token in special_tokens.values() if isinstance(token, str) and token), key=len)
        self._special = re.compile("|".join([*map(re.escape, reversed(named)), _SPECIAL_LOOK]))
        self._plans: dict[tuple[object, ...], _Plan | None] = {}
        self._owns: dict[tuple[object, ...], _Own] = {}
        self._scaffolds: dict[tuple[object, ...], tuple[str, ...]] = {}
        self._openings: dict[tuple[object, ...], frozenset[str]] = {}
        for tools in (False, True):
            for called in (False, True):
                self._plans[_key({}), tools, called] = self._probe({}, tools, called)  # no request waits for these

    def tail(
        self,
        last: Message,
        behind: Sequence[Message],
        tools: Sequence[Tool] | None,
        options: Options,
        *,
        earlier: Sequence[Message],
        continue_final: bool = False,
    ) -> str:
        """What stands behind the text that the model sampled for `last`, an assistant's message, perhaps with calls.

        That is its closing (`<|im_end|>\\n`), the messages `behind`, and the generation prompt. `earlier` are the messages
        in front of `last`. With `continue_final` the last message behind is the assistant's, and the tail ends with its
        content; with none behind it is `last` itself that goes on, and the tail is empty.

        Raises:
            BadRequestError: the template refuses, in its own words.
            RenderingError: the tail cannot be told from the turn, or does not hold all the messages behind it.
        """
        if continue_final and not behind:
            return ""
        calls: Sequence[Message] = last.get("tool_calls") or ()
        check_options(options)
        following = [self._plain(message) for message in behind]
        called = bool(calls) or any(message["role"] == "tool" or "tool_calls" in message for message in following)
        plan = self._plan(options, bool(tools), called)
        before = SHORT if plan.short else [self._plain(message) for message in earlier]
        shown = tools if plan.tools else None
        own = None
        if calls and plan.short:
            own = self._own_of(calls, tools, shown, options)
        elif calls:
            own = self._find_own(before, calls, shown, options)
        text = self._behind(before, calls, own, following, shown, options, continue_final=continue_final)
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
        turns: list[tuple[str, Sequence[Message], _Own | None]] = []
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
                raise RenderingError(_NOT_ONCE, "sentinel_collision", number)
            before = text[at:first]
            openings = self._openings_of(calls, own, tools, options)
            opening = max((one for one in openings if before.endswith(one)), key=len, default=None)
            if opening is None:
                raise RenderingError("the template opens an assistant's turn in an unknown way", "scaffold", number)
            pieces.append(before[: len(before) - len(opening)])
            at = text.rfind(sentinel) + len(sentinel)
            if own is not None:
                if not text.startswith(own.text, at):
                    raise RenderingError(_CLOSED, "scaffold", number)
                at += len(own.text)
        return Transcript(tuple(pieces), text[at:])

    def scaffold(self, tools: Sequence[Tool] | None, options: Options) -> str:
        """The generation prompt: what the template writes for the model to go on from (`<|im_start|>assistant\\n<think>\\n`).

        Raises:
            BadRequestError: the template refuses even a user's greeting.
        """
        found = self.scaffolds(tools, options)
        return found[0] if found else self._asked(SHORT, tools, options)[1]

    def scaffolds(self, tools: Sequence[Tool] | None, options: Options) -> tuple[str, ...]:
        """All generation prompts with these options: behind a user's message, and behind a tool's answer. Remembered."""
        key = (_key(options), bool(tools))
        found = self._scaffolds.get(key)
        if found is None:
            kinds: dict[str, None] = {}
            for before in _ASKING:
                try:
                    kinds[self._asked(before, tools, options)[1]] = None
                except (BadRequestError, RenderingError):
                    continue
            found = tuple(kinds)
            _remember(self._scaffolds, key, found)
        return found

    def header(self, tools: Sequence[Tool] | None, options: Options) -> str:
        """What every assistant's turn begins with, as far as short conversations tell (`<|im_start|>assistant\\n`)."""
        known = [*self.scaffolds(tools, options), *self._openings_of((), None, tools, options)]
        first, *others = [one for one in known if one] or [""]
        for other in others:
            first = first[: _alike(first, other)]
        return first

    @property
    def every_scaffold(self) -> Sequence[str]:
        """All generation prompts that were asked for, with any options: the last ones first."""
        # A copy, for this may run in a thread while the event loop adds to it.
        known = list(self._scaffolds.values())
        return list(dict.fromkeys(one for found in reversed(known) for one in found))

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
        own: _Own | None,
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
            raise RenderingError(_CLOSED)
        return rest[len(own.text) :]

    def _marked(self, calls: Sequence[Message], place: Literal["arguments", "content"], sentinel: str) -> Message:
        """An assistant's turn with the sentinel in it: in each of its calls, for not every template writes them all."""
        if not calls:
            return {"role": "assistant", "content": sentinel}
        inside = place == "arguments"
        arguments: Any = {"x": sentinel} if inside else {}
        if self._wants_text:
            arguments = json.dumps(arguments)
        marked = [{**call, "function": {**call["function"], "arguments": arguments}} for call in calls]
        return {"role": "assistant", "content": "" if inside else sentinel, "tool_calls": marked}

    def _after(self, text: str, limit: int) -> str:
        head, found, rest = text.rpartition(self._sentinel)
        if not found or head.count(self._sentinel) >= limit:
            raise RenderingError(_NOT_ONCE)
        return rest

    def _asked(self, before: Sequence[Message], tools: Sequence[Tool] | None, options: Options) -> tuple[str, str]:
        """A rendering of these messages, and the generation prompt behind it."""
        check_options(options)
        shown, plain = [TOOL] if tools else None, [self._plain(message) for message in before]
        asking, silent = (self._render(plain, shown, options, generate=generate) for generate in (True, False))
        # Phi-3 ends with EOS where no reply is asked for: what both begin with, up to a whole special token.
        alike = _alike(asking, silent)
        if alike < len(silent):
            cut = (match.start() for match in self._special.finditer(asking) if match.start() < alike < match.end())
            alike = next(cut, alike)
        return asking[:alike], asking[alike:]

    def _openings_of(
        self, calls: Sequence[Message], own: _Own | None, tools: Sequence[Tool] | None, options: Options
    ) -> frozenset[str]:
        """What may stand between the messages before a turn and the sentinel in it, as far as short conversations tell."""
        key = (self._called(calls), own and own.place, _key(options), bool(tools))
        found = self._openings.get(key)
        if found is None:
            turn = self._marked(calls, own.place if own else "content", self._sentinel)
            answers = [{**RESULT, "tool_call_id": call.get("id"), "name": call["function"]["name"]} for call in calls]
            openings: set[str] = set()
            for before in _ASKING:
                for behind in ([], [ASKED]):
                    after = [self._plain(message) for message in (*answers, *behind)]
                    try:
                        head, _ = self._asked(before, tools, options)
                        front = [self._plain(message) for message in before]
                        text = self._render([*front, turn, *after], [TOOL] if tools else None, options)
                    except (BadRequestError, RenderingError):
                        continue
                    first = text.find(self._sentinel)
                    if text.startswith(head) and first >= len(head):
                        openings.add(text[len(head) : first])
            found = frozenset(openings)
            _remember(self._openings, key, found)
        return found

    def _own_of(
        self,
        calls: Sequence[Message],
        tools: Sequence[Tool] | None,
        shown: Sequence[Tool] | None,
        options: Options,
    ) -> _Own:
        """What a turn with such calls writes of its own in a short conversation. Remembered."""
        key = (self._called(calls), _key(options), bool(tools))
        own = self._owns.get(key)
        if own is None:
            own = self._find_own(SHORT, calls, shown, options)
            _remember(self._owns, key, own)
        return own

    def _called(self, calls: Sequence[Message]) -> tuple[object, ...]:
        """What a turn writes around the arguments of its calls hangs on: their names, and in some templates their ids."""
        return tuple((call["function"]["name"], call.get("id") if self._writes_ids else None) for call in calls)

    @cached_property
    def _writes_ids(self) -> bool:
        """Whether a call's own id is written into it: Mistral's templates do it. Those that refuse the trial may do so, too."""
        texts = []
        for name in ("call00000", "call00001"):
            plain = self._plain({**ONE, "tool_calls": [{**CALL, "id": name}]})
            texts.append(self._attempt([*SHORT, plain]))
        return texts[0] is None or texts[0] != texts[1]

    def _find_own(
        self, before: Sequence[Message], calls: Sequence[Message], tools: Sequence[Tool] | None, options: Options
    ) -> _Own:
        for place in _PLACES:
            # Nothing behind: for templates that want every call answered before the user speaks.
            for behind in (SHORT, ()):
                try:
                    calling, speaking = (
                        self._after(self._render([*before, turn, *behind], tools, options), limit)
                        for turn, limit in (
                            (self._marked(calls, place, self._sentinel), len(calls)),
                            (self._marked((), place, self._sentinel), 1),
                        )
                    )
                except (BadRequestError, RenderingError):
                    continue
                return _Own(place, self._cut(calling, speaking))
        raise RenderingError("the template writes neither the arguments of a call nor the text in front of it")

    def _cut(self, calling: str, speaking: str) -> str:
        """What a turn with calls writes of its own, given what stands behind the sentinel with calls and without.

        Mostly both end alike, closing and all, and what is more is the turn's own. gpt-oss closes calls with a token of
        their own (`<|call|>`, a text with `<|end|>`), and Gemma 4 opens the answer at once: then the last special token
        in front of where the two begin to be alike is what closes the turn.
        """
        if calling.endswith(speaking):
            return calling[: len(calling) - len(speaking)]
        differs = len(calling) - _alike(calling[::-1], speaking[::-1])
        starts = [match.start() for match in self._special.finditer(calling) if match.start() < differs]
        return calling[: starts[-1] if starts else differs]

    def _plan(self, options: Options, tools: bool, called: bool) -> _Plan:
        """Options seen for the first time are not tried: that takes some 10 ms, and a date may never be seen again."""
        key = (_key(options), tools, called)
        if key not in self._plans:
            _remember(self._plans, key, None)
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
        owns: dict[int, _Own | None] = {0: None}
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


def _alike(one: str, other: str) -> int:
    """How many characters both begin with."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


def _key(options: Options) -> tuple[object, ...]:
    """What the tail's form may hang on: a plain value counts, of a list or an object (`documents`) only that it is there."""
    if not options:
        return ()
    return tuple(
        (name, repr(value) if value is None or isinstance(value, str | int | float) else None)
        for name, value in sorted(options.items())
    )


def _remember(memory: dict[tuple[object, ...], Any], key: tuple[object, ...], value: object) -> None:
    if len(memory) >= REMEMBERED:
        memory.clear()
    memory[key] = value


def _holds(text: str, content: str | list[Message]) -> bool:
    pieces = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return all(piece.strip() in text for piece in pieces)
