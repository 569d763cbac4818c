"""Renders conversations with a chat template: the only file of the hub that knows how transformers does that.

Templates are foreign code. They run in transformers' sandbox (`render_jinja_template`, a public name).
How a template wants its messages (arguments as objects or as text, content as parts or strings) is found by trying.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from typing import Any, Literal

from jinja2 import Environment
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from middleware_hub.chat.messages import Message, Tool, argument_texts
from middleware_hub.media.errors import ReservedCharacterError
from middleware_hub.media.part import image_parts
from middleware_hub.spans.media import is_reserved, keyed_text
from middleware_hub.templates.source import differs_with_tools
from middleware_hub.templates.trials import ONE, RESULT, SHORT, TOOL, calling
from middleware_hub.tokenizer.loaded import quiet_libraries
from router.errors import BadRequestError

Messages = Sequence[Message]
Tools = Sequence[Tool] | None
Options = Mapping[str, Any]
"""Further variables of a template: `enable_thinking`, `reasoning_effort`, `documents`."""

# The errors that a template's code can raise out of the sandbox.
_FAILURES = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_OURS = frozenset(
    "conversations messages tools chat_template add_generation_prompt continue_final_message "
    "return_assistant_tokens_mask".split()
)
_ROLES = ("system", "user", "assistant", "tool")
_MEDIA = {
    "image_url": "image",
    "input_image": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}
"""OpenAI's kinds of parts, and the kinds that templates expect. A worker translates them in the same way."""


class RenderingError(Exception):
    """The template's text around a turn cannot be separated from the turn itself.

    Attributes:
        reason: one word for counters, see `sessions/prompt/composed_prompt.py`.
        turns: of a transcript, the number of leading turns that can be separated.
    """

    def __init__(self, message: str, reason: str = "template_error", turns: int = 0) -> None:
        super().__init__(message)
        self.reason = reason
        self.turns = turns


