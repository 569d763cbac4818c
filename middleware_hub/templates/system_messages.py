"""System messages where a template takes them.

Agents send system messages anywhere: several at the beginning, or one behind what the user said. Some templates refuse that
(Qwen 3.5), some drop such a message (gpt-oss), some write it at the beginning (DeepSeek V3), where nothing can be added once
a turn was sampled, and some make a turn of it that their model has never seen (Gemma 3). Trials show what a template does:

    own        a system message is written where it stands, as the first one is: nothing is changed
    apart      else it becomes a message of the user's, with a mark
    otherwise  two messages of the user's in a row are refused: it is appended, with its mark, to the message before it, and
               so is a message of the user's that follows

    user       Hi
    system     Be brief.    ->    user   <system>\\nBe brief.\\n</system>
    assistant  Hello.

Only the messages between two turns of the assistant's shape what is written between these turns. So a chain can always be
continued, and the same messages give the same text at every router. Between a call and its results nothing else may stand in
most templates: a system message there is written behind the results.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

from middleware_hub.chat.messages import Message
from middleware_hub.templates.renderer import Messages, Renderer
from middleware_hub.templates.trials import ASKED, ONE, RESULT, SAID, SHORT, SYSTEM
from router.errors import BadRequestError

LateSystem = Literal["in_place", "merge", "refuse"]
"""The values of `--late-system`."""
REFUSED = (
    "messages: the chat template does not write a system message where it stands unless it is the first message, and this "
    "router refuses such messages (--late-system refuse): put the text into the first message, or into the user's"
)
BETWEEN = "\n\n"
"""Joins several texts to one message."""


class SystemMessages:
    """Puts system messages where one template takes them.

    Args:
        renderer: renders with the template.
        late: the treatment of a system message that the template does not write where it stands. `in_place`: see the top of
            this file. `merge`: it is joined to the first one. `refuse`: the request fails.
    """

    def __init__(self, renderer: Renderer, late: LateSystem) -> None:
        self._renderer = renderer
        self._mark = f"mark{secrets.token_hex(12)}"
        """Letters and digits that no message contains."""
        self._late = late

    def warm(self) -> None:
        """Try the template now."""
        _ = self._several, self._own, self._apart, self._in_a_row

    def placed(self, messages: Messages, *, begins: bool = True) -> Messages:
        """Return messages as the template takes them; the assistant's are never changed, moved or joined.

        `begins`: whether a conversation begins with them; otherwise they follow a turn of the assistant's.

        Raises BadRequestError if one of them is refused (`refuse`).
        """
        for message in messages:
            if message["role"] == "system":
                break
        else:
            return messages
        if self._unknown:
            return messages
        first = self._leading(messages) if begins else 0
        front, rest = messages[:first], messages[first:]
        late = [message for message in rest if message["role"] == "system"]
        if first > 1 and not self._several:
            front = [_joined(front)]
        if not late or self._own:
            return messages if len(front) == first else [*front, *rest]
        late = list(filter(_said, late))
        if late and self._late == "refuse":
            raise BadRequestError(REFUSED, param="messages")
        if late and self._late == "merge":
            return [_joined([*front, *late]), *(message for message in rest if message["role"] != "system")]
        return [*front, *self._in_place(rest)]

    def in_place(self, messages: Messages, known: int) -> bool:
        """Whether one behind the first `known` messages of a conversation is written as a message of the user's."""
        return self._late == "in_place" and self._any_late(messages[max(known, self._leading(messages)) :])

    def belong_before(self, messages: Messages) -> bool:
        """Whether one of these, which follow a turn of the assistant's, is joined to the first message (`merge`)."""
        return self._late == "merge" and self._any_late(messages)

    def _any_late(self, messages: Messages) -> bool:
        found = any(message["role"] == "system" and _said(message) for message in messages)
        return found and not (self._own or self._unknown)

    def _leading(self, messages: Messages) -> int:
        """Return how many system messages a conversation begins with; 0 if the template takes none."""
        first = next((at for at, one in enumerate(messages) if one["role"] != "system"), len(messages))
        return first if first and self._heading is not None else 0

    # How they are written ---------------------------------------------------------------------------------------------

    def _in_place(self, messages: Messages) -> list[Message]:
        found: list[Message] = []
        gap: list[Message] = []
        for message in messages:
            if message["role"] == "assistant":
                found += [*self._rewritten(gap), message]
                gap = []
            else:
                gap.append(message)
        return found + self._rewritten(gap)

    def _rewritten(self, gap: list[Message]) -> list[Message]:
        """Return the messages between two turns of the assistant's, with system messages in the form of the user's."""
        results = max((at + 1 for at, one in enumerate(gap) if one["role"] == "tool"), default=0)
        early = [one for one in gap[:results] if one["role"] == "system"]
        ordered = [*(one for one in gap[:results] if one["role"] != "system"), *early, *gap[results:]]
        found: list[Message] = []
        waiting: list[str] = []
        appended = False  # a system message, to the message before, which is the user's
        for message in ordered:
            if message["role"] != "system":
                if appended and message["role"] == "user" and not self._in_a_row:
                    found[-1] = _behind(found[-1], message.get("content") or "")
                    continue
                found.append(_before(waiting, message) if waiting else message)
                waiting, appended = [], False
            elif text := _said(message):
                marked = f"<system>\n{text}\n</system>"
                if self._apart:
                    found.append({"role": "user", "content": marked})
                elif found:
                    found[-1] = _behind(found[-1], marked)
                    appended = found[-1]["role"] == "user"
                else:
                    waiting.append(marked)
        return [*found, {"role": "user", "content": BETWEEN.join(waiting)}] if waiting else found

    # What the template does ---------------------------------------------------------------------------------------------

    def _attempt(self, messages: Messages) -> str | None:
        return self._renderer.attempt(self._renderer.plain(messages))

    @cached_property
    def _unknown(self) -> bool:
        """Whether the template refuses even a greeting, so that no trial shows anything. Then nothing is changed."""
        return self._attempt(SHORT) is None

    @cached_property
    def _heading(self) -> str | None:
        """The text before a system message at the beginning; None if the template refuses the message, or drops it."""
        text = self._attempt([self._system(1), *SHORT])
        head, found, _ = (text or "").partition(self._numbered(1))
        return head if found else None

    @cached_property
    def _several(self) -> bool:
        """Whether the second of two system messages at the beginning is written as the first one is."""
        return self._is_own([SYSTEM], SHORT)

    @cached_property
    def _own(self) -> bool:
        """Whether system messages are written where they stand, as the one at the beginning is."""
        return self._opening is not None and all(
            self._is_own(before, behind)
            for before, behind in (
                ([SYSTEM, *SHORT], []),
                ([SYSTEM, *SHORT], [SAID, ASKED]),
                ([*SHORT, SAID], [ASKED]),
                ([SYSTEM, *SHORT, SAID, ASKED], [SAID, ASKED]),
                ([*SHORT, ONE, RESULT], []),
                ([*SHORT, ONE, RESULT], [SAID, ASKED]),
            )
            if before[-1] is not RESULT or self._writes_results
        )

    @cached_property
    def _apart(self) -> bool:
        """Whether the template writes two messages of the user's in a row, and one behind the results of calls."""
        for before, behind in (
            (SHORT, []),
            ([SYSTEM, *SHORT], [SAID, ASKED]),
            ([*SHORT, SAID, ASKED], []),
            ([*SHORT, ONE, RESULT], []),
            ([*SHORT, ONE, RESULT], [ASKED]),
        ):
            if (before[0] is SYSTEM and self._heading is None) or (before[-1] is RESULT and not self._writes_results):
                continue
            noted = {"role": "user", "content": self._numbered(1)}
            text = self._attempt([*before, noted, *behind])
            if text is None or not self._all_there(text, before[-1], noted, *behind):
                return False
        return True

    @cached_property
    def _in_a_row(self) -> bool:
        """Whether the template takes two messages of the user's in a row."""
        return self._attempt([*SHORT, *SHORT]) is not None

    @cached_property
    def _writes_results(self) -> bool:
        text = self._attempt([*SHORT, ONE, self._numbered_in(RESULT, 0)])
        return text is not None and self._numbered(0) in text

    @cached_property
    def _opening(self) -> str | None:
        """The opening of a system message behind the user's, if it is also the opening of one at the beginning.

        The closing of the message before it is written there as well without a system message.
        """
        between, closing = self._between(SHORT, []), self._between(SHORT, None)
        if between is None or closing is None or self._heading is None:
            return None
        same = next((at for at, one in enumerate(between) if not closing.startswith(one, at)), len(between))
        opening = between[same:]
        return opening if opening.strip() and opening in self._heading else None

    def _is_own(self, before: Messages, behind: Messages) -> bool:
        between = self._between(before, behind)
        return between is not None and self._opening is not None and between.endswith(self._opening)

    def _between(self, before: Messages, behind: Messages | None) -> str | None:
        """Return the text between the last of some messages and a system message, or, without `behind`, the end.

        None if that is refused, or if a message is dropped, or does not stand in its place.
        """
        system = [] if behind is None else [self._system(1)]
        text = self._attempt([*before[:-1], self._numbered_in(before[-1], 0), *system, *(behind or ())])
        _, found, rest = (text or "").partition(self._numbered(0))
        if not found or behind is None:
            return rest if found else None
        between, also, after = rest.partition(self._numbered(1))
        return between if also and self._numbered(1) not in after and self._all_there(after, *behind) else None

    def _all_there(self, text: str, *messages: Message) -> bool:
        return all(one["content"] in text for one in messages if isinstance(one.get("content"), str))

    def _numbered(self, number: int) -> str:
        return f"{self._mark}{number:06}"

    def _numbered_in(self, message: Message, number: int) -> Message:
        return {**message, "content": self._numbered(number)}

    def _system(self, number: int) -> Message:
        return {"role": "system", "content": self._numbered(number)}


def _said(message: Message) -> str:
    """Return the text of a message; several parts become paragraphs."""
    content: Any = message.get("content")
    if isinstance(content, str):
        return content
    return BETWEEN.join(text for part in content or () if (text := part.get("text")))


def _joined(messages: Messages) -> Message:
    if len(messages) == 1:
        return messages[0]
    return {**messages[0], "content": BETWEEN.join(filter(None, map(_said, messages)))}


def _before(texts: Sequence[str], message: Message) -> Message:
    """Return a message with texts in front of its own."""
    content: Any = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*({"type": "text", "text": text} for text in texts), *content]}
    return {**message, "content": BETWEEN.join([*texts, *filter(None, [content])])}


def _behind(message: Message, more: str | list[Message]) -> Message:
    """Return a message with a text, or with parts, behind its own content."""
    content: Any = message.get("content")
    if isinstance(content, list) or isinstance(more, list):
        return {**message, "content": [*_parts(content), *_parts(more)]}
    return {**message, "content": BETWEEN.join(filter(None, [content, more]))}


def _parts(content: Any) -> list[Message]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []
