"""Which values of a chat template may hold a message's text, a number of messages, or a known text.

Values are followed through variables, namespaces and macros by their names, wherever the names occur. That finds too much
rather than too little.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TypeVar

from jinja2 import Environment, nodes

TEXT_FIELDS = frozenset({"content", "text", "reasoning_content"})
FINDS = frozenset({"startswith", "endswith", "find", "rfind", "index", "rindex", "count"})

_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""A tag that transformers adds: it marks the assistant's text, and affects no decision."""

N = TypeVar("N", bound=nodes.Node)
_Assigned = tuple[list[str], nodes.Node]


def parsed(template: str) -> nodes.Template:
    """Return the tree of a template. Raises TemplateSyntaxError, and RecursionError if it is nested too deeply."""
    return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))


class Dataflow:
    """Follows values through a template's tree."""

    def __init__(self, tree: nodes.Template) -> None:
        self._nodes = list(tree.find_all(nodes.Node))
        self._assigned = list(self._assignments())
        # The texts that each variable may hold; None if there may be others.
        self._constants: dict[str, set[str] | None] = {}
        # Variables, and fields of namespaces, that may hold a message's text.
        self._texts: set[str] = set()
        # Those that may hold the number of messages.
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
            return field in TEXT_FIELDS or field in self._texts
        if isinstance(node, nodes.Call):
            return self._call_holds(node)
        if isinstance(node, nodes.Filter):
            named = (*node.args, *(pair.value for pair in node.kwargs))
            if any(isinstance(one, nodes.Const) and one.value in TEXT_FIELDS for one in named):
                return True
            if node.name in ("tojson", "string", "pprint", "join") and isinstance(node.node, nodes.Name):
                return True
        return any(self.holds_text(child) for child in node.iter_child_nodes())

    def _call_holds(self, node: nodes.Call) -> bool:
        if isinstance(node.node, nodes.Name) and _result_of(node.node.name) in self._texts:
            return True
        if isinstance(node.node, nodes.Getattr):
            if node.node.attr == "get" and node.args and isinstance(node.args[0], nodes.Const):
                return node.args[0].value in TEXT_FIELDS
            if node.node.attr in (*FINDS, "isdigit"):
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
        """Return an integer literal, or None."""
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
