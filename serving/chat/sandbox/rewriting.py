"""A parsed template, rewritten so that nothing in it happens without the environment.

Jinja compiles turns of a loop, `~`, comparisons, slices, literals, filters and tests to plain Python. Each becomes a
call of the environment's method of that name (`TemplateSandbox.step`, `made`, `read`, `filtered`, `tested`), which
charges for it; text becomes an expression, which is charged where it is printed. Means the same as before.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.visitor import NodeTransformer


class ChargedTree(NodeTransformer):
    """Sends through the environment what Jinja would compile to plain Python."""

    def __init__(self, filters: Collection[str], tests: Collection[str]):
        """The names there are."""
        self._filters = filters
        self._tests = tests
        self._num_blocks = 0

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("step", [], node), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_call("step", [], node), node.test, lineno=node.lineno)
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # an expression, which is charged when printed

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return _call("made", [self.generic_visit(node)], node)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        visited = self.generic_visit(node)
        return _call("made", [visited], node) if node.ctx == "load" else visited

    def visit_Name(self, node: nodes.Name) -> nodes.Node:
        is_made = node.ctx == "load" and node.name in ("varargs", "kwargs")
        return _call("made", [node], node) if is_made else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_read(part) for part in node.nodes]
        return _call("made", [node], node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _read(node.expr)
        for operand in node.ops:
            operand.expr = _read(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _call("made", [node], node)
        node.arg = _read(node.arg)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self._check_name(node, self._filters, "filter")
        return self._applied("filtered", node)

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        self._check_name(node, self._tests, "test")
        return self._applied("tested", node)

    def visit_FilterBlock(self, node: nodes.FilterBlock) -> list[nodes.Node]:
        """Becomes an assignment whose value is then filtered, since Jinja calls a block's own filter without the
        environment.
        """
        name = self._block_name()
        assign = nodes.AssignBlock(nodes.Name(name, "store"), None, node.body, lineno=node.lineno)
        printed = nodes.Output([_with_innermost(node.filter, name)], lineno=node.lineno)
        return [self.generic_visit(assign), self.generic_visit(printed)]

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node | list[nodes.Node]:
        if node.filter is None:
            return self.generic_visit(node)
        name = self._block_name()
        block = nodes.AssignBlock(nodes.Name(name, "store"), None, node.body, lineno=node.lineno)
        assign = nodes.Assign(node.target, _with_innermost(node.filter, name), lineno=node.lineno)
        return [self.generic_visit(block), self.generic_visit(assign)]

    def _block_name(self) -> str:
        self._num_blocks += 1
        return f"_block_{self._num_blocks}"

    def _check_name(self, node: nodes.Filter | nodes.Test, known: Collection[str], what: str) -> None:
        if node.name not in known:
            raise jinja2.TemplateSyntaxError(f"no {what} named {node.name!r}", node.lineno)

    def _applied(self, method: str, node: nodes.Filter | nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        args = [nodes.Const(node.name), node.node, *node.args]
        return _call(method, args, node, node.kwargs, node.dyn_args, node.dyn_kwargs)


def _call(
    method: str, args: Sequence[Any], at: nodes.Node, kwargs: Any = (), dyn_args: Any = None, dyn_kwargs: Any = None
) -> nodes.Expr:
    target = nodes.EnvironmentAttribute(method, lineno=at.lineno)
    return nodes.Call(target, list(args), list(kwargs), dyn_args, dyn_kwargs, lineno=at.lineno)


def _read(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _call("read", [node], node)


def _with_innermost(node: nodes.Filter, name: str) -> nodes.Filter:
    """A chain of filters on the variable, where it stood on a block's text."""
    inner = node
    while isinstance(inner.node, nodes.Filter):
        inner = inner.node
    inner.node = nodes.Name(name, "load", lineno=node.lineno)
    return node
