"""Which texts a chat template's decisions depend on, found in its source.

Tails are rendered from a short conversation (see `chat_template`). That is right only if the template writes the same for
the real one. Most templates copy texts and read only roles. Some look for words:

    {%- if "/no_think" in messages[0].content %}            words: a conversation without them is as good as a short one
    {%- if messages | length > 20 %}                        a number that no short conversation reaches
    {%- if trigger in message.content %}                    a word that only the client knows

So a template has *words*, and a conversation that holds none of them may be rendered short. A template whose decisions depend
on anything else that a short conversation cannot have is *opaque*: then nothing is rendered short. `_Dataflow` finds the values
that may hold a message's text, a number of messages, or a known text. It follows them through variables, namespaces and macros
by their names, wherever the names occur. That finds too much rather than too little: a false finding costs time, and never
makes a wrong tail.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

from jinja2 import TemplateSyntaxError, nodes

from middleware_hub.chat.messages import KeyedMessage, Message
from middleware_hub.templates.source import parsed

_TEXT_FIELDS = frozenset({"content", "text", "reasoning_content"})
_FINDS = frozenset({"startswith", "endswith", "find", "rfind", "index", "rindex", "count"})
_CUTS = frozenset({"split", "rsplit", "partition", "rpartition", "replace", "removeprefix", "removesuffix"})
_FOLDS = frozenset({"lower", "upper", "casefold", "title", "capitalize", "swapcase"})
_NUMBERS = frozenset({"int", "float", "wordcount", "sum", "hash"})
_COMPARISONS = frozenset(
    {"in", "eq", "equalto", "==", "ne", "!=", "sameas", "lt", "gt", "le", "ge", "<", ">", "<=", ">="}
)
_SMALL = frozenset({-1, 0, 1, 2})
"""The trials of `chat_template` exceed these numbers."""


class Decisions(NamedTuple):
    """The dependencies of a template's decisions.

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
        if self.opaque or not self.words:
            return self.opaque
        for message in messages:
            keyed = message if type(message) is KeyedMessage else None
            known = None if keyed is None else keyed.looked_at
            if known is None or known[0] is not self.words:
                known = self.words, self._in(message.get("content"))
                if keyed is not None:
                    keyed.looked_at = known
            if known[1]:
                return True
        return False

    def _in(self, content: object) -> bool:
        if isinstance(content, list):
            return any(self._in(part.get("text")) for part in content if isinstance(part, dict))
        if not isinstance(content, str):
            return False
        text = content.casefold() if self.folded else content
        return any(word in text for word in self.words)


@lru_cache(maxsize=16)
def decisions_of(template: str) -> Decisions:
    """Return the dependencies of a template's decisions. A template that cannot be parsed here is opaque."""
    try:
        return _Reading(parsed(template)).read()
    except (TemplateSyntaxError, RecursionError):
        return Decisions(opaque=True)


class _Reading:
    """Finds the dependencies of a template's decisions."""

    def __init__(self, tree: nodes.Template) -> None:
        self._flow = _Dataflow(tree)
        self._words: set[str] = set()
        self._opaque = self._folded = False

    def read(self) -> Decisions:
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
        return Decisions(tuple(sorted(least)), self._folded, self._opaque)

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
        """Return whether messages cannot change a length."""
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
        if method in _FINDS or method in _CUTS:
            for argument in node.args:
                if self._flow.number(argument) is None:
                    self._look_for(argument, blank=method in _FINDS)
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
            if isinstance(arguments[0], nodes.Const) and arguments[0].value in _TEXT_FIELDS:
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


N = TypeVar("N", bound=nodes.Node)
_Assigned = tuple[list[str], nodes.Node]


