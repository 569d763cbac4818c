"""Renderings with slots for texts that a template only copies, so that other texts are put in without rendering.

    stand-ins   <|im_end|>\\n<|im_start|>user\\n<tool_response>\\nSLOT\\n</tool_response><|im_end|>\\n<|im_start|>assistant\\n
    texts                                                  total 8 ...

Nearly every tail of an agent has this form. Rendering it takes longer than any other step of a session's turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from middleware_hub.chat.messages import Message
from middleware_hub.templates.copies import copies_of

REMEMBERED = 1024
"""How many renderings are remembered, by roles and everything else that shapes them. Clients choose these."""

_ROLES = ("user", "tool")
_KEYS = frozenset({"role", "content"})

Render = Callable[[list[Message]], str]


class Slots:
    """Renders messages of users and tools, with slots if the template copies their texts.

    Args:
        stand_in: letters and digits that no client can write.
    """

    def __init__(self, template: str, stand_in: str) -> None:
        found = copies_of(template)
        self._copies = None if found is None or not found.copied(f"{stand_in}000000") else found
        self._stand_in = stand_in
        self._known: dict[tuple[object, ...], tuple[str, ...] | None] = {}
        """The text around each slot; None if a slot is not written exactly once, in order."""

    def rendered(self, key: object, messages: list[Message], render: Render) -> str:
        """Return `render(messages)`. `key` is everything else on which the result depends."""
        if not self._copied(messages):
            return render(messages)
        place = (key, *(message["role"] for message in messages))
        around = self._known.get(place, ())
        if around == ():
            around = self._around(messages, render)
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[place] = around
        if around is None:
            return render(messages)
        texts = (message["content"] for message in messages)
        return around[0] + "".join([piece for pair in zip(texts, around[1:], strict=True) for piece in pair])

    def _copied(self, messages: Sequence[Message]) -> bool:
        copies = self._copies
        return copies is not None and all(
            message["role"] in _ROLES
            and type(message["content"]) is str
            and copies.copied(message["content"])
            and (message.keys() - _KEYS).isdisjoint(copies.fields)
            for message in messages
        )

    def _around(self, messages: Sequence[Message], render: Render) -> tuple[str, ...] | None:
        slots = [f"{self._stand_in}{number:06}" for number in range(len(messages))]
        rest = render([{"role": one["role"], "content": slot} for one, slot in zip(messages, slots, strict=True)])
        around = []
        for slot in slots:
            before, found, rest = rest.partition(slot)
            if not found or self._stand_in in before:
                return None
            around.append(before)
        return None if self._stand_in in rest else (*around, rest)
