"""Jinja's sandbox with a budget: a template renders within bounds of time and memory, and reaches nothing but its data.

Jinja's own sandbox keeps a template from Python's internals, and lets it loop and multiply without end. Here each
template is rewritten after parsing (`rewriting`), so that what Jinja would do by itself goes through this environment
and is charged to the render's budget; and of the methods of strings, lists and objects only those in a list exist.
Constants are not folded: that would be work without a budget.

The dialect (globals, tojson, generation blocks) follows transformers' `apply_chat_template`. Not supported are
`lipsum`, and printing or comparing a namespace.
"""

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from moonshard.serving.chat.sandbox.budget import RenderBudget
from moonshard.serving.chat.sandbox.costs import (
    METHODS,
    READING_FILTERS,
    as_list,
    charge_filter,
    charge_format_spec,
    charge_method,
    charge_operator,
    charge_strftime,
    charge_test,
)
from moonshard.serving.chat.sandbox.rewriting import ChargedTree

BUDGET = "the budget"  # among a render's variables; no template can spell it
DATA_TYPES = tuple(METHODS)


class BudgetContext(Context):
    """A render's variables, of which one is its budget."""

    @property
    def budget(self) -> RenderBudget:
        return self.parent[BUDGET]


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles templates with `compile_tree`; renders of them must be given a `BUDGET`."""

    context_class = BudgetContext
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlock, "jinja2.ext.loopcontrols"],
            optimized=False,
            finalize=_finalize,
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        del self.globals["lipsum"]

    def compile_tree(self, tree: nodes.Template) -> jinja2.Template:
        """Changes the tree. Raises jinja2.TemplateSyntaxError, and what Python's compiler raises."""
        return self.from_string(ChargedTree(self.filters, self.tests).visit(tree))

    # ---- what Jinja's sandbox asks

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, DATA_TYPES):
            return any(attr in names for kind, names in METHODS.items() if isinstance(obj, kind))
        return _is_jinjas(obj) and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Jinja lets a template print what it must not reach, as nothing."""
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe")

    def call(self, context: BudgetContext, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(obj, MethodType) and obj.__self__ is self:  # from the rewritten tree
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return obj(context, *args, **kwargs)
        budget = context.budget
        budget.step()
        if isinstance(obj, BuiltinMethodType):
            args = tuple(map(as_list, args))
            named = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
            charge_method(budget, obj.__self__, obj.__name__, args, named)
        return _admitted(budget, super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = context.budget
        budget.step()
        charge_operator(budget, operator, left, right)
        return _admitted(budget, super().call_binop(context, operator, left, right))

    def call_filter(
        self, name: str, value: Any, args: Any = None, kwargs: Any = None, context: Any = None, eval_ctx: Any = None
    ) -> Any:
        budget = context.budget
        budget.step()
        args = tuple(map(as_list, args or ()))
        if name in READING_FILTERS:
            value = as_list(value)
        charge_filter(budget, name, value, args, kwargs or {})
        return _admitted(budget, super().call_filter(name, value, args, kwargs, context, eval_ctx))

    def call_test(
        self, name: str, value: Any, args: Any = None, kwargs: Any = None, context: Any = None, eval_ctx: Any = None
    ) -> Any:
        budget = context.budget
        budget.step()
        args = tuple(map(as_list, args or ()))
        charge_test(budget, name, value, (*args, *(kwargs or {}).values()))
        return super().call_test(name, value, args, kwargs, context, eval_ctx)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` and `str.format_map`, whose fields may name attributes and widths."""
        if not isinstance(value, MethodType | BuiltinMethodType) or not isinstance(value.__self__, str):
            return None
        if value.__name__ not in ("format", "format_map"):
            return None
        pattern, takes_mapping = str(value.__self__), value.__name__ == "format_map"

        @pass_context
        def formatted(context: BudgetContext, /, *args: Any, **kwargs: Any) -> str:
            if takes_mapping:
                (fields,) = args
                args, kwargs = (), fields
            context.budget.spend(len(pattern))
            return _Formatter(self, context.budget).vformat(pattern, args, kwargs)

        return formatted

    # ---- what the rewritten tree asks

    def made(self, context: BudgetContext, value: object, /) -> object:
        return _admitted(context.budget, value)

    def read(self, context: BudgetContext, value: object, /) -> object:
        value = as_list(value)
        context.budget.read(value)
        return value

    def step(self, context: BudgetContext, /) -> bool:
        context.budget.step()
        return True

    def filtered(self, context: BudgetContext, name: str, value: object, /, *args: object, **kwargs: object) -> object:
        return self.call_filter(name, value, args, kwargs, context, context.eval_ctx)

    def tested(self, context: BudgetContext, name: str, value: object, /, *args: object, **kwargs: object) -> object:
        return self.call_test(name, value, args, kwargs, context, context.eval_ctx)


def _is_jinjas(obj: object) -> bool:
    """Whether it is an object of Jinja's own, such as a loop, macro or namespace, and neither a class nor a
    function.
    """
    return type(obj).__module__ in ("jinja2.runtime", "jinja2.utils")


def _admitted(budget: RenderBudget, value: Any) -> Any:
    if isinstance(value, Iterator):
        return _counted(budget, value)
    budget.admit(value)
    return value


def _counted(budget: RenderBudget, items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        budget.step()
        budget.admit(item)
        yield item


class _Formatter(SandboxedFormatter):
    def __init__(self, environment: TemplateSandbox, budget: RenderBudget):
        super().__init__(environment)
        self._budget = budget

    def format_field(self, value: Any, format_spec: str) -> str:
        self._budget.step()
        charge_format_spec(self._budget, value, format_spec)
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._budget.read(value)
        return super().convert_field(value, conversion)


class GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks the model's turns for training: here only its body."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@pass_context
def _finalize(context: BudgetContext, value: object) -> object:
    """Charges for everything that is printed, the template's own text included."""
    context.budget.read(value)
    return value


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter: no HTML escapes, keys in their order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_context
def _raise_exception(context: BudgetContext, message: object = "") -> NoReturn:
    context.budget.read(message)
    raise jinja2.TemplateError(str(message))


@pass_context
def _strftime_now(context: BudgetContext, format: str) -> str:
    charge_strftime(context.budget, format)
    return datetime.now().strftime(format)