class _Dataflow:
    """Follows values through a template's tree."""

    def __init__(self, tree: nodes.Template) -> None:
        self._nodes = list(tree.find_all(nodes.Node))
        self._assigned = list(self._assignments())
        # The texts that each variable may hold; None if there may be others.
        self._constants: dict[str, set[str] | None] = {}
        # Variables, and fields of namespaces, that may hold a message's text.
        self._texts: set[str] = set()
        # Variables that may hold the number of messages.
        self.counts: set[str] = {"loop", "messages"}
        self._follow()

    def each(self, kind: type[N]) -> list[N]:
        return [node for node in self._nodes if isinstance(node, kind)]

    def _follow(self) -> None:
        """Find the variables that hold texts, counts and constants, until nothing new is found."""
        known = -1
        while known != (known := len(self._texts) + len(self.counts)):
            for names, value in self._assigned:
                if self.holds_text(value):
                    self._texts.update(names)
                if self.counting(value):
                    self.counts.update(names)
        for names, value in self._assigned:
            found = self.spelled(value)
            for name in names:
                before = self._constants.get(name, set())
                self._constants[name] = None if found is None or before is None else before | found

    def _assignments(self) -> Iterator[_Assigned]:
        """Yield names and their values: of assignments, loops, namespaces, macros and their parameters."""
        lists = {
            name
            for node in self.each(nodes.Assign)
            if isinstance(node.node, nodes.List | nodes.Tuple)
            for name in _names(node.target)
        }
        for node in self.each(nodes.Assign):
            yield _names(node.target), node.node
        for block in self.each(nodes.AssignBlock):
            for output in block.find_all(nodes.Output):
                yield from ((_names(block.target), one) for one in output.nodes)
        for loop in self.each(nodes.For):
            # The items of a list of parts are not texts; the pieces of a text are.
            cut = isinstance(loop.iter, nodes.Call | nodes.Filter | nodes.List | nodes.Tuple | nodes.Const)
            if cut or (isinstance(loop.iter, nodes.Name) and loop.iter.name in lists):
                # The keys of a mapping are names of fields, of arguments or of a tool's schema.
                yield _names(loop.target)[_is_mapping(loop.iter) :], loop.iter
        macros = {macro.name: macro for macro in self.each(nodes.Macro)}
        for macro in macros.values():
            for output in macro.find_all(nodes.Output):
                yield from (([_result_of(macro.name)], one) for one in output.nodes)
        for call in self.each(nodes.Call):
            if isinstance(call.node, nodes.Name):
                yield from (([keyword.key], keyword.value) for keyword in call.kwargs)
                if call.node.name in macros:
                    yield from (
                        ([one.name], given) for one, given in zip(macros[call.node.name].args, call.args, strict=False)
                    )

    def holds_text(self, node: nodes.Node | None) -> bool:
        """Return whether a value may be a message's text, or a piece of one."""
        if node is None or isinstance(node, nodes.Const | nodes.TemplateData | nodes.Compare | nodes.Test | nodes.Not):
            return False
        if isinstance(node, nodes.Name):
            return node.name in self._texts
        field = _field(node)
        if field is not None:
            return field in _TEXT_FIELDS or field in self._texts
        if isinstance(node, nodes.Call):
            return self._call_holds(node)
        if isinstance(node, nodes.Filter):
            named = (*node.args, *(pair.value for pair in node.kwargs))
            if any(isinstance(one, nodes.Const) and one.value in _TEXT_FIELDS for one in named):
                return True
            if node.name in ("tojson", "string", "pprint", "join") and isinstance(node.node, nodes.Name):
                return True
        return any(self.holds_text(child) for child in node.iter_child_nodes())

    def _call_holds(self, node: nodes.Call) -> bool:
        if isinstance(node.node, nodes.Name) and _result_of(node.node.name) in self._texts:
            return True
        if isinstance(node.node, nodes.Getattr):
            if node.node.attr == "get" and node.args and isinstance(node.args[0], nodes.Const):
                return node.args[0].value in _TEXT_FIELDS
            if node.node.attr in (*_FINDS, "isdigit"):
                return False
            return self.holds_text(node.node.node) or any(map(self.holds_text, node.args))
        return any(map(self.holds_text, node.args))

    def counting(self, node: nodes.Node | None) -> bool:
        """Return whether a value may be the number of messages, or the index of one."""
        if isinstance(node, nodes.Add | nodes.Sub) and any(
            isinstance(one, nodes.Const) and isinstance(one.value, int) for one in (node.left, node.right)
        ):
            return True
        if isinstance(node, nodes.Name):
            return node.name in self.counts - {"messages"}
        if isinstance(node, nodes.Getattr):
            loop = isinstance(node.node, nodes.Name) and node.node.name == "loop"
            return node.attr in self.counts or (loop and node.attr.removesuffix("0") in ("index", "revindex", "length"))
        if isinstance(node, nodes.Filter):
            return node.name in ("length", "count") and not self.holds_text(node.node)
        return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == "range"

    def spelled(self, node: nodes.Node | None) -> set[str] | None:
        """Return the texts that a value may have, as the template spells them; None if it may have another text."""
        if isinstance(node, nodes.Const):
            return {node.value} if isinstance(node.value, str) else set()
        if isinstance(node, nodes.Name):
            return self._constants.get(node.name)
        if isinstance(node, nodes.List | nodes.Tuple):
            return _joined(self.spelled(item) for item in node.items)
        if isinstance(node, nodes.CondExpr):
            return _joined(map(self.spelled, (node.expr1, node.expr2)))
        try:
            value = node.as_const() if isinstance(node, nodes.Expr) else None
        except nodes.Impossible:
            return None
        return {value} if isinstance(value, str) else None

    @staticmethod
    def number(node: nodes.Node) -> int | None:
        try:
            value = node.as_const() if isinstance(node, nodes.Expr) else None
        except nodes.Impossible:
            return None
        return value if isinstance(value, int) else None


def _names(target: nodes.Node) -> list[str]:
    if isinstance(target, nodes.NSRef):
        return [target.attr]
    return [name.name for name in ([target] if isinstance(target, nodes.Name) else target.find_all(nodes.Name))]


def _is_mapping(node: nodes.Node) -> bool:
    """Return whether a loop over this takes pairs of keys and values."""
    if isinstance(node, nodes.Filter):
        return node.name in ("dictsort", "items")
    return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "items"


def _result_of(macro: str) -> str:
    """Return the name under which a macro's result is kept; no variable has such a name."""
    return f"{macro}()"


def _field(node: nodes.Node) -> str | None:
    """Return the name of the field that an expression takes, if the template spells it."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
        return node.arg.value
    return None


def _joined(found: Iterable[set[str] | None]) -> set[str] | None:
    all_of_it: set[str] = set()
    for one in found:
        if one is None:
            return None
        all_of_it |= one
    return all_of_it
