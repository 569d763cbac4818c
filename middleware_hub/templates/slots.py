"""Renderings with slots for texts that a template only copies, so that other texts are put in without rendering.

    stand-ins   <|im_end|>\\n<|im_start|>user\\n<tool_response>\\nSLOT\\n</tool_response><|im_end|>\\n<|im_start|>assistant\\n
    texts                                                  total 8 ...

Nearly every tail of an agent has this form. Rendering it takes longer than any other step of a session's turn. The source of
the template shows whether it only copies texts:

    {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}                       copied
    {%- if message.content.startswith('<tool_response>') %}                               a word: no text that holds it
    {{- message.content | trim }}                                                         no text with white space around it
    {{- message.content | tojson }}                                                       not copied

Every operation of a template on a text is checked; one that is not known to leave the text unchanged counts as not copied.
So a copying template makes the same decisions, and writes the same around a text, for every text that holds none of its words.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from functools import lru_cache
from typing import NamedTuple

from jinja2 import TemplateSyntaxError, nodes

from middleware_hub.chat.messages import Message
from middleware_hub.templates.source import parsed
from middleware_hub.templates.trials import Remembered

_ROLES = ("user", "tool")
_KEYS = frozenset({"role", "content"})

Render = Callable[[list[Message]], str]


class Slots:
    """Renders messages of users and tools, with slots if the template copies their texts."""

    def __init__(self, source: str) -> None:
        self._stand_in = f"slot{secrets.token_hex(12)}"
        """Letters and digits that no client can write."""
        found = copies_of(source)
        self._copies = None if found is None or not found.copied(f"{self._stand_in}000000") else found
        self._known: Remembered[tuple[str, ...]] = Remembered()
        """The text around each slot; empty if a slot is not written exactly once, in order."""

    def rendered(self, key: object, messages: list[Message], render: Render) -> str:
        """Return `render(messages)`. `key` is everything else on which the result depends."""
        if self._copies is None or not self._copied(self._copies, messages):
            return render(messages)
        place = (key, *[message["role"] for message in messages])
        around = self._known.get(place)
        if around is None:
            around = self._known[place] = self._around(messages, render)
        if not around:
            return render(messages)
        texts = (message["content"] for message in messages)
        return around[0] + "".join([piece for pair in zip(texts, around[1:], strict=True) for piece in pair])

    @staticmethod
    def _copied(copies: Copies, messages: Sequence[Message]) -> bool:
        for message in messages:
            if message["role"] not in _ROLES or type(message["content"]) is not str:
                return False
            if not copies.copied(message["content"]) or not (message.keys() - _KEYS).isdisjoint(copies.fields):
                return False
        return True

    def _around(self, messages: Sequence[Message], render: Render) -> tuple[str, ...]:
        slots = [f"{self._stand_in}{number:06}" for number in range(len(messages))]
        rest = render([{"role": one["role"], "content": slot} for one, slot in zip(messages, slots, strict=True)])
        around = []
        for slot in slots:
            before, found, rest = rest.partition(slot)
            if not found or self._stand_in in before:
                return ()
            around.append(before)
        return () if self._stand_in in rest else (*around, rest)


class Copies(NamedTuple):
    """How a template copies texts.

    Attributes:
        words: the words that it looks for in them. Texts that hold one of these are not only copied.
        strips: whether it may remove white space around them.
        fields: all field names that it reads, of messages and of anything else.
    """

    words: frozenset[str]
    strips: bool
    fields: frozenset[str]

    def copied(self, text: str) -> bool:
        """Return whether the template copies this text like any other."""
        if not text or (self.strips and (text[0].isspace() or text[-1].isspace())):
            return False
        return not any(word in text for word in self.words)


@lru_cache(maxsize=16)
def copies_of(template: str) -> Copies | None:
    """Return how a template copies texts; None if it may do anything else with them."""
    try:
        return _Copying(parsed(template)).found()
    except (TemplateSyntaxError, RecursionError, _NotCopiedError):
        return None


class _NotCopiedError(Exception):
    """The template uses messages in a way that is not known to be a copy."""


class _Kind(Enum):
    """The part of the messages that a value holds; None for nothing."""

    MESSAGES = auto()
    MESSAGE = auto()
    TEXT = auto()
    WRITTEN = auto()
    """A text with others around it: together they may hold a word that none of them holds."""
    PIECES = auto()
    """A text, split at a word that it does not hold."""


_PRINTED = (None, _Kind.TEXT, _Kind.WRITTEN)
_TYPES = frozenset("string mapping iterable sequence none defined undefined number boolean true false".split())
"""Tests with the same result for every text."""
_FUNCTIONS = frozenset({"raise_exception", "namespace", "range"})
"""Others may return something else each time (`strftime_now`)."""
_MARKS = frozenset({"safe", "escape", "e", "forceescape"})
"""Filters whose results escape the text joined to them."""
_STRIPS = frozenset({"strip", "lstrip", "rstrip"})
_STATEMENTS = (
    nodes.Template,
    nodes.Output,
    nodes.If,
    nodes.For,
    nodes.Assign,
    nodes.ExprStmt,
    nodes.Break,
    nodes.Continue,
)


class _Copying:
    """Follows messages and their texts through a template, by names, wherever the names occur. See `copies_of`."""

    def __init__(self, tree: nodes.Template) -> None:
        self._tree = tree
        self._names: dict[str, _Kind] = {"messages": _Kind.MESSAGES}
        self._fields: dict[str, _Kind] = {}  # of namespaces
        self._words: set[str] = set()
        self._read: set[str] = set()
        self._strips = False

    def found(self) -> Copies:
        _require(all(one.name not in _MARKS for one in self._tree.find_all(nodes.Filter)))
        self._changed = True
        while self._changed:
            self._changed = False
            self._statement(self._tree)
        return Copies(frozenset(self._words), self._strips, frozenset(self._read))

    # Statements ---------------------------------------------------------------------------------------------------------

    def _statement(self, node: nodes.Node) -> None:
        if not isinstance(node, _STATEMENTS):
            self._nothing(node)  # a macro, a block: none of its values may hold anything
        elif isinstance(node, nodes.Output):
            for one in node.nodes:
                _require(self._kind(one) in _PRINTED)
        elif isinstance(node, nodes.Assign):
            self._assign(node.target, self._kind(node.node))
        elif isinstance(node, nodes.For):
            kind = self._kind(node.iter)
            _require(kind in (None, _Kind.MESSAGES))
            self._assign(node.target, None if kind is None else _Kind.MESSAGE)
            self._kind(node.test)
            self._each((*node.body, *node.else_))
        elif isinstance(node, nodes.If):
            self._kind(node.test)
            self._each((*node.body, *node.elif_, *node.else_))
        else:
            self._each(node.iter_child_nodes())

    def _each(self, statements: Iterable[nodes.Node]) -> None:
        for one in statements:
            self._statement(one) if isinstance(one, nodes.Stmt) else self._kind(one)

    def _assign(self, target: nodes.Node, kind: _Kind | None) -> None:
        if kind is None:
            return
        _require(isinstance(target, nodes.Name | nodes.NSRef))
        assert isinstance(target, nodes.Name | nodes.NSRef)
        kinds, name = (self._fields, target.attr) if isinstance(target, nodes.NSRef) else (self._names, target.name)
        known, both = kinds.get(name), _one_of((kinds.get(name), kind))
        if both is not None and both is not known:
            kinds[name], self._changed = both, True

    def _nothing(self, node: nodes.Node | None) -> None:
        """Raise _NotCopiedError if any value below holds something of the messages."""
        if node is None:
            return
        if isinstance(node, nodes.Expr):
            _require(self._kind(node) is None)
        for child in node.iter_child_nodes():
            self._nothing(child)

    # Expressions --------------------------------------------------------------------------------------------------------

    def _kind(self, node: nodes.Node | None) -> _Kind | None:
        """Return the kind of a value. Raise _NotCopiedError for an expression that is not known to leave texts unchanged."""
        if isinstance(node, nodes.Name):
            return self._names.get(node.name)
        if isinstance(node, nodes.Getattr | nodes.Getitem):
            return self._item(node)
        if isinstance(node, nodes.Filter):
            return self._filtered(node)
        if isinstance(node, nodes.Call):
            return self._called(node)
        if isinstance(node, nodes.Compare):
            left = node.expr
            for operand in node.ops:
                self._compared(operand.op, left, operand.expr)
                left = operand.expr
            return None
        if isinstance(node, nodes.Test):
            _require(self._kind(node.node) is None or node.name in _TYPES)
            self._none_of(*node.args)
            return None
        if isinstance(node, nodes.Not):
            self._kind(node.node)
            return None
        if isinstance(node, nodes.Add | nodes.Concat):
            parts = (node.left, node.right) if isinstance(node, nodes.Add) else node.nodes
            kind = _one_of(map(self._kind, parts))
            _require(kind in _PRINTED)
            return None if kind is None else _Kind.WRITTEN
        if isinstance(node, nodes.And | nodes.Or):
            return _one_of((self._kind(node.left), self._kind(node.right)))
        if isinstance(node, nodes.CondExpr):
            self._kind(node.test)
            return _one_of((self._kind(node.expr1), self._kind(node.expr2)))
        if node is not None:
            for child in node.iter_child_nodes():
                self._none_of(child)
        return None

    def _none_of(self, *values: nodes.Node) -> None:
        for one in values:
            _require(self._kind(one) is None)

    def _item(self, node: nodes.Getattr | nodes.Getitem) -> _Kind | None:
        base = self._kind(node.node)
        field = node.attr if isinstance(node, nodes.Getattr) else _string(node.arg)
        if field is None:
            assert isinstance(node, nodes.Getitem)
            self._none_of(node.arg)
            if base is _Kind.MESSAGES:
                return base if isinstance(node.arg, nodes.Slice) else _Kind.MESSAGE
            if base is _Kind.PIECES:
                _require(not isinstance(node.arg, nodes.Slice))
                return _Kind.TEXT
            _require(base is None)
            return None
        _require(base in (None, _Kind.MESSAGE))
        self._read.add(field)
        if field in ("previtem", "nextitem"):
            return _Kind.MESSAGE
        return _Kind.TEXT if field == "content" else self._fields.get(field)

    def _filtered(self, node: nodes.Filter) -> _Kind | None:
        base = self._kind(node.node)
        self._none_of(*node.args, *node.kwargs)
        if base is None:
            return None
        _require(not node.args and not node.kwargs)
        if base in (_Kind.TEXT, _Kind.WRITTEN) and node.name in ("trim", "string"):
            self._strips = self._strips or node.name == "trim"
            return base
        if base is _Kind.MESSAGES and node.name in ("list", "reverse"):
            return base
        _require(base in (_Kind.MESSAGES, _Kind.PIECES))
        if node.name in ("first", "last"):
            return _Kind.MESSAGE if base is _Kind.MESSAGES else _Kind.TEXT
        _require(base is _Kind.MESSAGES and node.name in ("length", "count"))
        return None

    def _called(self, node: nodes.Call) -> _Kind | None:
        self._none_of(*node.args, *node.kwargs)
        _require(node.dyn_args is None and node.dyn_kwargs is None)
        if isinstance(node.node, nodes.Name):
            _require(node.node.name in _FUNCTIONS)
            return None
        _require(isinstance(node.node, nodes.Getattr))
        assert isinstance(node.node, nodes.Getattr)
        base, method = self._kind(node.node.node), node.node.attr
        words = [_string(one) for one in node.args]
        if base is None or base is _Kind.MESSAGE:
            if method == "get" and words:
                _require(words[0] is not None or base is None)
                self._read.add(words[0] or "")
                return _Kind.TEXT if words[0] in (None, "content") else None
            _require(base is None)
            return None
        _require(base in (_Kind.TEXT, _Kind.WRITTEN) and not node.kwargs)
        if method in _STRIPS:
            _require(all(word is not None and word.isspace() for word in words))
            self._strips = True
            return base
        _require(base is _Kind.TEXT)
        _require(method in ("startswith", "endswith", "split") and len(words) == 1)
        self._look_for(words[0])
        return _Kind.PIECES if method == "split" else None

    def _compared(self, operator: str, one: nodes.Node, other: nodes.Node) -> None:
        kinds = self._kind(one), self._kind(other)
        if kinds == (None, None):
            return
        _require(None in kinds)
        held, against = (one, other) if kinds[0] is not None else (other, one)
        _require(isinstance(against, nodes.Const))
        if operator in ("in", "notin"):
            _require(held is other)
            _require(kinds[1] in (_Kind.MESSAGE, _Kind.TEXT))
            if kinds[1] is _Kind.TEXT:
                self._look_for(_string(against))
            else:
                self._read.add(_string(against) or "")
            return
        _require(operator in ("eq", "ne"))
        if _string(against):
            _require(kinds[0] is not _Kind.WRITTEN and kinds[1] is not _Kind.WRITTEN)
            self._look_for(_string(against))

    def _look_for(self, word: str | None) -> None:
        _require(bool(word))
        self._words.add(word or "")


def _require(holds: bool) -> None:
    if not holds:
        raise _NotCopiedError


def _string(node: nodes.Node) -> str | None:
    return node.value if isinstance(node, nodes.Const) and isinstance(node.value, str) else None


def _one_of(kinds: Iterable[_Kind | None]) -> _Kind | None:
    """Return the only kind among these. Raise _NotCopiedError if there are several."""
    found = {kind for kind in kinds if kind is not None}
    if found == {_Kind.TEXT, _Kind.WRITTEN}:
        return _Kind.WRITTEN
    _require(len(found) <= 1)
    return next(iter(found), None)
