"""The seam to chat templates: the only file of the sessions that knows how transformers renders one.

A start is the template's rendering of all messages. Every later turn renders only the **tail**: what the template writes
behind the turn that was sampled last. The sampled turn itself is never rendered, its tokens come from the store. The tail is
found by rendering a conversation with a sentinel in that turn, and taking what stands behind the sentinel:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nSENTINEL<|im_end|>\\n<|im_start|>user\\n...<|im_start|>assistant\\n
                                                                  `-- the tail ------------------------------------------'

    ...<tool_call>\\n{"name": "f", "arguments": {"x": "SENTINEL"}}\\n</tool_call><|im_end|>\\n<|im_start|>user\\n<tool_res...
                                                             `- own ---------'`-- the tail --------------------

A turn with calls holds the sentinel in their arguments, for many templates drop its content then, and what closes a call is
the turn's own, not the tail's. It is what such a turn writes more than one without calls, see `_cut`.

That conversation is a short one, a user's message in front and no tools, as long as the template's tails do not depend on
what came earlier, nor on tools. Whether they do is found out by trying (`_probe`), and remembered; if so, all is rendered.

Templates are foreign code. They run in the sandbox that transformers itself gives them (`render_jinja_template`, a public
name; nothing private of it is used here).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

from jinja2.exceptions import TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from middleware_hub.sessions.chat import Message, Tool
from router.errors import BadRequestError

Options = Mapping[str, Any]
"""Further variables of a template: `enable_thinking`, `reasoning_effort`, `documents`."""

REMEMBERED = 1024
"""How many sets of options, and of names of tools, something is remembered for. Clients choose both."""

# What a template's code can raise; the sandbox has no other doors.
_FAILURES = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_OURS = frozenset(
    "conversations messages tools chat_template add_generation_prompt continue_final_message "
    "return_assistant_tokens_mask".split()
)
_MEDIA = {
    "image_url": "image",
    "input_image": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}
"""OpenAI's kinds of parts, and the ones that templates look for. A worker translates them in the same way."""

# What most special tokens look like: `<|im_end|>`, `<turn|>`, `<｜User｜>`, `<end_of_turn>`, `</s>`, `[/INST]`.
_SPECIAL_LOOK = r"<[|｜][^<>\s]{1,40}>|<[^<>\s]{1,40}[|｜]>|<(?:start|end)_of_[a-z]+>|</?s>|\[/?[A-Z_]{2,40}\]"


class RenderingError(Exception):
    """What a template writes behind a turn cannot be told from the turn itself: the conversation is to be encoded anew."""


class _Plan(NamedTuple):
    """How to find tails: in a short conversation or the full one, with tools in sight or without."""

    short: bool
    tools: bool


class _Own(NamedTuple):
    """What a turn with calls writes of its own behind the sentinel, and where that one is."""

    place: Literal["arguments", "content"]
    text: str


