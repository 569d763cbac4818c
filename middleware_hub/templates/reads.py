"""Which texts a chat template's decisions depend on, found in its source.

Tails are rendered from a short conversation (see `chat_template`). That is right only if the template writes the same for
the real one. Most templates copy texts and read only roles. Some look for words:

    {%- if "/no_think" in messages[0].content %}            words: a conversation without them is as good as a short one
    {%- if messages | length > 20 %}                        a number that no short conversation reaches
    {%- if trigger in message.content %}                    a word that only the client knows

So a template has *words*, and a conversation that holds none of them may be rendered short. A template whose decisions depend
on anything else that a short conversation cannot have is *opaque*: then nothing is rendered short. `dataflow` follows such
values by name; a false finding costs time, and never makes a wrong tail.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from jinja2 import TemplateSyntaxError, nodes

from middleware_hub.chat.messages import KeyedMessage, Message
from middleware_hub.templates.dataflow import FINDS, TEXT_FIELDS, Dataflow, parsed

_CUTS = frozenset({"split", "rsplit", "partition", "rpartition", "replace", "removeprefix", "removesuffix"})
_FOLDS = frozenset({"lower", "upper", "casefold", "title", "capitalize", "swapcase"})
_NUMBERS = frozenset({"int", "float", "wordcount", "sum", "hash"})
_COMPARISONS = frozenset(
    {"in", "eq", "equalto", "==", "ne", "!=", "sameas", "lt", "gt", "le", "ge", "<", ">", "<=", ">="}
)
_SMALL = frozenset({-1, 0, 1, 2})
"""The trials of `chat_template` exceed these numbers."""


class Reads(NamedTuple):
    """The known reads of a template.

    Attributes:
        words: the words that it looks for in texts.
        folded: whether it ignores case; then the words are in lower case.
        opaque: whether it decides by anything else.
    """

    words: tuple[str, ...] = ()
    folded: bool = False
    opaque: bool = False

    def concern(self, messages: Iterable[Message]) -> bool:
        """Return whether the template could write these messages differently from any others in the same roles."""
        if self.opaque:
            return True
        return bool(self.words) and any(map(self._concerns, messages))

    def _concerns(self, message: Message) -> bool:
        if type(message) is not KeyedMessage:
            return self._in(message.get("content"))
        known = message.looked_at
        if known is None or known[0] is not self.words:
            known = message.looked_at = (self.words, self._in(message.get("content")))
        return known[1]

    def _in(self, content: object) -> bool:
        if isinstance(content, list):
            return any(self._in(part.get("text")) for part in content if isinstance(part, dict))
        if not isinstance(content, str):
            return False
        text = content.casefold() if self.folded else content
        return any(word in text for word in self.words)


@lru_cache(maxsize=16)
def reads_of(template: str) -> Reads:
    """Return what a template reads. A template that cannot be parsed here is opaque."""
    try:
        return _Decisions(parsed(template)).read()
    except (TemplateSyntaxError, RecursionError):
        return Reads(opaque=True)


class _Decisions:
    """Finds what the decisions of a template depend on."""

    def __init__(self, tree: nodes.Template) -> None:
        self._flow = Dataflow(tree)
        self._words: set[str] = set()
        self._opaque = self._folded = False

    def read(self) -> Reads:
        for compared in self._flow.each(nodes.Compare):
            left = compared.expr
            for operand in compared.ops:
                self._compared(operand.op, left, operand.expr)
                left = operand.expr
        for call in self._flow.each(nodes.Call):
            self._called(call)
        for test in self._flow.each(nodes.Test):
            if test.name in _COMPARISONS and test.args:
                self._compared("in" if test.name == "in" else "eq", test.node, test.args[0])
        for one in self._flow.each(nodes.Filter):
            self._filtered(one)
        for item in self._flow.each(nodes.Getitem):
            self._opaque = self._opaque or (not isinstance(item.arg, nodes.Slice) and self._flow.holds_text(item.arg))
        for mod in self._flow.each(nodes.Mod):
            if not isinstance(mod.left, nodes.Const) and self._flow.number(mod.right) != 2:
                self._opaque = True
        words = {word.casefold() for word in self._words} if self._folded else self._words
        # A search for a word also finds longer words that hold it.
        least = [word for word in words if not any(other in word for other in words if other != word)]
        return Reads(tuple(sorted(least)), self._folded, self._opaque)

    # What decides -------------------------------------------------------------------------------------------------------

    def _compared(self, operator: str, one: nodes.Node, other: nodes.Node) -> None:
        for this, that in ((one, other), (other, one)):
            if self._flow.counting(this) and not self._flow.counting(that) and self._flow.number(that) not in _SMALL:
                self._opaque = self._opaque or not self._of_tools(this)
        texts = [self._flow.holds_text(one), self._flow.holds_text(other)]
        if not any(texts):
            return
        if all(texts):
            self._opaque = True
            return
        text, against = (one, other) if texts[0] else (other, one)
        if operator not in ("in", "notin") and isinstance(against, nodes.Const) and not isinstance(against.value, str):
            measured = isinstance(text, nodes.Filter) and against.value not in _SMALL
            self._opaque = self._opaque or (measured and against.value is not None)
            return
        self._look_for(against)

    def _of_tools(self, node: nodes.Node) -> bool:
        """Return whether a length is that of something that messages cannot change."""
        return isinstance(node, nodes.Filter) and not any(
            one.name in self._flow.counts or one.name in ("message", "m") for one in node.find_all(nodes.Name)
        )

    def _look_for(self, node: nodes.Node, *, blank: bool = True) -> None:
        found = self._flow.spelled(node)
        if found is None:
            self._opaque = True
        else:
            self._words.update(word for word in found if word and (blank or not word.isspace()))

    def _called(self, node: nodes.Call) -> None:
        if not isinstance(node.node, nodes.Getattr):
            return
        method = node.node.attr
        if not self._flow.holds_text(node.node.node):
            # A table of words: `{"quick": ...}.get(message.content)`.
            self._opaque = self._opaque or (method == "get" and any(map(self._flow.holds_text, node.args)))
            return
        if method == "replace" and self._joins(node.args):
            self._opaque = True
        if method in FINDS or method in _CUTS:
            for argument in node.args:
                if self._flow.number(argument) is None:
                    self._look_for(argument, blank=method in FINDS)
        self._folded = self._folded or method in _FOLDS
        self._opaque = self._opaque or method.startswith("is")

    def _joins(self, arguments: Sequence[nodes.Expr]) -> bool:
        """Return whether a replacement removes blanks: then a word may appear in a text that holds only pieces of it."""
        return any(
            (word := self._flow.spelled(one)) is not None and all(map(str.isspace, word)) for one in arguments[:1]
        )

    def _filtered(self, node: nodes.Filter) -> None:
        arguments: Sequence[nodes.Expr] = node.args
        if node.name in ("selectattr", "rejectattr") and arguments:
            if isinstance(arguments[0], nodes.Const) and arguments[0].value in TEXT_FIELDS:
                for one in arguments[2:]:
                    self._look_for(one)
            return
        if not self._flow.holds_text(node.node):
            return
        if node.name == "replace":
            self._opaque = self._opaque or self._joins(arguments)
            for one in arguments:
                self._look_for(one, blank=False)
        self._folded = self._folded or node.name in _FOLDS
        self._opaque = self._opaque or node.name in _NUMBERS
