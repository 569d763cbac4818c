"""What a chat template reads of its messages' texts, found in its source: whether another text could change what it writes.

Tails are rendered from a short conversation (see `rendering`), which is right only where the template would write the same
for the real one. Most templates copy texts and look at nothing but roles. Some look for words:

    {%- if "/no_think" in messages[0].content %}            words: a conversation without them is as good as a short one
    {%- if messages | length > 20 %}                        a number that no short conversation reaches
    {%- if trigger in message.content %}                    a word that only the client knows

So a template has *words*, and a conversation that holds none of them may be rendered short. A template that decides by anything
else that a short conversation cannot have is *opaque*: then nothing is short. What decides is followed through variables,
namespaces and macros by their names, wherever they stand; too much of it costs time, and never a wrong tail.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from jinja2 import Environment, TemplateSyntaxError, nodes

from middleware_hub.chat.keys import KeyedMessage
from middleware_hub.chat.messages import Message

_TEXTS = frozenset({"content", "text", "reasoning_content"})
_FINDS = frozenset({"startswith", "endswith", "find", "rfind", "index", "rindex", "count"})
_CUTS = frozenset({"split", "rsplit", "partition", "rpartition", "replace", "removeprefix", "removesuffix"})
_FOLDS = frozenset({"lower", "upper", "casefold", "title", "capitalize", "swapcase"})
_NUMBERS = frozenset({"int", "float", "wordcount", "sum", "hash"})
_COMPARISONS = frozenset(
    {"in", "eq", "equalto", "==", "ne", "!=", "sameas", "lt", "gt", "le", "ge", "<", ">", "<=", ">="}
)
_SMALL = frozenset({-1, 0, 1, 2})
"""Numbers that the trials of `rendering` go beyond."""
_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""A tag of transformers' own, which marks what is the assistant's, and decides nothing."""


class Reads(NamedTuple):
    """What is known of a template.

    Attributes:
        words: what it looks for in texts.
        folded: it does so whatever the case is; then the words are in lower case.
        opaque: it decides by something else.
    """

    words: tuple[str, ...] = ()
    folded: bool = False
    opaque: bool = False

    def concern(self, messages: Iterable[Message]) -> bool:
        """Whether it could write something else for these messages than for any others in these roles."""
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


def reads_of(template: str) -> Reads:
    """What a template reads. One that cannot be read here is opaque."""
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))
        return _Reader(tree).read()
    except (TemplateSyntaxError, RecursionError):
        return Reads(opaque=True)


N = TypeVar("N", bound=nodes.Node)
_Assigned = tuple[list[str], nodes.Node]