class Renderer:
    """Renders conversations with one template.

    Args:
        source: Jinja source, as in `tokenizer_config.json`.
        special_tokens: variables that every rendering sees (`bos_token`, `eos_token`, ...).

    Raises:
        BadRequestError: the template cannot be compiled.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.placeholder = ""
        """The text that the template writes for a picture; empty if the model reads none."""
        self.special_tokens = dict(special_tokens)
        self._end = f"end{secrets.token_hex(12)}"
        """A text that no message contains."""
        if _compiles(source):
            return
        try:
            self._run(SHORT, None, {}, generate=True)
        except TemplateSyntaxError as error:
            raise BadRequestError(
                f"the chat template cannot be compiled: {error.message} (line {error.lineno})"
            ) from error
        except _FAILURES:  # it compiles; its objections to a conversation come later
            pass

    # Messages as a template wants them --------------------------------------------------------------------------------------

    def plain(self, messages: Iterable[Message]) -> list[Message]:
        """Return messages without None and empty values, with a content, and arguments in the template's form."""
        found = []
        for message in messages:
            usual = type(message.get("content")) is str and "tool_calls" not in message and None not in message.values()
            found.append(message if usual else self._plain(message))
        return found

    def _plain(self, message: Message) -> Message:
        content = message.get("content")
        plain = {name: value for name, value in message.items() if value is not None}
        plain["content"] = content if type(content) is str else self._content(plain.get("role"), content)
        calls = plain.pop("tool_calls", None)
        if calls:
            if argument_texts(message):
                plain["content"], calls = self._without_texts(plain["content"], calls)
            plain["tool_calls"] = [_spelled(call) for call in calls] if self.wants_text else calls
            if plain["content"] and plain.get("reasoning_content") and self._refuses_both:
                plain["content"] = _after(plain.pop("reasoning_content"), plain["content"])
        return plain

    def _without_texts(self, content: str | list[Message], calls: Messages) -> tuple[str | list[Message], Messages]:
        """Return the content and calls of a message in which not all arguments are JSON objects.

        `null` stands for none. Where a text is refused, it becomes a line of the content.
        """
        left, lines = [], []
        for call in calls:
            given = call["function"]["arguments"]
            if isinstance(given, str) and (given.strip() == "null" or self.arguments_as_text == "refused"):
                call = {**call, "function": {**call["function"], "arguments": {}}}
                lines += [given] * (given.strip() != "null")
            left.append(call)
        if isinstance(content, list):
            return [*content, *({"type": "text", "text": line} for line in lines)], left
        return "\n".join(filter(None, [content, *lines])), left

    def _content(self, role: object, content: Messages | None) -> str | list[Message]:
        if not content:
            return ""
        if role in self.roles_of_parts:
            return [{"type": _MEDIA[part["type"]]} if part.get("type") in _MEDIA else part for part in content]
        texts = [part.get("text") if part.get("type") in ("text", "input_text") else None for part in content]
        if None in texts:
            raise BadRequestError(f"messages: the chat template takes nothing but text from role {role}")
        return " ".join(map(str, texts))

    @cached_property
    def wants_text(self) -> bool:
        """Whether calls' arguments must be JSON text. Most templates take objects and write them with `tojson`."""
        written = self.attempt([*SHORT, calling({"a": 1})])
        if written is not None and "{'a': 1}" not in written:
            return False
        return self.attempt([*SHORT, calling('{"a": 1}')]) is not None

    @cached_property
    def arguments_as_text(self) -> Literal["written", "quoted", "refused"]:
        """How the template writes arguments that are no JSON object: as they are, or as a JSON string.

        `refused`: it refuses or drops them, because it writes each argument by itself.
        """
        given = f'{{"{self._end}": '
        text = self.attempt([*SHORT, calling(given)])
        if text is None or self._end not in text:
            return "refused"
        return "written" if given in text else "quoted"

    @cached_property
    def _refuses_both(self) -> bool:
        """Whether a turn with calls may have reasoning or text, but not both: gpt-oss writes either as reasoning."""
        thinking = {**ONE, "reasoning_content": "Hm."}
        return self.attempt([*SHORT, thinking]) is not None and not self.attempt(
            [*SHORT, {**thinking, "content": "So."}]
        )

    @cached_property
    def wants_short_ids(self) -> bool:
        """Whether the ids of calls must be nine letters and digits. Mistral's templates refuse all others."""

        def taken(name: str) -> bool:
            turn = calling('{"a": 1}' if self.wants_text else {"a": 1})
            turn["tool_calls"][0]["id"] = name
            return self.attempt([*SHORT, turn, {**RESULT, "tool_call_id": name}]) is not None

        return not taken(f"call_{'0' * 24}") and taken("call00000")

    @cached_property
    def roles_of_parts(self) -> frozenset[str]:
        """The roles whose text may be a list of parts: the template renders one part as it renders its text, and a second one.

        For other roles a space joins the parts, as in a worker. Gemma 3 and LLaVA-NeXT write only the first part of some roles.
        """
        called, found = calling('{"a": 1}' if self.wants_text else {"a": 1}), set()
        part, second = ({"type": "text", "text": text} for text in ("text", self._end))
        for role in _ROLES:
            as_text, as_part, as_parts = (
                self.attempt(_spoken(role, content, called)) for content in ("text", [part], [part, second])
            )
            if as_text is not None and as_text == as_part and as_parts is not None and self._end in as_parts:
                found.add(role)
        return frozenset(found)

    @cached_property
    def _roles_of_parts_only(self) -> frozenset[str]:
        """The roles whose text must be a list of parts, because the template writes nothing of a text (SmolVLM, LLaVA)."""
        found = set()
        for role in _ROLES:
            messages = _spoken(role, self._end, calling({"a": 1}))
            if not self._shows_end(messages) and self._shows_end(list(map(_in_parts, messages))):
                found.add(role)
        return frozenset(found)

    def _shows_end(self, messages: list[Message]) -> bool:
        try:
            text = self._run(messages, None, {}, generate=True, as_given=True)
        except _FAILURES:
            return False
        return self._end in text and f"'text': '{self._end}'" not in text  # which is a list printed as it is

    # Rendering ----------------------------------------------------------------------------------------------------------------

    def until_end(self, messages: list[Message], tools: Tools, options: Options, *, continue_final: bool) -> str:
        """Render with the generation prompt, or up to the end of the last message's content."""
        if not continue_final:
            return self.render(messages, tools, options)
        *rest, final = messages
        if final["role"] != "assistant" or "tool_calls" in final:
            raise BadRequestError(
                "messages: only the assistant's own text can be continued, and the last message is not that"
            )
        text = self.render([*rest, _longer(final, self._end)], tools, options, generate=False)
        text, found, more = text.partition(self._end)
        if not found or self._end in more:
            raise RenderingError("the template drops the message that is to be continued, or writes it more than once")
        return text

    def attempt(self, messages: list[Message]) -> str | None:
        """Render a trial; None if the template refuses it."""
        shown = any("tool_calls" in one for one in messages) and differs_with_tools(self.source)
        try:
            return self._run(messages, [TOOL] if shown else None, {}, generate=True)
        except _FAILURES:
            return None

    def render(self, messages: list[Message], tools: Tools, options: Options, *, generate: bool = True) -> str:
        """Render with the generation prompt, or without. Raises BadRequestError if the template refuses, in its own words."""
        try:
            return self._run(messages, tools, options, generate=generate)
        except _FAILURES as error:
            raise BadRequestError(f"the chat template refuses this conversation: {error}") from error

    def _run(
        self, messages: list[Message], tools: Tools, options: Options, *, generate: bool, as_given: bool = False
    ) -> str:
        """Render once. The compiled template is cached: transformers keeps the last 128.

        `as_given`: do not write any text as a part.
        """
        if not as_given and self._roles_of_parts_only:
            messages = [_in_parts(one) if one["role"] in self._roles_of_parts_only else one for one in messages]
        rendered, _ = _render_jinja_template()(
            [messages],
            tools=tools or None,
            chat_template=self.source,
            add_generation_prompt=generate,
            **{**self.special_tokens, **options},
        )
        text: str = rendered[0]
        return self._with_marks(text, messages) if self.placeholder else text

    def _with_marks(self, text: str, messages: list[Message]) -> str:
        """Return a rendering with the mark of each picture in place of its placeholder.

        Raises BadRequestError for a mark in the rendering, whoever wrote it: nothing but a picture may have one.
        """
        if is_reserved(text):
            raise ReservedCharacterError("the conversation has U+FDD0 or U+FDD1, which stand for images here")
        digests = [part["digest"] for one in messages for part in image_parts(one)]
        if not digests:
            return text
        if text.count(self.placeholder) != len(digests):
            raise BadRequestError(
                f"the chat template writes {text.count(self.placeholder)} times {self.placeholder} for {len(digests)} images: "
                "a text spells it, or the template writes no images in a message of this role",
                code="placeholder_in_text",
            )
        return keyed_text(text, self.placeholder, digests)


