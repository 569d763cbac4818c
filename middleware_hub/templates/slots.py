"""Renderings with slots for texts that a template only copies, so that other texts are put in without rendering.

    stand-ins   <|im_end|>\\n<|im_start|>user\\n<tool_response>\\nSLOT\\n</tool_response><|im_end|>\\n<|im_start|>assistant\\n
    texts                                                  total 8 ...

Nearly every tail of an agent has this form. Rendering it takes longer than any other step of a session's turn. The source of
the template shows whether it only copies texts:

    {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}                       copied
    {%- if message.content.startswith('<tool_response>') %}                               a word: no text that holds it
    {{- message.content | trim }}                                                         no text with white space around it
    {{- message.content | tojson }}                                                       not copied
    {%- macro show(content) %}{{- content }}{%- endmacro %}                               copied where it is called

Every operation of a template on a text is checked; one that is not known to leave the text unchanged counts as not copied.
So a copying template makes the same decisions, and writes the same around a text, for every text that holds none of its words.

A macro is followed like the rest of the template: its parameters are variables, and its result is what its body writes. It may
read and set namespaces, because these are the same for all texts, too, or hold a text that is followed in turn.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, IntEnum, auto
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from jinja2 import TemplateSyntaxError, nodes

from middleware_hub.chat.messages import Message
from middleware_hub.templates.source import parsed
from middleware_hub.templates.trials import Remembered

_ROLES = ("user", "tool")
_KEYS = frozenset({"role", "content"})
_ROLE, _CONTENT = itemgetter("role"), itemgetter("content")

Render = Callable[[list[Message]], str]


class Slots:
    """Renders messages of users and tools, with slots if the template copies their texts.

    Args:
        source: Jinja source.
        others: further words; texts that hold one of them are never put into a slot.
    """

    def __init__(self, source: str, others: Iterable[str] = ()) -> None:
        self._stand_in = f"slot{secrets.token_hex(12)}"
        """Letters and digits that no client can write."""
        found = copies_of(source)
        if found is not None:
            found = found._replace(words=found.words.union(others))
        self._copies = None if found is None or not found.copied(f"{self._stand_in}000000") else found
        self._known: Remembered[tuple[str, ...]] = Remembered()
        """The text around each slot; empty if a slot is not written exactly once, in order."""

    def rendered(self, key: object, messages: list[Message], render: Render) -> str:
        """Return `render(messages)`. `key` is everything else on which the result depends."""
        if self._copies is None or not self._copied(self._copies, messages):
            return render(messages)
        place = (key, *map(_ROLE, messages))
        around = self._known.get(place)
        if around is None:
            around = self._known[place] = self._around(messages, render)
        if not around:
            return render(messages)
        pairs = zip(map(_CONTENT, messages), around[1:], strict=True)
        return around[0] + "".join(chain.from_iterable(pairs))

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
        for word in self.words:  # noqa: SIM110 - a generator is a call more for each message of a turn
            if word in text:
                return False
        return True


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
    HOLDER = auto()
    """A namespace, or a loop: its fields may hold anything."""
    MARKED = auto()
    """No text of a message, but one that escapes a text added to it."""


class _Writes(IntEnum):
    """What statements write, at most."""

    NOTHING = 0
    SAME = 1
    """The same for all texts."""
    TEXT = 2
    """The same for all texts, or one text and nothing else."""
    WRITTEN = 3
    """Texts and what is around them."""


_ADDED = (None, _Kind.TEXT, _Kind.WRITTEN)
_PRINTED = {
    None: _Writes.SAME,
    _Kind.MARKED: _Writes.SAME,
    _Kind.TEXT: _Writes.TEXT,
    _Kind.WRITTEN: _Writes.WRITTEN,
}
_RESULTS = {_Writes.TEXT: _Kind.TEXT, _Writes.WRITTEN: _Kind.WRITTEN}
_TYPES = frozenset("string mapping iterable sequence none defined undefined number boolean true false".split())
"""Tests with the same result for every text."""
_FUNCTIONS = frozenset({"raise_exception", "namespace", "range"})
"""Others may return something else each time (`strftime_now`)."""
_UNFOLLOWED = frozenset({"namespace", "strftime_now", "lipsum"})
"""Functions that, like macros, must not be values: what calls a value is not followed."""
_MARKS = frozenset({"safe", "escape", "e", "forceescape"})
"""Filters whose results escape the text added to them. `safe` alone leaves its own text as it is."""
_SPECIAL = frozenset({"caller", "varargs", "kwargs"})
"""Variables of a macro that no parameter names."""
_STRIPS = frozenset({"strip", "lstrip", "rstrip"})


class _Copying:
    """Follows messages and their texts through a template, by names, wherever the names occur. See `copies_of`."""

    def __init__(self, tree: nodes.Template) -> None:
        self._tree = tree
        self._names: dict[str, _Kind] = {"messages": _Kind.MESSAGES, "loop": _Kind.HOLDER}
        self._fields: dict[str, _Kind] = {}  # of namespaces
        self._words: set[str] = set()
        self._read: set[str] = set()
        self._strips = False
        self._stored = {one.name for one in tree.find_all(nodes.Name) if one.ctx != "load"}
        defined = Counter(one.name for one in tree.find_all(nodes.Macro))
        macros = (one for one in tree.body if isinstance(one, nodes.Macro) and defined[one.name] == 1)
        self._macros = {one.name: one for one in macros if one.name not in self._stored}
        self._stored.update(defined)
        self._results: dict[str, _Kind] = {}  # of macros
        self._no_strings: list[nodes.Node] = []
        """Values that are no strings in the branch that is being read, and so no texts of messages that have slots."""

    def found(self) -> Copies:
        _require(all(one.name not in _MARKS - {"safe"} for one in self._tree.find_all(nodes.Filter)))
        _require(self._tree.find(nodes.EvalContextModifier) is None)  # autoescape: other values escape texts
        _require(_FUNCTIONS.isdisjoint(self._stored))
        self._changed = True
        while self._changed:
            self._changed = False
            self._run(self._tree.body)
        return Copies(frozenset(self._words), self._strips, frozenset(self._read))

    # Statements ---------------------------------------------------------------------------------------------------------

    def _run(self, statements: Iterable[nodes.Node]) -> _Writes:
        """Follow statements, one after another. Return what they write together."""
        writes = _Writes.NOTHING
        for one in statements:
            writes = _together(writes, self._statement(one))
        return writes

    def _statement(self, node: nodes.Node) -> _Writes:
        if isinstance(node, nodes.Output):
            writes = _Writes.NOTHING
            for one in node.nodes:
                kind = self._kind(one)
                _require(kind in _PRINTED)
                empty = isinstance(one, nodes.TemplateData) and not one.data
                writes = writes if empty else _together(writes, _PRINTED[kind])
            return writes
        if isinstance(node, nodes.For):
            return self._loop(node)
        if isinstance(node, nodes.If):
            return self._branches(node, node.elif_, node.else_)
        if isinstance(node, nodes.Assign):
            self._assign(node.target, self._kind(node.node))
        elif isinstance(node, nodes.Macro) and self._macros.get(node.name) is node:
            self._macro(node)
        elif isinstance(node, nodes.ExprStmt):
            self._kind(node.node)
        elif not isinstance(node, nodes.Break | nodes.Continue):
            self._nothing(node)  # a block, a macro that no call may name: none of its values may hold anything
            return _Writes.SAME
        return _Writes.NOTHING

    def _loop(self, node: nodes.For) -> _Writes:
        kind = self._kind(node.iter)
        _require(kind in (None, _Kind.MESSAGES))
        self._assign(node.target, None if kind is None else _Kind.MESSAGE)
        self._kind(node.test)
        writes = self._run(node.body)
        return max(writes if writes <= _Writes.SAME else _Writes.WRITTEN, self._run(node.else_))

    def _branches(self, node: nodes.If, others: Sequence[nodes.If], rest: list[nodes.Node]) -> _Writes:
        """Follow `if`, and all `elif` and `else` behind it. Return the most that one of them writes."""
        self._kind(node.test)
        other = isinstance(node.test, nodes.Not)
        test = node.test.node if isinstance(node.test, nodes.Not) else node.test
        value = test.node if isinstance(test, nodes.Test) and test.name == "string" else None
        with self._no_string(value if other else None, node.body):
            writes = self._run(node.body)
        with self._no_string(None if other else value, (*others, *rest)):
            behind = self._branches(others[0], others[1:], rest) if others else self._run(rest)
        return max(writes, behind)

    @contextmanager
    def _no_string(self, value: nodes.Node | None, branch: Iterable[nodes.Node]) -> Iterator[None]:
        """Take a value for no string in a branch, if nothing in this branch can give its variable another value."""
        if value is None or not self._stays(value, nodes.Template(list(branch))):
            yield
            return
        self._no_strings.append(value)
        yield
        self._no_strings.pop()

    def _stays(self, value: nodes.Node, branch: nodes.Template) -> bool:
        while isinstance(value, nodes.Getattr | nodes.Getitem):
            if isinstance(value, nodes.Getitem) and not isinstance(value.arg, nodes.Const):
                return False
            value = value.node
            if self._kind(value) not in (_Kind.MESSAGES, _Kind.MESSAGE):  # which the sandbox lets nobody change
                return False
        if not isinstance(value, nodes.Name) or any(branch.find_all((nodes.Macro, nodes.CallBlock, nodes.Block))):
            return False
        return not any(one.name == value.name and one.ctx != "load" for one in branch.find_all(nodes.Name))

    def _macro(self, node: nodes.Macro) -> None:
        _require(_SPECIAL.isdisjoint(one.name for one in node.find_all(nodes.Name)))
        for parameter, default in zip(node.args[::-1], node.defaults[::-1], strict=False):
            self._assign(parameter, self._kind(default))
        self._learn(self._results, node.name, _RESULTS.get(self._run(node.body)))

    def _assign(self, target: nodes.Node, kind: _Kind | None) -> None:
        if kind is None:
            return
        _require(isinstance(target, nodes.Name | nodes.NSRef))
        assert isinstance(target, nodes.Name | nodes.NSRef)
        if isinstance(target, nodes.NSRef):
            self._learn(self._fields, target.attr, kind)
        else:
            self._learn(self._names, target.name, kind)

    def _learn(self, kinds: dict[str, _Kind], name: str, kind: _Kind | None) -> None:
        known, both = kinds.get(name), _one_of((kinds.get(name), kind))
        if both is not None and both is not known:
            kinds[name], self._changed = both, True

    def _nothing(self, node: nodes.Node | None) -> None:
        """Raise _NotCopiedError if any value below holds something of the messages."""
        if node is None:
            return
        if isinstance(node, nodes.Expr):
            _require(self._kind(node) is None)
        if isinstance(node, nodes.Getattr | nodes.Getitem):
            return  # a field that holds nothing, of a namespace that may hold a text elsewhere
        for child in node.iter_child_nodes():
            self._nothing(child)

    # Expressions --------------------------------------------------------------------------------------------------------

    def _kind(self, node: nodes.Node | None) -> _Kind | None:
        """Return the kind of a value. Raise _NotCopiedError for an expression that is not known to leave texts unchanged."""
        kind = self._any_kind(node)
        return None if kind in (_Kind.TEXT, _Kind.WRITTEN) and node in self._no_strings else kind

    def _any_kind(self, node: nodes.Node | None) -> _Kind | None:
        if isinstance(node, nodes.Name):
            _require(node.name not in self._macros and node.name not in _UNFOLLOWED)
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
            if kind is _Kind.MARKED and isinstance(node, nodes.Concat):
                return None  # `~` writes all its parts into a new text
            _require(kind in _ADDED)
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
        _require(base in (None, _Kind.MESSAGE, _Kind.HOLDER))
        self._read.add(field)
        if field in ("previtem", "nextitem"):
            return _Kind.MESSAGE
        return _Kind.TEXT if field == "content" else self._fields.get(field)

    def _filtered(self, node: nodes.Filter) -> _Kind | None:
        base = self._kind(node.node)
        self._none_of(*node.args, *node.kwargs)
        if base is None:
            _require(node.name != "random")
            _require(node.name != "map" or not node.args or _string(node.args[0]) not in (None, *_MARKS))
            return _Kind.MARKED if node.name == "safe" else None
        _require(not node.args and not node.kwargs)
        if base is _Kind.MARKED:
            _require(node.name in ("safe", "string", "tojson"))
            return None if node.name == "tojson" else base
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
        _require(node.dyn_args is None and node.dyn_kwargs is None)
        macro = self._macros.get(node.node.name) if isinstance(node.node, nodes.Name) else None
        if macro is not None:
            return self._result(macro, node)
        self._none_of(*node.args, *node.kwargs)
        if isinstance(node.node, nodes.Name):
            _require(node.node.name in _FUNCTIONS)
            return _Kind.HOLDER if node.node.name == "namespace" else None
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

    def _result(self, macro: nodes.Macro, call: nodes.Call) -> _Kind | None:
        named = {one.name: one for one in macro.args}
        _require(len(call.args) <= len(named) and all(one.key in named for one in call.kwargs))
        for parameter, value in zip(macro.args, call.args, strict=False):
            self._assign(parameter, self._kind(value))
        for keyword in call.kwargs:
            self._assign(named[keyword.key], self._kind(keyword.value))
        return self._results.get(macro.name)

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


def _together(one: _Writes, other: _Writes) -> _Writes:
    """Return what two statements write, one after the other."""
    alone = min(one, other) is _Writes.NOTHING
    return max(one, other) if alone or max(one, other) is _Writes.SAME else _Writes.WRITTEN


def _one_of(kinds: Iterable[_Kind | None]) -> _Kind | None:
    """Return the only kind among these. Raise _NotCopiedError if there are several."""
    found = {kind for kind in kinds if kind is not None}
    if found == {_Kind.TEXT, _Kind.WRITTEN}:
        return _Kind.WRITTEN
    _require(len(found) <= 1)
    return next(iter(found), None)