class _Reader:
    """Goes through a template's tree."""

    def __init__(self, tree: nodes.Template) -> None:
        self._nodes = list(tree.find_all(nodes.Node))
        self._assigned = list(self._assignments())
        self._constants: dict[str, set[str] | None] = {}
        """Of each variable the texts that it may hold; None if there may be others."""
        self._texts: set[str] = set()
        """Variables, and fields of namespaces, that may hold a message's text."""
        self._counts: set[str] = {"loop", "messages"}
        """Those that may say how many messages there are."""
        self._words: set[str] = set()
        self._opaque = self._folded = False

    def _each(self, kind: type[N]) -> list[N]:
        return [node for node in self._nodes if isinstance(node, kind)]

    def read(self) -> Reads:
        """What was found."""
        self._follow()
        for compared in self._each(nodes.Compare):
            left = compared.expr
            for operand in compared.ops:
                self._compared(operand.op, left, operand.expr)
                left = operand.expr
        for call in self._each(nodes.Call):
            self._called(call)
        for test in self._each(nodes.Test):
            if test.name in _COMPARISONS and test.args:
                self._compared("in" if test.name == "in" else "eq", test.node, test.args[0])
        for one in self._each(nodes.Filter):
            self._filtered(one)
        for item in self._each(nodes.Getitem):
            self._opaque = self._opaque or (not isinstance(item.arg, nodes.Slice) and self._holds_text(item.arg))
        for mod in self._each(nodes.Mod):
            if not isinstance(mod.left, nodes.Const) and self._number(mod.right) != 2:
                self._opaque = True
        words = {word.casefold() for word in self._words} if self._folded else self._words
        # A word that holds another one is found with it.
        least = [word for word in words if not any(other in word for other in words if other != word)]
        return Reads(tuple(sorted(least)), self._folded, self._opaque)

    # What holds what ----------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Which variables hold texts, counts and constants: until nothing new is found."""
        known = -1
        while known != (known := len(self._texts) + len(self._counts)):
            for names, value in self._assigned:
                if self._holds_text(value):
                    self._texts.update(names)
                if self._counting(value):
                    self._counts.update(names)
        for names, value in self._assigned:
            found = self._spelled(value)
            for name in names:
                before = self._constants.get(name, set())
                self._constants[name] = None if found is None or before is None else before | found

    def _assignments(self) -> Iterator[_Assigned]:
        """Names, and what they stand for: of assignments, loops, namespaces, macros and their parameters."""
        lists = {
            name
            for node in self._each(nodes.Assign)
            if isinstance(node.node, nodes.List | nodes.Tuple)
            for name in _names(node.target)
        }
        for node in self._each(nodes.Assign):
            yield _names(node.target), node.node
        for block in self._each(nodes.AssignBlock):
            for output in block.find_all(nodes.Output):
                yield from ((_names(block.target), one) for one in output.nodes)
        for loop in self._each(nodes.For):
            # The items of a list of parts are no texts; what a text was cut into are.
            cut = isinstance(loop.iter, nodes.Call | nodes.Filter | nodes.List | nodes.Tuple | nodes.Const)
            if cut or (isinstance(loop.iter, nodes.Name) and loop.iter.name in lists):
                yield _names(loop.target), loop.iter
        macros = {macro.name: macro for macro in self._each(nodes.Macro)}
        for macro in macros.values():
            for output in macro.find_all(nodes.Output):
                yield from (([_result_of(macro.name)], one) for one in output.nodes)
        for call in self._each(nodes.Call):
            if isinstance(call.node, nodes.Name):
                yield from (([keyword.key], keyword.value) for keyword in call.kwargs)
                if call.node.name in macros:
                    yield from (
                        ([one.name], given) for one, given in zip(macros[call.node.name].args, call.args, strict=False)
                    )

    def _holds_text(self, node: nodes.Node | None) -> bool:
        """Whether a value may be a message's text, or a piece of one."""
        if node is None or isinstance(node, nodes.Const | nodes.TemplateData | nodes.Compare | nodes.Test | nodes.Not):
            return False
        if isinstance(node, nodes.Name):
            return node.name in self._texts
        field = _field(node)
        if field is not None:
            return field in _TEXTS or field in self._texts
        if isinstance(node, nodes.Call):
            return self._call_holds(node)
        if isinstance(node, nodes.Filter):
            named = (*node.args, *(pair.value for pair in node.kwargs))
            if any(isinstance(one, nodes.Const) and one.value in _TEXTS for one in named):
                return True
            if node.name in ("tojson", "string", "pprint", "join") and isinstance(node.node, nodes.Name):
                return True
        return any(self._holds_text(child) for child in node.iter_child_nodes())

    def _call_holds(self, node: nodes.Call) -> bool:
        if isinstance(node.node, nodes.Name) and _result_of(node.node.name) in self._texts:
            return True
        if isinstance(node.node, nodes.Getattr):
            if node.node.attr == "get" and node.args and isinstance(node.args[0], nodes.Const):
                return node.args[0].value in _TEXTS
            if node.node.attr in (*_FINDS, "isdigit"):
                return False
            return self._holds_text(node.node.node) or any(map(self._holds_text, node.args))
        return any(map(self._holds_text, node.args))

    def _counting(self, node: nodes.Node | None) -> bool:
        """Whether a value may say how many messages there are, or which one this is."""
        if isinstance(node, nodes.Add | nodes.Sub) and any(
            isinstance(one, nodes.Const) and isinstance(one.value, int) for one in (node.left, node.right)
        ):
            return True
        if isinstance(node, nodes.Name):
            return node.name in self._counts - {"messages"}
        if isinstance(node, nodes.Getattr):
            loop = isinstance(node.node, nodes.Name) and node.node.name == "loop"
            return node.attr in self._counts or (
                loop and node.attr.removesuffix("0") in ("index", "revindex", "length")
            )
        if isinstance(node, nodes.Filter):
            return node.name in ("length", "count") and not self._holds_text(node.node)
        return isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name) and node.node.name == "range"

    def _spelled(self, node: nodes.Node | None) -> set[str] | None:
        """The texts that a value may be, as far as they stand in the template; None if it may be another one."""
        if isinstance(node, nodes.Const):
            return {node.value} if isinstance(node.value, str) else set()
        if isinstance(node, nodes.Name):
            return self._constants.get(node.name)
        if isinstance(node, nodes.List | nodes.Tuple):
            return _joined(self._spelled(item) for item in node.items)
        if isinstance(node, nodes.CondExpr):
            return _joined(map(self._spelled, (node.expr1, node.expr2)))
        try:
            value = node.as_const() if isinstance(node, nodes.Expr) else None
        except nodes.Impossible:
            return None
        return {value} if isinstance(value, str) else None

    @staticmethod
    def _number(node: nodes.Node) -> int | None:
        """An integer, if that is what stands there."""
        try:
            value = node.as_const() if isinstance(node, nodes.Expr) else None
        except nodes.Impossible:
            return None
        return value if isinstance(value, int) else None

    # What decides -------------------------------------------------------------------------------------------------------

    def _compared(self, operator: str, one: nodes.Node, other: nodes.Node) -> None:
        for this, that in ((one, other), (other, one)):
            if self._counting(this) and not self._counting(that) and self._number(that) not in _SMALL:
                self._opaque = self._opaque or not self._of_tools(this)
        texts = [self._holds_text(one), self._holds_text(other)]
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
        """Whether a length is one of something that no message has a say in."""
        return isinstance(node, nodes.Filter) and not any(
            one.name in self._counts or one.name in ("message", "m") for one in node.find_all(nodes.Name)
        )

    def _look_for(self, node: nodes.Node, *, blank: bool = True) -> None:
        found = self._spelled(node)
        if found is None:
            self._opaque = True
        else:
            self._words.update(word for word in found if word and (blank or not word.isspace()))

    def _called(self, node: nodes.Call) -> None:
        if not isinstance(node.node, nodes.Getattr):
            return
        method = node.node.attr
        if not self._holds_text(node.node.node):
            # A table of words: `{"quick": ...}.get(message.content)`.
            self._opaque = self._opaque or (method == "get" and any(map(self._holds_text, node.args)))
            return
        if method == "replace" and self._joins(node.args):
            self._opaque = True
        if method in _FINDS or method in _CUTS:
            for argument in node.args:
                if self._number(argument) is None:
                    self._look_for(argument, blank=method in _FINDS)
        self._folded = self._folded or method in _FOLDS
        self._opaque = self._opaque or method.startswith("is")

    def _joins(self, arguments: Sequence[nodes.Expr]) -> bool:
        """Whether a replacement takes blanks away: then words may stand in a text that holds only pieces of them."""
        return any((word := self._spelled(one)) is not None and all(map(str.isspace, word)) for one in arguments[:1])

    def _filtered(self, node: nodes.Filter) -> None:
        arguments: Sequence[nodes.Expr] = node.args
        if node.name in ("selectattr", "rejectattr") and arguments:
            if isinstance(arguments[0], nodes.Const) and arguments[0].value in _TEXTS:
                for one in arguments[2:]:
                    self._look_for(one)
            return
        if not self._holds_text(node.node):
            return
        if node.name == "replace":
            self._opaque = self._opaque or self._joins(arguments)
            for one in arguments:
                self._look_for(one, blank=False)
        self._folded = self._folded or node.name in _FOLDS
        self._opaque = self._opaque or node.name in _NUMBERS


def _names(target: nodes.Node) -> list[str]:
    if isinstance(target, nodes.NSRef):
        return [target.attr]
    return [name.name for name in ([target] if isinstance(target, nodes.Name) else target.find_all(nodes.Name))]


def _result_of(macro: str) -> str:
    """The name under which a macro's result is remembered; no variable has one like it."""
    return f"{macro}()"


def _field(node: nodes.Node) -> str | None:
    """The name of what is taken out of something, if it has one in the template."""
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