class ChatTemplate:
    """Renders conversations, and the tails of conversations.

    Args:
        template: Jinja source, as in `tokenizer_config.json`.
        special_tokens: variables that every rendering sees (`bos_token`, `eos_token`, ...).

    Raises:
        BadRequestError: the template cannot be compiled.
    """

    def __init__(self, template: str, special_tokens: Mapping[str, str]) -> None:
        self._template = template
        self._special_tokens = dict(special_tokens)
        # Letters and digits: no filter escapes, strips or splits them. Random: no client can write them.
        self._sentinel = f"sentinel{secrets.token_hex(12)}"
        self._end = f"end{secrets.token_hex(12)}"
        named = sorted((token for token in special_tokens.values() if isinstance(token, str) and token), key=len)
        self._special = re.compile("|".join([*map(re.escape, reversed(named)), _SPECIAL_LOOK]))
        self._plans: dict[tuple[object, ...], _Plan | None] = {}
        self._owns: dict[tuple[object, ...], _Own] = {}
        self._scaffolds: dict[tuple[object, ...], str] = {}
        try:
            self._run(_SHORT, None, {}, generate=True)
        except TemplateSyntaxError as error:
            raise BadRequestError(
                f"the chat template cannot be compiled: {error.message} (line {error.lineno})"
            ) from error
        except _FAILURES:  # it compiles; what it has against a conversation is said when there is one
            pass
        for tools in (False, True):
            for called in (False, True):
                self._plans[_key({}), tools, called] = self._probe({}, tools, called)  # no request waits for these

    # Renderings --------------------------------------------------------------------------------------------------------

    def whole(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        options: Options,
        *,
        continue_final: bool = False,
    ) -> str:
        """The text of a start, up to where the assistant is to speak.

        With `continue_final` the last message is the assistant's, and the text ends with its content, whitespace kept.

        Raises:
            BadRequestError: the template refuses, in its own words.
            RenderingError: the end of the message to be continued cannot be found.
        """
        if not messages:
            raise BadRequestError("messages: at least one is needed")
        _check(options)
        plain = [self._plain(message) for message in messages]
        return self._until_end(plain, tools, options, continue_final=continue_final)

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
        _check(options)
        following = [self._plain(message) for message in behind]
        called = bool(calls) or any(message["role"] == "tool" or "tool_calls" in message for message in following)
        plan = self._plan(options, bool(tools), called)
        before = _SHORT if plan.short else [self._plain(message) for message in earlier]
        shown = tools if plan.tools else None
        own = None
        if calls:
            names = (*(call["function"]["name"] for call in calls), _key(options), bool(tools))
            own = self._owns.get(names)
            if own is None:
                own = self._find_own(before, calls, shown, options)
                if plan.short:
                    _remember(self._owns, names, own)
        text = self._behind(before, calls, own, following, shown, options, continue_final=continue_final)
        for message in following:
            # Some templates write every system message at the head, where nothing can be added any more.
            if message["role"] in ("system", "developer") and not _holds(text, message["content"]):
                raise RenderingError(f"the template does not write a {message['role']} message where it stands")
        return text

    def scaffold(self, tools: Sequence[Tool] | None, options: Options) -> str:
        """The generation prompt: what the template writes for the model to go on from (`<|im_start|>assistant\\n<think>\\n`).

        Raises:
            BadRequestError: the template refuses even a user's greeting.
        """
        _check(options)
        key = (_key(options), bool(tools))
        scaffold = self._scaffolds.get(key)
        if scaffold is None:
            shown = [_TOOL] if tools else None
            asking, silent = (self._render(_SHORT, shown, options, generate=generate) for generate in (True, False))
            # Phi-3 ends with EOS where no reply is asked for: what both begin with, up to a whole special token.
            alike = _alike(asking, silent)
            if alike < len(silent):
                cut = (match.start() for match in self._special.finditer(asking) if match.start() < alike < match.end())
                alike = next(cut, alike)
            scaffold = asking[alike:]
            _remember(self._scaffolds, key, scaffold)
        return scaffold

    def closing(self, options: Options, *, calls: bool = False) -> str:
        """What closes an assistant's turn, one that ends with its text or with calls; empty where the next role does it."""
        turn: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]} if calls else _SAID
        return self.tail(turn, (), None, options, earlier=_SHORT).removesuffix(self.scaffold(None, options))

    def stop_literals(self, options: Options) -> tuple[str, ...]:
        """The special tokens that a model of this template ends its turns with, as far as their look tells.

        They are what a tail begins with: `("<|im_end|>",)`, or what opens the next role (`("<|user|>", "<|observation|>")`).
        """
        found: dict[str, None] = {}
        calling: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        for turn, behind in ((_SAID, _SHORT), (calling, [_RESULT])):
            try:
                tail = self.tail(turn, behind, None, options, earlier=_SHORT)
            except (BadRequestError, RenderingError):
                continue
            if (literal := self._special.match(tail)) is not None:
                found[literal[0]] = None
        return tuple(found)

    @property
    def takes_parts(self) -> bool:
        """Whether a user's text parts may stay a list. Where they may not, they are joined by a space, as a worker does it."""
        return "user" in self._roles_of_parts

    # Finding tails -------------------------------------------------------------------------------------------------------

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
        turn = self._marked(calls, own.place if own else "content")
        text = self._until_end([*before, turn, *following], tools, options, continue_final=continue_final)
        rest = self._after(text, len(calls) or 1)
        if own is None:
            return rest
        if not rest.startswith(own.text):
            raise RenderingError("the template closes calls in more than one way")
        return rest[len(own.text) :]

    def _marked(self, calls: Sequence[Message], place: Literal["arguments", "content"]) -> Message:
        """An assistant's turn with the sentinel in it: in each of its calls, for not every template writes them all."""
        if not calls:
            return {"role": "assistant", "content": self._sentinel}
        inside = place == "arguments"
        arguments: Any = {"x": self._sentinel} if inside else {}
        if self._wants_text:
            arguments = json.dumps(arguments)
        marked = [{**call, "function": {**call["function"], "arguments": arguments}} for call in calls]
        return {"role": "assistant", "content": "" if inside else self._sentinel, "tool_calls": marked}

    def _after(self, text: str, limit: int) -> str:
        head, found, rest = text.rpartition(self._sentinel)
        if not found or head.count(self._sentinel) >= limit:
            raise RenderingError("the template drops an assistant's turn, or writes it more than once")
        return rest

    def _find_own(
        self, before: Sequence[Message], calls: Sequence[Message], tools: Sequence[Tool] | None, options: Options
    ) -> _Own:
        for place in _PLACES:
            # Nothing behind: for templates that want every call answered before the user speaks.
            for behind in (_SHORT, ()):
                try:
                    calling, speaking = (
                        self._after(self._render([*before, turn, *behind], tools, options), limit)
                        for turn, limit in ((self._marked(calls, place), len(calls)), (self._marked((), place), 1))
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
        shown = [_TOOL] if tools else None
        short = self._tails(_SHORT, shown, options, called)
        tried = False
        for earlier in _EARLIER:
            for brief, full in zip(short, self._tails(earlier, shown, options, called), strict=True):
                if full is not None and full != brief:
                    return _Plan(short=False, tools=tools)
                tried = tried or full is not None
        if not tried:
            return _Plan(short=False, tools=tools)
        return _Plan(short=True, tools=tools and self._tails(_SHORT, None, options, called) != short)

    def _tails(
        self, before: Iterable[Message], tools: Sequence[Tool] | None, options: Options, called: bool
    ) -> list[str | None]:
        """The tails of all shapes behind these messages; None for what is refused."""
        earlier = [self._plain(message) for message in before]
        found: list[str | None] = []
        owns: dict[int, _Own | None] = {0: None}
        for calls, behind in _CALLED if called else _SPOKEN:
            try:
                if len(calls) not in owns:
                    owns[len(calls)] = self._find_own(earlier, calls, tools, options)
                own = owns[len(calls)]
                following = [self._plain(message) for message in behind]
                found.append(self._behind(earlier, calls, own, following, tools, options))
            except (BadRequestError, RenderingError):
                found.append(None)
        return found

    # Messages as a template wants them --------------------------------------------------------------------------------------

    def _plain(self, message: Message) -> Message:
        """A message without what is None or empty, with a content, and arguments in the template's form."""
        content = message.get("content")
        if type(content) is str and "tool_calls" not in message and None not in message.values():
            return message
        plain = {name: value for name, value in message.items() if value is not None}
        plain["content"] = content if type(content) is str else self._content(plain.get("role"), content)
        calls = plain.pop("tool_calls", None)
        if calls:
            plain["tool_calls"] = [_spelled(call) for call in calls] if self._wants_text else calls
        return plain

    def _content(self, role: object, content: Sequence[Message] | None) -> str | list[Message]:
        if not content:
            return ""
        if role in self._roles_of_parts:
            return [{"type": _MEDIA[part["type"]]} if part.get("type") in _MEDIA else part for part in content]
        texts = [part.get("text") if part.get("type") in ("text", "input_text") else None for part in content]
        if None in texts:
            raise BadRequestError(f"messages: the chat template takes nothing but text from role {role}")
        return " ".join(map(str, texts))

    @cached_property
    def _wants_text(self) -> bool:
        """Whether calls' arguments must be JSON text. Most templates take objects and write them with `tojson`."""
        written = self._attempt([*_SHORT, _calling({"a": 1})])
        if written is not None and "{'a': 1}" not in written:
            return False
        return self._attempt([*_SHORT, _calling('{"a": 1}')]) is not None

    @cached_property
    def _roles_of_parts(self) -> frozenset[str]:
        """The roles whose text may be a list of parts: where one part is rendered as its text is."""
        taken = set()
        for role, front, back in (
            ("system", [], _SHORT),
            ("user", [], []),
            ("assistant", _SHORT, _SHORT),
            ("tool", [*_SHORT, _calling('{"a": 1}' if self._wants_text else {"a": 1})], []),
        ):
            message = {**_RESULT, "role": role} if role == "tool" else {"role": role}
            as_text, as_parts = (
                self._attempt([*front, {**message, "content": content}, *back])
                for content in ("text", [{"type": "text", "text": "text"}])
            )
            if as_text is not None and as_text == as_parts:
                taken.add(role)
        return frozenset(taken)

    # Rendering ----------------------------------------------------------------------------------------------------------------

    def _until_end(
        self, messages: list[Message], tools: Sequence[Tool] | None, options: Options, *, continue_final: bool
    ) -> str:
        """A rendering with the generation prompt, or up to the end of the last message's content."""
        if not continue_final:
            return self._render(messages, tools, options)
        *rest, final = messages
        if final["role"] != "assistant" or "tool_calls" in final:
            raise BadRequestError(
                "messages: only the assistant's own text can be continued, and the last message is not that"
            )
        text = self._render([*rest, _longer(final, self._end)], tools, options, generate=False)
        text, found, more = text.partition(self._end)
        if not found or self._end in more:
            raise RenderingError("the template drops the message that is to be continued, or writes it more than once")
        return text

    def _attempt(self, messages: list[Message]) -> str | None:
        try:
            return self._run(messages, None, {}, generate=True)
        except _FAILURES:
            return None

    def _render(
        self, messages: list[Message], tools: Sequence[Tool] | None, options: Options, *, generate: bool = True
    ) -> str:
        try:
            return self._run(messages, tools, options, generate=generate)
        except _FAILURES as error:
            raise BadRequestError(f"the chat template refuses this conversation: {error}") from error

    def _run(self, messages: list[Message], tools: Sequence[Tool] | None, options: Options, *, generate: bool) -> str:
        """Compiled once: transformers remembers the last 128 templates."""
        rendered, _ = render_jinja_template(
            [messages],
            tools=tools or None,
            chat_template=self._template,
            add_generation_prompt=generate,
            **{**self._special_tokens, **options},
        )
        text: str = rendered[0]
        return text


def _alike(one: str, other: str) -> int:
    """How many characters both begin with."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


def _check(options: Options) -> None:
    if not _OURS.isdisjoint(options):
        raise BadRequestError(f"chat template options: {min(_OURS & options.keys())} is not one that can be set")


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


def _longer(message: Message, end: str) -> Message:
    """An assistant's message with something behind its content."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + end}
    *front, final = content
    return {**message, "content": [*front, {**final, "text": final.get("text", "") + end}]}


def _spelled(call: Message) -> Message:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        return call
    return {**call, "function": {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False)}}


