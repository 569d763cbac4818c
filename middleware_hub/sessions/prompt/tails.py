"""The tail of a turn: rendered short where that equals the whole, and compared with the whole before it is trusted.

Most templates write the same text after every turn, and `ChatTemplate.tail` knows when they do not. It knows this from trials
and from reading the template, and a template may defeat both. So the first turn of each new kind, that is of each (system
prompt, tools, options), is rendered both ways, and so is the first that is four times as long. If the two differ, the whole
rendering is sent, and from then on every conversation is rendered whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple, TypeVar

from middleware_hub.chat.keys import canonical
from middleware_hub.chat.messages import ChatRequest
from middleware_hub.sessions.trie.nodes import PreparedTurn
from middleware_hub.templates.chat_template import ChatTemplate
from middleware_hub.templates.renderer import RenderingError
from router.errors import BadRequestError

logger = logging.getLogger(__name__)

T = TypeVar("T")
MANY_MESSAGES = 64
"""Rendering this many messages takes some milliseconds."""
KINDS = 4096
"""How many kinds of conversations are remembered as compared; a kind that was forgotten is compared again."""
_SHOWN = 200
"""Characters at the end of two renderings that differ, for a line in a log."""
GROWN = 16
"""The first conversation of a kind with this many messages is compared again, and the first with four times as many, ..."""


class Tail(NamedTuple):
    """The text after the turn that was sampled last.

    Attributes:
        text: the tail; empty if the turn itself is continued.
        new: whether no turn of its kind was compared before.
        healed: whether the short rendering was wrong, so that this is the tail of the whole one.
    """

    text: str
    new: bool = False
    healed: bool = False


class Tails:
    """Renders tails; see the top of this file."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._compared: OrderedDict[Hashable, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Tails: {len(self._compared)} kinds compared>"

    async def of(self, turn: PreparedTurn, request: ChatRequest) -> Tail:
        """Return the tail of a turn that continues a checkpoint.

        Raises BadRequestError, RenderingError: see `ChatTemplate.tail`.
        """
        # Strings cache their hash, so a long system prompt costs nothing at the next turn.
        system: list[Hashable] = []
        for message in request.messages:
            if message["role"] not in ("system", "developer"):
                break
            content, name = message.get("content"), message.get("name")
            system.append((hash(content), len(content), name) if isinstance(content, str) else canonical(message))
        # The length counts as 0 up to `GROWN` messages, as 1 up to four times as many, and so on.
        kind = turn.setting, tuple(system), ((len(request.messages) // GROWN).bit_length() + 1) // 2
        whole, new = self._template.reads(request.messages), kind not in self._compared
        if not (whole or new):
            return Tail(self._template.tail_of(request, turn.covered, whole=False))
        text, full = await offload_rendering(request, partial(self._compare, turn, request, whole=whole, new=new))
        if full is None:
            return Tail(text, new)
        if new:
            self._note(kind)
        if full == text:
            return Tail(text, new)
        if self._template.distrust():
            logger.warning(
                "the chat template reads its messages in a way that could not be found out: from now on every "
                "conversation is rendered as a whole. The short rendering ends with %r, the whole one with %r",
                text[-_SHOWN:],
                full[-_SHOWN:],
            )
        return Tail(full, new, healed=True)

    def _note(self, kind: Hashable) -> None:
        """Note that a turn of this kind was compared, or rendered whole."""
        if kind not in self._compared and len(self._compared) >= KINDS:
            self._compared.popitem(last=False)
        self._compared[kind] = None
        self._compared.move_to_end(kind)

    def _compare(self, turn: PreparedTurn, request: ChatRequest, *, whole: bool, new: bool) -> tuple[str, str | None]:
        """Return a tail, and the same from a rendering of all messages; None if that fails. This may run in a thread.

        Args:
            whole: whether the first is from such a rendering, too.
            new: whether to compare the two.
        """
        text = self.text(turn, request, whole=whole)
        if whole or not new:
            return text, text
        try:
            return text, self._template.tail_of(request, turn.covered, whole=True)
        except (BadRequestError, RenderingError) as error:
            logger.info("a tail could not be compared with a rendering of the whole: %s", error)
            return text, None

    def text(self, turn: PreparedTurn, request: ChatRequest, *, whole: bool) -> str:
        """Return a tail that is not compared; `whole`: whether to render all messages. This may run in a thread.

        Raises as `of`. A tail that depends on a turn's calls was rendered with other calls in their place.
        """
        text, last = self._template.tail_of(request, turn.covered, whole=whole), request.messages[turn.covered - 1]
        depends = whole and last.get("tool_calls") and self._template.reads((last,))
        if depends and not self._template.conversation(request).endswith(text):
            raise RenderingError("what the template writes after a turn depends on what was said in it")
        return text


async def offload_rendering(request: ChatRequest, rendering: Callable[[], T], *, heavy: bool = False) -> T:
    """Run what renders all messages: in a thread if there are many, so that other requests go on meanwhile."""
    if len(request.messages) < MANY_MESSAGES and not heavy:
        return rendering()
    return await asyncio.to_thread(rendering)