@lru_cache(maxsize=16)
def _compiles(template: str) -> bool:
    """Return whether plain Jinja compiles a template; only transformers can compile its own additions to Jinja."""
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).compile(template)
    except (TemplateError, RecursionError):
        return False
    return True


@cache
def _render_jinja_template() -> Callable[..., Any]:
    """Import transformers, which takes a second: not at the start of the router, see `ChatTemplate.warm`."""
    from transformers.utils.chat_template_utils import render_jinja_template

    quiet_libraries()
    render: Callable[..., Any] = render_jinja_template
    return render


def check_options(options: Options) -> None:
    """Raise BadRequestError for variables that a client must not set."""
    if not _OURS.isdisjoint(options):
        raise BadRequestError(f"chat template options: {min(_OURS & options.keys())} is not one that can be set")


def _spoken(role: str, content: str | list[Message], called: Message) -> list[Message]:
    """Return a short conversation with a message of a role. `called` is the turn whose call a tool answers."""
    message = {"role": role, "content": content}
    match role:
        case "system":
            return [message, *SHORT]
        case "assistant":
            return [*SHORT, message, *SHORT]
        case "tool":
            return [*SHORT, called, {**RESULT, **message}]
    return [message]


def _longer(message: Message, end: str) -> Message:
    """Return an assistant's message with `end` after its content."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + end}
    *front, final = content
    return {**message, "content": [*front, {**final, "text": final.get("text", "") + end}]}


def _after(reasoning: str, content: str | list[Message]) -> str | list[Message]:
    """Return a content with reasoning as its first paragraph."""
    return f"{reasoning}\n\n{content}" if isinstance(content, str) else [{"type": "text", "text": reasoning}, *content]


def _in_parts(message: Message) -> Message:
    """Return a message whose text is a list with one part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _spelled(call: Message) -> Message:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        return call
    return {**call, "function": {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False)}}


def alike(one: str, other: str) -> int:
    """Return the length of the common beginning."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)
