"""The text of an assistant's turn itself in a rendering, found with short conversations: its opening, and the closing of calls.

<|im_start|>assistant\\n<think>\\n                                       a generation prompt: the model is asked
<|im_start|>assistant\\n SENTINEL                                       an opening: the turn is history
<|im_start|>assistant\\n<tool_call>\\n{..."x": "SENTINEL"}}\\n</tool_call>  another; after the sentinel, the turn's own
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Iterator
from functools import cached_property
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

from middleware_hub.chat.messages import Message
from middleware_hub.templates.renderer import Messages, Options, Renderer, RenderingError, Tools, alike, check_options
from middleware_hub.templates.trials import ASKED, ASKING, CALL, ONE, RESULT, SHORT, TOOL, TWO, Remembered
from router.errors import BadRequestError

LONGEST_KEY = 1024
"""Characters of a set of options that is remembered as it is; of a longer one a digest is."""

# The look of most special tokens: `<|im_end|>`, `<turn|>`, `<｜User｜>`, `<end_of_turn>`, `</s>`, `[/INST]`.
_SPECIAL_LOOK = r"<[|｜][^<>\s]{1,40}>|<[^<>\s]{1,40}[|｜]>|<(?:start|end)_of_[a-z]+>|</?s>|\[/?[A-Z_]{2,40}\]"


NOT_ONCE = "the template drops an assistant's turn, or writes it more than once"
CLOSED = "the template closes calls in more than one way"


class Own(NamedTuple):
    """The text that a turn itself writes after the sentinel, if it has calls, and the place of the sentinel."""

    place: Literal["arguments", "content"] = "content"
    text: str = ""


NO_OWN_TEXT = Own()
"""The own text of a turn without calls."""


class Short(NamedTuple):
    """A short conversation as a template renders it: its messages, their text, and the generation prompt after it."""

    messages: list[Message]
    text: str
    prompt: str


_PLACES: tuple[Literal["arguments", "content"], ...] = ("arguments", "content")


class TurnForms:
    """Finds the text of one template around a turn, by the options and the tools of a request.

    Args:
        renderer: renders with the template.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        # Letters and digits: no filter escapes, strips or splits them. Random: no client can write them.
        self.sentinel = f"sentinel{secrets.token_hex(12)}"
        tokens = renderer.special_tokens.values()
        named = sorted((token for token in tokens if isinstance(token, str) and token), key=len, reverse=True)
        self.special = re.compile("|".join([*map(re.escape, named), _SPECIAL_LOOK]))
        """Matches a special token, judged by its look."""
        self._owns: Remembered[Own] = Remembered()
        self._shorts: Remembered[tuple[Short, ...]] = Remembered()
        self._scaffolds: Remembered[tuple[str, ...]] = Remembered()
        self._headers: Remembered[str] = Remembered()
        self._openings: Remembered[frozenset[str]] = Remembered()

    # Generation prompts -------------------------------------------------------------------------------------------------

    def scaffolds(self, tools: Tools, options: Options) -> tuple[str, ...]:
        """Return the generation prompts, from which the model goes on (`<|im_start|>assistant\\n<think>\\n`).

        There may be one after a user's message, and another after a tool's answer; none if the template refuses a greeting.
        """
        key = options_key(options), bool(tools)
        found = self._scaffolds.get(key)
        if found is None:
            found = tuple(dict.fromkeys(short.prompt for short in self._short(tools, options)))
            self._scaffolds[key] = found
        return found

    def header(self, tools: Tools, options: Options) -> str:
        """Return the beginning of every assistant's turn in short conversations (`<|im_start|>assistant\\n`)."""
        key = options_key(options), bool(tools)
        found = self._headers.get(key)
        if found is None:
            known = [*self.scaffolds(tools, options), *self.openings_of((), NO_OWN_TEXT, tools, options)]
            known += self.openings_of((), NO_OWN_TEXT, tools, options, reasoning=True)
            found, *others = [one for one in known if one] or [""]
            for other in others:
                found, _ = self._apart(found, other)
            self._headers[key] = found
        return found

    def _short(self, tools: Tools, options: Options) -> tuple[Short, ...]:
        """Return the short conversations before a turn of the model that the template accepts."""
        key = options_key(options), bool(tools)
        found = self._shorts.get(key)
        if found is None:
            shorts = []
            for before in ASKING:
                with contextlib.suppress(BadRequestError, RenderingError):
                    plain = self._renderer.plain(before)
                    shorts.append(Short(plain, *self.parted(plain, [TOOL] if tools else None, options)))
            found = self._shorts[key] = tuple(shorts)
        return found

    def parted(self, plain: list[Message], tools: Tools, options: Options) -> tuple[str, str]:
        """Return a rendering of these messages, and the generation prompt after it. Raises BadRequestError."""
        check_options(options)
        asking, silent = (self._renderer.render(plain, tools, options, generate=generate) for generate in (True, False))
        text, prompt = self._apart(asking, silent)
        if prompt:
            return text, prompt
        # None, or one that is always written (Command R7B): then it begins where a turn of the history is opened instead.
        with contextlib.suppress(BadRequestError):
            turn = self._renderer.render([*plain, self.marked((), "content", self.sentinel)], tools, options)
            head, found, _ = turn.partition(self.sentinel)
            text, prompt = self._apart(asking, head if found else asking)
        said = plain[-1]["content"]
        return (text, prompt) if isinstance(said, str) and said in text else (asking, "")

    def _apart(self, text: str, other: str) -> tuple[str, str]:
        """Return the common beginning of two texts, and the rest of the first, with whole special tokens."""
        common = alike(text, other)
        # Phi-3 ends with EOS if no reply is asked for, so the common beginning ends before a whole special token.
        if common < len(other):
            cut = (match.start() for match in self.special.finditer(text) if match.start() < common < match.end())
            common = next(cut, common)
        return text[:common], text[common:]

    # What is a turn's own -----------------------------------------------------------------------------------------------

    def openings_of(
        self, calls: Messages, own: Own, tools: Tools, options: Options, *, reasoning: bool = False
    ) -> frozenset[str]:
        """Return the texts that short conversations show between earlier messages and the sentinel in a turn.

        `reasoning`: they include the reasoning of the turn, as far as the template writes it.
        """
        key = (self.called(calls), own.place, options_key(options), bool(tools), reasoning)
        found = self._openings.get(key)
        if found is None:
            found = frozenset(self._find_openings(calls, own, tools, options, reasoning=reasoning))
            self._openings[key] = found
        return found

    def _find_openings(
        self, calls: Messages, own: Own, tools: Tools, options: Options, *, reasoning: bool
    ) -> Iterator[str]:
        turn = self.marked(calls, own.place, self.sentinel)
        if reasoning:
            turn["reasoning_content"] = "Hm."
        answers = [{**RESULT, "tool_call_id": call.get("id"), "name": call["function"]["name"]} for call in calls]
        for behind in ([], [ASKED]):
            after = self._renderer.plain((*answers, *behind))
            for short in self._short(tools, options):
                with contextlib.suppress(BadRequestError, RenderingError):
                    text = self._renderer.render([*short.messages, turn, *after], [TOOL] if tools else None, options)
                    first = text.find(self.sentinel)
                    if text.startswith(short.text) and first >= len(short.text):
                        yield text[len(short.text) : first]

    def opening_here(
        self, plain: Messages, at: int, sentinel: str, before: str, *, tools: Tools, options: Options
    ) -> str | None:
        """Return the opening of a turn in this conversation, for templates whose opening depends on what was said.

        Args:
            plain: all messages; the one at `at` holds the sentinel.
            sentinel: the sentinel in the turn.
            before: the rendering before that sentinel; an opening ends it.
        """
        header, shown = self.header(tools, options), [TOOL] if tools else None
        try:
            head = self._renderer.render(list(plain[:at]), shown, options, generate=False) if header and at else ""
            asks = head == self._renderer.render(list(plain[:at]), shown, options)  # always, as Command R7B's
            text = self._renderer.render(list(plain), shown, options)
        except BadRequestError:
            return None
        opening = text[len(head) : text.find(sentinel)]
        if not head or not text.startswith(head) or not before.endswith(opening):
            return None
        return opening if asks or (opening.startswith(header) and opening.count(header) == 1) else None

    def own_of(self, calls: Messages, tools: Tools, shown: Tools, options: Options) -> Own:
        """Return the own text of a turn with such calls, or without, in a short conversation. Raises RenderingError."""
        if not calls:
            return NO_OWN_TEXT
        key = self.called(calls), options_key(options), bool(tools)
        found = self._owns.get(key)
        if found is None:
            found = self._owns[key] = self.find_own(SHORT, calls, shown, options)
        return found

    def taken(self, messages: Messages) -> list[Message]:
        """Return messages, with the first of a turn's calls only if the template takes one call alone, as Llama 3.1's does.

        A model may sample more of them. Its turn is never rendered, and the text behind it is the same.
        """
        found = []
        for message in messages:
            if len(message.get("tool_calls") or ()) > 1 and self._refuses_two:
                message = {**message, "tool_calls": message["tool_calls"][:1]}
            found.append(message)
        return found

    @cached_property
    def _refuses_two(self) -> bool:
        """Whether the template takes a turn with one call, and refuses one with two."""
        one, two = (self._renderer.attempt(self._renderer.plain([*SHORT, turn])) for turn in (ONE, TWO))
        return one is not None and two is None

    def called(self, calls: Messages) -> tuple[object, ...]:
        """Return the key of the text around calls' arguments: their names, and in some templates their ids."""
        writes_ids = self._writes_ids
        return tuple([(call["function"]["name"], call.get("id") if writes_ids else None) for call in calls])

    @cached_property
    def _writes_ids(self) -> bool:
        """Whether calls are written with their ids, as by Mistral's templates; assumed of one that refuses the trial."""
        found = []
        for behind in ([], [ASKED]):  # Apriel's writes them in earlier turns alone
            turns = [{**ONE, "tool_calls": [{**CALL, "id": name}]} for name in ("call00000", "call00001")]
            found.append([self._renderer.attempt(self._renderer.plain([*SHORT, turn, *behind])) for turn in turns])
        return found[0][0] is None or any(one != other for one, other in found)

    def find_own(self, before: Messages, calls: Messages, tools: Tools, options: Options) -> Own:
        """Return the own text of a turn with calls behind these messages. Raises RenderingError."""
        for place in _PLACES:
            # The empty list is for templates that want every call answered before the user speaks.
            for behind in (SHORT, ()):
                try:
                    calling, speaking = (
                        self.after(self._renderer.render([*before, turn, *behind], tools, options), limit)
                        for turn, limit in (
                            (self.marked(calls, place, self.sentinel), len(calls)),
                            (self.marked((), place, self.sentinel), 1),
                        )
                    )
                except (BadRequestError, RenderingError):
                    continue
                return Own(place, self._cut(calling, speaking))
        raise RenderingError("the template writes neither the arguments of a call nor the text in front of it")

    def _cut(self, calling: str, speaking: str) -> str:
        """Return the own text of a turn with calls, given the texts after the sentinel with calls and without.

        Usually both end alike, closing included, and the rest is the turn's own. gpt-oss closes calls with a separate token
        (`<|call|>`, a text with `<|end|>`), and Gemma 4 opens the answer at once: then the last special token before
        the place where the two become alike closes the turn.
        """
        if calling.endswith(speaking):
            return calling[: len(calling) - len(speaking)]
        differs = len(calling) - alike(calling[::-1], speaking[::-1])
        starts = [match.start() for match in self.special.finditer(calling) if match.start() < differs]
        return calling[: starts[-1] if starts else differs]

    def marked(self, calls: Messages, place: Literal["arguments", "content"], sentinel: str) -> Message:
        """Return an assistant's turn with the sentinel in it: in each of its calls, as some templates drop calls."""
        if not calls:
            return {"role": "assistant", "content": sentinel}
        inside = place == "arguments"
        arguments: Any = {"x": sentinel} if inside else {}
        if self._renderer.wants_text:
            arguments = json.dumps(arguments)
        marked = [{**call, "function": {**call["function"], "arguments": arguments}} for call in calls]
        return {"role": "assistant", "content": "" if inside else sentinel, "tool_calls": marked}

    def behind(
        self,
        before: Messages,
        calls: Messages,
        own: Own,
        following: Messages,
        *,
        tools: Tools,
        options: Options,
        continue_final: bool = False,
    ) -> str:
        """Return the text between a turn and the end. Raises BadRequestError and RenderingError."""
        turn = self.marked(calls, own.place, self.sentinel)
        text = self._renderer.until_end([*before, turn, *following], tools, options, continue_final=continue_final)
        rest = self.after(text, len(calls) or 1)
        if not rest.startswith(own.text):
            raise RenderingError(CLOSED)
        return rest[len(own.text) :]

    def after(self, text: str, limit: int) -> str:
        """Return the text after the sentinel, which may occur `limit` times. Raises RenderingError."""
        head, found, rest = text.rpartition(self.sentinel)
        if not found or head.count(self.sentinel) >= limit:
            raise RenderingError(NOT_ONCE)
        return rest


def options_key(options: Options) -> tuple[object, ...]:
    """Return the key of options for a tail: the value of a plain option, the presence of a list or object (`documents`)."""
    if not options:
        return ()
    key = tuple(
        (name, repr(value) if value is None or isinstance(value, str | int | float) else None)
        for name, value in sorted(options.items())
    )
    spelled = str(key)  # surrogates are escaped
    return key if len(spelled) <= LONGEST_KEY else (blake2b(spelled.encode()).digest(),)
