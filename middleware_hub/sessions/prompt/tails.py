"""The tail of a turn: rendered short where that equals the whole, and compared with the whole before it is trusted.

Most templates write the same text after every turn, and `ChatTemplate.tail` knows when they do not. It knows this from trials
and from reading the template, and a template may defeat both. So the first turn of each new kind, that is of each (system
prompt, tools, options), is rendered both ways, and so is the first that is four times as long. If the two differ, the whole
rendering is sent, and from then on every conversation is rendered whole.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

from middleware_hub.chat.keys import canonical
from middleware_hub.chat.messages import ChatRequest, Message
from middleware_hub.sessions.trie.nodes import PreparedTurn
from middleware_hub.templates.chat_template import ChatTemplate
from middleware_hub.templates.renderer import RenderingError
from router.errors import BadRequestError

logger = logging.getLogger(__name__)

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
        known: whether it was compared with a rendering of the whole.
        healed: whether the short rendering was wrong, so that this is the tail of the whole one.
    """

    text: str
    known: bool
    healed: bool = False


class Way(NamedTuple):
    """How a tail has to be rendered.

    Attributes:
        whole: with all messages, because the template may search them.
        new: the kind of the conversation if no turn of this kind was compared yet; else None.
    """

    whole: bool
    new: Hashable | None


class Tails:
    """Renders tails; see the top of this file."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._compared: OrderedDict[Hashable, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Tails: {len(self._compared)} kinds compared>"

    def way(self, turn: PreparedTurn, request: ChatRequest) -> Way:
        """Return how the tail of a turn has to be rendered."""
        # Strings cache their hash, so a long system prompt costs nothing at the next turn.
        system: list[Hashable] = []
        for message in request.messages:
            if message["role"] not in ("system", "developer"):
                break
            content, name = message.get("content"), message.get("name")
            system.append((hash(content), len(content), name) if isinstance(content, str) else canonical(message))
        # The length counts as 0 up to `GROWN` messages, as 1 up to four times as many, and so on.
        kind = turn.setting, tuple(system), ((len(request.messages) // GROWN).bit_length() + 1) // 2
        return Way(self._template.reads(request.messages), None if kind in self._compared else kind)

    def compared(self, kind: Hashable) -> None:
        """Note that a turn of this kind was compared, or rendered whole."""
        if kind not in self._compared and len(self._compared) >= KINDS:
            self._compared.popitem(last=False)
        self._compared[kind] = None
        self._compared.move_to_end(kind)

    def of(self, turn: PreparedTurn, request: ChatRequest, *, whole: bool, compare: bool) -> Tail:
        """Return the tail of a turn that continues a checkpoint. This may run in a thread.

        Args:
            whole: whether to render all messages.
            compare: whether to render all messages as well; if the two differ, the tail of that rendering is returned.

        Raises:
            BadRequestError, RenderingError: see `ChatTemplate.tail`.
        """
        text = self._template.tail_of(request, turn.covered, whole=whole)
        if whole:
            self._require_end(text, request, request.messages[turn.covered - 1])
        if whole or not compare:
            return Tail(text, known=True)
        try:
            full = self._template.tail_of(request, turn.covered, whole=True)
        except (BadRequestError, RenderingError) as error:
            logger.info("a tail could not be compared with a rendering of the whole: %s", error)
            return Tail(text, known=False)
        if full == text:
            return Tail(text, known=True)
        if self._template.distrust():
            logger.warning(
                "the chat template reads its messages in a way that could not be found out: from now on every "
                "conversation is rendered as a whole. The short rendering ends with %r, the whole one with %r",
                text[-_SHOWN:],
                full[-_SHOWN:],
            )
        return Tail(full, known=True, healed=True)

    def _require_end(self, text: str, request: ChatRequest, last: Message) -> None:
        """Raise RenderingError if the tail depends on a turn's calls: it was rendered with other calls in their place."""
        depends = last.get("tool_calls") and self._template.reads((last,))
        if depends and not self._template.conversation(request).endswith(text):
            raise RenderingError("what the template writes after a turn depends on what was said in it")