def _calling(*arguments: object) -> Message:
    # Mistral's templates want ids of nine letters and digits.
    calls = [
        {"id": f"call{number:05}", "type": "function", "function": {"name": "look_up", "arguments": one}}
        for number, one in enumerate(arguments)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


# The conversations that templates are tried with ---------------------------------------------------------------------------

_PLACES: tuple[Literal["arguments", "content"], ...] = ("arguments", "content")

_SHORT: list[Message] = [{"role": "user", "content": "Hi"}]
_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_ASKED: Message = {"role": "user", "content": "Go on."}
_SAID: Message = {"role": "assistant", "content": "Well."}
_RESULT: Message = {"role": "tool", "content": "42", "tool_call_id": "call00000", "name": "look_up"}
_SECOND: Message = {**_RESULT, "content": "43", "tool_call_id": "call00001"}
_ONE = _calling({"a": 1})
_TWO = _calling({"a": 1}, {"a": 2})
_CALL: Message = _ONE["tool_calls"][0]
_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks something up.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "Where."}},
            "required": ["a"],
        },
    },
}

_EARLIER: tuple[list[Message], ...] = (
    [*_SHORT, _SAID, _ASKED],
    [_SYSTEM, *_SHORT, _SAID, _ASKED],
    [*_SHORT, _SAID, _ASKED, _ONE, _RESULT, _SAID, _ASKED],
    [_SYSTEM, *_SHORT, _SAID, _ASKED, _ONE, _RESULT, _ONE, _RESULT],
)

_Shape = tuple[Sequence[Message], list[Message]]
_SPOKEN: tuple[_Shape, ...] = (((), []), ((), [_ASKED]), ((), [_ASKED, _SAID, _ASKED]))
_CALLED: tuple[_Shape, ...] = (
    (_ONE["tool_calls"], [_RESULT]),
    (_ONE["tool_calls"], [_RESULT, _ASKED]),
    (_ONE["tool_calls"], [_ASKED]),
    (_TWO["tool_calls"], [_RESULT, _SECOND]),
    ((), [_ASKED, _ONE, _RESULT]),
)
