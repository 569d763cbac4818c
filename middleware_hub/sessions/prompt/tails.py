"""The tail of a turn: rendered short where that is as good as the whole, and compared with it before it is trusted.

Most templates write behind a turn what they would write behind any other, and `ChatTemplate.tail` knows when they do not. What
it knows is found out by trying and by reading the template, and a template may be cleverer than that. So the first turn of
each new kind, that is of each (system prompt, tools, options), is rendered both ways, and so is the first that is four times as
long. If they differ, the whole is what is sent, and from there on all is rendered whole, for everybody.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable
from functools import partial
from typing import NamedTuple

from middleware_hub.chat.keys import canonical
from middleware_hub.chat.messages import ChatRequest, Message
from middleware_hub.sessions.trie.nodes import PreparedTurn
from middleware_hub.templates.chat_template import ChatTemplate
from middleware_hub.templates.renderer import RenderingError
from router.errors import BadRequestError

logger = logging.getLogger(__name__)

KINDS = 4096
"""So many kinds of conversations are remembered as compared; one that was forgotten is compared again."""
GROWN = 16
"""The first conversation of a kind with this many messages is compared again, and the first with four times as many, ..."""


class Tail(NamedTuple):
    """What stands behind the turn that was sampled last.

    Attributes:
        text: empty where the turn itself goes on.
        known: it is as a rendering of the whole has it, as far as that was to be found out.
        healed: the short rendering was not what the template writes for these messages.
    """

    text: str
    known: bool
    healed: bool = False


class Tails:
    """Renders tails.

    Args:
        template: renders.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._compared: OrderedDict[Hashable, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Tails: {len(self._compared)} kinds compared>"

    def whole(self, request: ChatRequest) -> bool:
        """Whether the template may look for something in these messages: then all of them are rendered."""
        return self._template.reads(request.messages)

    def new(self, turn: PreparedTurn, request: ChatRequest) -> bool:
        """Whether no turn of this kind was compared yet."""
        return _kind(turn, request) not in self._compared

    def compared(self, turn: PreparedTurn, request: ChatRequest) -> None:
        """A turn of this kind was compared, or rendered whole."""
        kind = _kind(turn, request)
        if kind not in self._compared and len(self._compared) >= KINDS:
            self._compared.popitem(last=False)
        self._compared[kind] = None
        self._compared.move_to_end(kind)

    def of(self, turn: PreparedTurn, request: ChatRequest, *, whole: bool, compare: bool) -> Tail:
        """The tail of a turn that goes on from a checkpoint. It may run in a thread.

        Args:
            whole: render all messages.
            compare: do so, too, and take that if it is another one.

        Raises:
            BadRequestError, RenderingError: see `ChatTemplate.tail`.
        """
        messages, covered = request.messages, turn.covered
        render = partial(
            self._template.tail,
            messages[covered - 1],
            messages[covered:],
            request.tools,
            request.template,
            earlier=messages[: covered - 1],
            continue_final=request.continue_final,
        )
        text = render(whole=whole)
        if whole:
            self._require_end(text, request, messages[covered - 1])
        if whole or not compare:
            return Tail(text, known=True)
        try:
            full = render(whole=True)
        except (BadRequestError, RenderingError) as error:
            logger.info("a tail could not be compared with a rendering of the whole: %s", error)
            return Tail(text, known=False)
        if full == text:
            return Tail(text, known=True)
        if self._template.distrust():
            logger.warning(
                "the chat template reads its messages in a way that is not seen in it: from now on all of every "
                "conversation is rendered. In short it wrote %r, and with all messages %r",
                text[-_SHOWN:],
                full[-_SHOWN:],
            )
        return Tail(full, known=True, healed=True)

    def _require_end(self, text: str, request: ChatRequest, last: Message) -> None:
        """A turn with calls was rendered with others in their place: see what a template that reads it makes of it."""
        if last.get("tool_calls") and self._template.reads((last,)):
            whole = self._template.whole(
                request.messages, request.tools, request.template, continue_final=request.continue_final
            )
            if not whole.endswith(text):
                raise RenderingError("what the template writes behind a turn hangs on what was said in it")


_SHOWN = 200


def _system(request: ChatRequest) -> Hashable:
    """What stands in front of what is said. Texts know their hash: a long one costs nothing at the next turn."""
    found = []
    for message in request.messages:
        if message["role"] not in ("system", "developer"):
            break
        content, name = message.get("content"), message.get("name")
        found.append((hash(content), len(content), name) if isinstance(content, str) else canonical(message))
    return tuple(found)


def _kind(turn: PreparedTurn, request: ChatRequest) -> Hashable:
    """What a conversation is rendered with, what it begins with, and about how long it is."""
    return turn.setting, _system(request), _step(len(request.messages))


def _step(messages: int) -> int:
    """0 up to `GROWN`, 1 up to four times as many, and so on."""
    return ((messages // GROWN).bit_length() + 1) // 2
