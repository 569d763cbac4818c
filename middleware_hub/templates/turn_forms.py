"""What an assistant's turn itself writes in a rendering, found with short conversations: its opening, and what closes calls.

<|im_start|>assistant\\n<think>\\n                                       a generation prompt: the model is asked
<|im_start|>assistant\\n SENTINEL                                       an opening: the turn is history
<|im_start|>assistant\\n<tool_call>\\n{..."x": "SENTINEL"}}\\n</tool_call>  another; after the sentinel, the turn's own
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

from middleware_hub.chat.messages import Message
from middleware_hub.templates.reads import reads_of
from middleware_hub.templates.renderer import (
    Messages,
    Options,
    Renderer,
    RenderingError,
    Tools,
    alike,
    check_options,
    remember,
)
from middleware_hub.templates.system_messages import LateSystem, SystemMessages
from middleware_hub.templates.trials import ASKED, ASKING, CALL, ONE, RESULT, SHORT, TOOL, TWO
from router.errors import BadRequestError

LONGEST_KEY = 1024
"""Characters of a set of options that is remembered as it is; of a longer one a digest is."""

MOST_ASKED = 16
"""Generation prompts that are compared before one is rendered."""

# What most special tokens look like: `<|im_end|>`, `<turn|>`, `<｜User｜>`, `<end_of_turn>`, `</s>`, `[/INST]`.
_SPECIAL_LOOK = r"<[|｜][^<>\s]{1,40}>|<[^<>\s]{1,40}[|｜]>|<(?:start|end)_of_[a-z]+>|</?s>|\[/?[A-Z_]{2,40}\]"


NOT_ONCE = "the template drops an assistant's turn, or writes it more than once"
CLOSED = "the template closes calls in more than one way"


class Own(NamedTuple):
    """The text that a turn with calls writes after the sentinel, and the place of the sentinel."""

    place: Literal["arguments", "content"]
    text: str


class Short(NamedTuple):
    """A short conversation as a template renders it: its messages, their text, and the generation prompt after it."""

    messages: list[Message]
    text: str
    prompt: str


_PLACES: tuple[Literal["arguments", "content"], ...] = ("arguments", "content")


class TurnForms(Renderer):
    """Knows the forms of turns, and remembers them per set of options and tools."""

    def __init__(self, template: str, special_tokens: Mapping[str, str], late_system: LateSystem) -> None:
        super().__init__(template, special_tokens, f"end{secrets.token_hex(12)}")
        self._systems = SystemMessages(
            lambda messages: self._attempt([self._plain(message) for message in messages]),
            f"mark{secrets.token_hex(12)}",
            late_system,
        )
        self._reads = reads_of(template)
        # Letters and digits: no filter escapes, strips or splits them. Random: no client can write them.
        self._sentinel = f"sentinel{secrets.token_hex(12)}"
        named = sorted((token for token in special_tokens.values() if isinstance(token, str) and token), key=len)
        self._special = re.compile("|".join([*map(re.escape, reversed(named)), _SPECIAL_LOOK]))
        self._owns: dict[tuple[object, ...], Own] = {}
        self._shorts: dict[tuple[object, ...], tuple[Short, ...]] = {}
        self._scaffolds: dict[tuple[object, ...], tuple[str, ...]] = {}
        self._headers: dict[tuple[object, ...], str] = {}
        self._openings: dict[tuple[object, ...], frozenset[str]] = {}
        self._asked_before: tuple[str, ...] = ()
        """Generation prompts that no short conversation shows, the last ones first."""

    def reads(self, messages: Iterable[Message]) -> bool:
        """Return whether the template looks for something in these messages: then no others can stand for them."""
        found = self._reads
        return found.opaque or (bool(found.words) and found.concern(messages))

    def distrust(self) -> bool:
        """Never let messages stand for others again. Return whether that changes anything."""
        new, self._reads = not self._reads.opaque, self._reads._replace(opaque=True)
        return new

    # Generation prompts -------------------------------------------------------------------------------------------------

    def scaffold(self, tools: Tools, options: Options) -> str:
        """Return the generation prompt, from which the model goes on (`<|im_start|>assistant\\n<think>\\n`).

        Raises:
            BadRequestError: the template refuses even a user's greeting.
        """
        found = self.scaffolds(tools, options)
        return found[0] if found else self._asked(SHORT, tools, options)[1]

    def scaffolds(self, tools: Tools, options: Options) -> tuple[str, ...]:
        """Return all generation prompts with these options: after a user's message, and after a tool's answer. Remembered."""
        key = (options_key(options), bool(tools))
        found = self._scaffolds.get(key)
        if found is None:
            found = tuple(dict.fromkeys(short.prompt for short in self._short(tools, options)))
            remember(self._scaffolds, key, found)
        return found

    def asked_with(self, text: str, messages: Messages, tools: Tools, options: Options) -> str | None:
        """Return the generation prompt at the end of a prompt, if it is known; None if it has to be rendered."""
        known = self.scaffolds(tools, options)
        found = _ending(text, known)
        if found or ("" in known and not self.reads(messages)):
            return found
        return _ending(text, self._asked_before) or None

    def asked_here(self, text: str, messages: Messages, tools: Tools, options: Options) -> str:
        """Return the generation prompt rendered from these messages; empty if the text does not end with it."""
        try:
            check_options(options)
            _, found = self._parted([self._plain(one) for one in self._systems.placed(messages)], tools, options)
        except BadRequestError:
            return ""
        if not found or not text.endswith(found):
            return ""
        self._asked_before = (found, *self._asked_before[: MOST_ASKED - 1])
        return found

    def header(self, tools: Tools, options: Options) -> str:
        """Return what every assistant's turn begins with in short conversations (`<|im_start|>assistant\\n`)."""
        key = (options_key(options), bool(tools))
        found = self._headers.get(key)
        if found is None:
            known = [*self.scaffolds(tools, options), *self._openings_of((), None, tools, options)]
            known += self._openings_of((), None, tools, options, reasoning=True)
            found, *others = [one for one in known if one] or [""]
            for other in others:
                found, _ = self._apart(found, other)
            remember(self._headers, key, found)
        return found

    def _short(self, tools: Tools, options: Options) -> tuple[Short, ...]:
        """Return those conversations after which a model is asked to speak that the template accepts. Remembered."""
        key = (options_key(options), bool(tools))
        found = self._shorts.get(key)
        if found is None:
            shorts = []
            for before in ASKING:
                with contextlib.suppress(BadRequestError, RenderingError):
                    front = [self._plain(message) for message in before]
                    shorts.append(Short(front, *self._asked(before, tools, options)))
            found = tuple(shorts)
            remember(self._shorts, key, found)
        return found

    def _asked(self, before: Messages, tools: Tools, options: Options) -> tuple[str, str]:
        """Return a rendering of these messages, and the generation prompt after it."""
        check_options(options)
        return self._parted([self._plain(message) for message in before], [TOOL] if tools else None, options)

    def _parted(self, plain: list[Message], tools: Tools, options: Options) -> tuple[str, str]:
        asking, silent = (self._render(plain, tools, options, generate=generate) for generate in (True, False))
        text, prompt = self._apart(asking, silent)
        if prompt:
            return text, prompt
        # None, or one that is always written (Command R7B): then it begins where a turn of the history is opened instead.
        with contextlib.suppress(BadRequestError):
            turn = self._render([*plain, self._marked((), "content", self._sentinel)], tools, options)
            head, found, _ = turn.partition(self._sentinel)
            text, prompt = self._apart(asking, head if found else asking)
        said = plain[-1]["content"]
        return (text, prompt) if isinstance(said, str) and said in text else (asking, "")

    def _apart(self, text: str, other: str) -> tuple[str, str]:
        """Return what two texts begin with, and the rest of the first one, with whole special tokens."""
        common = alike(text, other)
        # Phi-3 ends with EOS if no reply is asked for, so the common beginning ends before a whole special token.
        if common < len(other):
            cut = (match.start() for match in self._special.finditer(text) if match.start() < common < match.end())
            common = next(cut, common)
        return text[:common], text[common:]

    # What is a turn's own -----------------------------------------------------------------------------------------------

    def _openings_of(
        self, calls: Messages, own: Own | None, tools: Tools, options: Options, *, reasoning: bool = False
    ) -> frozenset[str]:
        """Return the texts that short conversations show between earlier messages and the sentinel in a turn.

        `reasoning`: that of the turn is among them, as far as the template writes it.
        """
        key = (self._called(calls), own and own.place, options_key(options), bool(tools), reasoning)
        found = self._openings.get(key)
        if found is None:
            turn = self._marked(calls, own.place if own else "content", self._sentinel)
            if reasoning:
                turn["reasoning_content"] = "Hm."
            answers = [{**RESULT, "tool_call_id": call.get("id"), "name": call["function"]["name"]} for call in calls]
            openings: set[str] = set()
            for behind in ([], [ASKED]):
                after = [self._plain(message) for message in (*answers, *behind)]
                for short in self._short(tools, options):
                    try:
                        text = self._render([*short.messages, turn, *after], [TOOL] if tools else None, options)
                    except (BadRequestError, RenderingError):
                        continue
                    first = text.find(self._sentinel)
                    if text.startswith(short.text) and first >= len(short.text):
                        openings.add(text[len(short.text) : first])
            found = frozenset(openings)
            remember(self._openings, key, found)
        return found

    def _opening_here(
        self, plain: Messages, at: int, sentinel: str, before: str, tools: Tools, options: Options
    ) -> str | None:
        """Return the opening of a turn in this conversation, for templates whose opening depends on what was said.

        Args:
            plain: all messages; the one at `at` holds the sentinel.
            sentinel: the sentinel in the turn.
            before: the rendering before that sentinel; an opening ends it.
        """
        header, shown = self.header(tools, options), [TOOL] if tools else None
        try:
            head = self._render(list(plain[:at]), shown, options, generate=False) if header and at else ""
            asks = head == self._render(list(plain[:at]), shown, options)  # always, as Command R7B's
            text = self._render(list(plain), shown, options)
        except BadRequestError:
            return None
        opening = text[len(head) : text.find(sentinel)]
        if not head or not text.startswith(head) or not before.endswith(opening):
            return None
        return opening if asks or (opening.startswith(header) and opening.count(header) == 1) else None

    def _own_of(self, calls: Messages, tools: Tools, shown: Tools, options: Options) -> Own:
        """Return what a turn with such calls itself writes in a short conversation. Remembered."""
        key = (self._called(calls), options_key(options), bool(tools))
        own = self._owns.get(key)
        if own is None:
            own = self._find_own(SHORT, calls, shown, options)
            remember(self._owns, key, own)
        return own

    def _taken(self, turn: Message) -> Message:
        """Return a turn, with the first of its calls only if the template takes one call alone, as Llama 3.1's does.

        A model may sample more of them. Its turn is never rendered, and what is written behind it is the same.
        """
        calls: Messages = turn.get("tool_calls") or ()
        return turn if len(calls) < 2 or not self._refuses_two else {**turn, "tool_calls": calls[:1]}

    @cached_property
    def _refuses_two(self) -> bool:
        """Whether the template takes a turn with one call, and refuses one with two."""
        one, two = (self._attempt([*SHORT, self._plain(turn)]) for turn in (ONE, TWO))
        return one is not None and two is None

    def _called(self, calls: Messages) -> tuple[object, ...]:
        """Return what the text around calls' arguments depends on: their names, and in some templates their ids."""
        return tuple((call["function"]["name"], call.get("id") if self._writes_ids else None) for call in calls)

    @cached_property
    def _writes_ids(self) -> bool:
        """Whether calls are written with their ids, as by Mistral's templates; assumed of one that refuses the trial."""
        found = []
        for behind in ([], [ASKED]):  # Apriel's writes them in earlier turns alone
            turns = [self._plain({**ONE, "tool_calls": [{**CALL, "id": name}]}) for name in ("call00000", "call00001")]
            found.append([self._attempt([*SHORT, turn, *behind]) for turn in turns])
        return found[0][0] is None or any(one != other for one, other in found)

    def _find_own(self, before: Messages, calls: Messages, tools: Tools, options: Options) -> Own:
        for place in _PLACES:
            # The empty list is for templates that want every call answered before the user speaks.
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
                return Own(place, self._cut(calling, speaking))
        raise RenderingError("the template writes neither the arguments of a call nor the text in front of it")

    def _cut(self, calling: str, speaking: str) -> str:
        """Return what a turn with calls itself writes, given the texts after the sentinel with calls and without.

        Usually both end alike, closing included, and the rest is the turn's own. gpt-oss closes calls with a separate token
        (`<|call|>`, a text with `<|end|>`), and Gemma 4 opens the answer at once: then the last special token before
        the place where the two become alike closes the turn.
        """
        if calling.endswith(speaking):
            return calling[: len(calling) - len(speaking)]
        differs = len(calling) - alike(calling[::-1], speaking[::-1])
        starts = [match.start() for match in self._special.finditer(calling) if match.start() < differs]
        return calling[: starts[-1] if starts else differs]

    def _marked(self, calls: Messages, place: Literal["arguments", "content"], sentinel: str) -> Message:
        """Return an assistant's turn with the sentinel in it: in each of its calls, as some templates drop calls."""
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
            raise RenderingError(NOT_ONCE)
        return rest


def _ending(text: str, known: Sequence[str]) -> str:
    """Return the longest of `known` that a text ends with."""
    found = ""
    for one in known:
        if len(one) > len(found) and text.endswith(one):
            found = one
    return found


def options_key(options: Options) -> tuple[object, ...]:
    """Return what a tail may depend on: the value of a plain option, the presence of a list or object (`documents`)."""
    if not options:
        return ()
    key = tuple(
        (name, repr(value) if value is None or isinstance(value, str | int | float) else None)
        for name, value in sorted(options.items())
    )
    spelled = str(key)  # surrogates are escaped
    return key if len(spelled) <= LONGEST_KEY else (blake2b(spelled.encode()).digest(),)
