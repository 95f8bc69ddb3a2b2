"""What single operations of a template cost, charged before they are done: those whose result outgrows their operands.

A width of 10^9, a replacement at every character, `10 ** 10 ** 10`: one call that Python would carry out for minutes
with its lock held. Methods of strings, lists and objects, filters, tests and operators, each by its name in Jinja.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import jinja2

from moonshard.serving.chat.sandbox.budget import ITEM_UNITS, MAX_INT_BITS, RenderBudget, TemplateLimitError

MAX_WIDTH = 10_000  # a format's width or precision
STRING_METHODS = """
    capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii isdecimal
    isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition
    removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip
    swapcase title upper zfill
"""
METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(STRING_METHODS.split()),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    float: frozenset({"is_integer"}),
    int: frozenset(),
    range: frozenset(),
}  # of values; what is not here does not exist for a template
SHALLOW_TESTS = frozenset(
    {"boolean", "callable", "defined", "escaped", "false", "filter", "float", "integer", "iterable", "mapping", "none"}
    | {"number", "sameas", "sequence", "string", "test", "true", "undefined"}
)
READING_FILTERS = {
    **dict.fromkeys(("center", "format", "indent", "join", "lower", "replace", "string", "trim", "truncate"), 1),
    **dict.fromkeys(("capitalize", "e", "escape", "filesizeformat", "float", "forceescape", "int", "upper"), 8),
    **dict.fromkeys(("tojson", "urlencode", "wordcount"), 8),
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "pprint", "sort", "striptags", "sum", "title"), 32),
    **dict.fromkeys(("unique", "urlize", "wordwrap", "xmlattr"), 32),
}  # how often a filter goes through its value
CONVERSION = re.compile(r"%(?:\([^()]*\))?[-+ #0]*(?P<width>\d*)(?:\.(?P<precision>\d*))?[hlL]?(?P<kind>.?)", re.DOTALL)
NUMBERS = re.compile(r"\d+")


def as_list(value: object) -> object:
    """What is left of an iterator, so that it can be weighed; anything else as it is."""
    return list(value) if isinstance(value, Iterator) else value


def charge_method(
    budget: RenderBudget, subject: object, name: str, args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    """Before `subject.name(*args)` of a string, list or object."""
    for argument in (*args, *kwargs.values()):
        budget.read(argument)
    if isinstance(subject, list | tuple):
        budget.read(subject)
    if not isinstance(subject, str):
        return
    longest = max((len(argument) for argument in args if isinstance(argument, str)), default=0)
    budget.spend(len(subject) * (1 + longest // 16))  # searching from the right compares character by character
    if name in ("center", "ljust", "rjust", "zfill"):
        budget.spend(_number(args, 0))
    elif name == "expandtabs":
        budget.spend(subject.count("\t") * _number((*args, *kwargs.values()), 8))
    elif name == "replace":
        charge_replace(budget, subject, args)
    elif name == "join" and args and isinstance(args[0], Sequence | Mapping):
        budget.spend(len(subject) * len(args[0]))


def charge_filter(
    budget: RenderBudget, name: str, value: object, args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    """Before `value | name(*args)`."""
    given = (*args, *kwargs.values())
    for argument in given:
        budget.read(argument)
    size = budget.weigh(value) if name in READING_FILTERS else 0
    budget.spend(READING_FILTERS.get(name, 0) * size)
    charge = FILTERS.get(name)
    if charge is not None:
        charge(budget, value, size, given)


def charge_test(budget: RenderBudget, name: str, value: object, args: Sequence[object]) -> None:
    """Before `value is name(*args)`."""
    if name in ("odd", "even", "divisibleby"):
        for number in (value, *args):
            if not isinstance(number, int | float):  # to Jinja these are `%`, which formats strings
                raise jinja2.TemplateRuntimeError(f"{name} is asked of {type(number).__name__}, which is no number")
    elif name not in SHALLOW_TESTS:
        for operand in (value, *args):
            budget.read(operand)


def charge_operator(budget: RenderBudget, operator: str, left: object, right: object) -> None:
    """Before `left operator right`."""
    if operator == "%" and isinstance(left, str | bytes):
        charge_percent(budget, left, right)
    elif operator == "+":
        budget.spend(_size(left) + _size(right))
    elif operator == "*":
        _charge_times(budget, left, right)
    elif operator == "**":
        _check_power(left, right)


def _charge_times(budget: RenderBudget, left: object, right: object) -> None:
    for operand, times in ((left, right), (right, left)):
        if isinstance(operand, str | bytes | list | tuple) and isinstance(times, int):
            budget.spend(_size(operand) * max(0, times))
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_INT_BITS:
        raise TemplateLimitError("a product is too large a number")


def _check_power(base: object, exponent: object) -> None:
    if not isinstance(base, int) or not isinstance(exponent, int):
        return
    if abs(base) > 1 and base.bit_length() * exponent > MAX_INT_BITS:
        raise TemplateLimitError("a power is too large a number")


def charge_percent(budget: RenderBudget, pattern: str | bytes, values: object) -> None:
    """Before `pattern % values`. Every conversion may print all of the values."""
    if isinstance(pattern, bytes):
        raise TemplateLimitError("bytes cannot be formatted")
    conversions = list(CONVERSION.finditer(pattern))
    budget.spend(ITEM_UNITS * len(conversions))
    for conversion in conversions:
        if conversion["kind"] not in "diouxXeEfFgGcrsa%" or not conversion["kind"]:
            raise TemplateLimitError(f"the format {conversion[0]!r:.100} is not supported")
        _check_width(conversion["width"])
        _check_width(conversion["precision"] or "")
        budget.spend(int(conversion["width"] or 0) + int(conversion["precision"] or 0))
    each = len(conversions) if isinstance(values, Mapping) else 1
    budget.spend(len(pattern) + 4 * each * budget.weigh(values))


def charge_format_spec(budget: RenderBudget, value: object, spec: str) -> None:
    """Before `format(value, spec)` of one field of `str.format`."""
    for number in NUMBERS.findall(spec):
        _check_width(number)
        budget.spend(int(number))
    budget.spend(len(spec) + 4 * budget.weigh(value))


def charge_strftime(budget: RenderBudget, pattern: object) -> None:
    """Charges for widths in the format, which the C library knows too."""
    text = str(pattern) if isinstance(pattern, str) else ""
    for number in NUMBERS.findall(text):
        _check_width(number)
    budget.spend(32 * len(text) + sum(map(int, NUMBERS.findall(text))))


def charge_replace(budget: RenderBudget, subject: str, given: Sequence[object]) -> None:
    """Charges for a replacement. `given` begins with what is replaced and what it is replaced by."""
    if len(given) >= 2 and isinstance(given[0], str) and isinstance(given[1], str):
        budget.spend(len(subject) + (subject.count(given[0]) + 1) * len(given[1]))


def _check_width(digits: str) -> None:
    if len(digits) > 5 or int(digits or 0) > MAX_WIDTH:
        raise TemplateLimitError(f"a width of {digits:.20} is more than {MAX_WIDTH}")


def _charge_ints(budget: RenderBudget, value: object, size: int, given: Sequence[object]) -> None:
    """Charges for numbers among the arguments as lengths."""
    budget.spend(ITEM_UNITS * sum(abs(number) for number in given if isinstance(number, int)))


def _charge_each(budget: RenderBudget, value: object, size: int, given: Sequence[object]) -> None:
    """Charges for every argument as if it stood before or after each element of the value, as a separator or an indent
    does.
    """
    budget.spend(size * sum(map(_width, given)))


def _charge_lines(budget: RenderBudget, value: object, size: int, given: Sequence[object]) -> None:
    lines = len(value.splitlines()) if isinstance(value, str) else size
    _charge_each(budget, value, lines + 1, [*given, 4])


def _charge_join(budget: RenderBudget, value: object, size: int, given: Sequence[object]) -> None:
    num_items = len(value) if isinstance(value, Sequence | Mapping) else size
    _charge_each(budget, value, num_items, given)


def _charge_replace(budget: RenderBudget, value: object, size: int, given: Sequence[object]) -> None:
    texts = [text if isinstance(text, str) else str(text) for text in given[:2]]
    charge_replace(budget, value if isinstance(value, str) else str(value), texts)
    _charge_trim(budget, value, size, given)


def _charge_trim(budget: RenderBudget, value: object, size: int, given: Sequence[object]) -> None:
    budget.spend(size * (max((len(text) for text in given if isinstance(text, str)), default=0) // 16))


def _charge_sum(budget: RenderBudget, value: object, size: int, given: Sequence[object]) -> None:
    """Charges for a sum of lists too, where each sum is a copy of the one before."""
    if not all(isinstance(argument, int | float | str) for argument in given):
        budget.spend(size * (len(value) if isinstance(value, list | tuple) else size))


def _charge_percent(budget: RenderBudget, value: object, size: int, given: Sequence[object]) -> None:
    charge_percent(budget, value if isinstance(value, str) else str(value), dict(enumerate(given)))


def _check_precision(budget: RenderBudget, value: object, size: int, given: Sequence[object]) -> None:
    if any(isinstance(number, int) and abs(number) > 300 for number in given):
        raise TemplateLimitError("round: a precision of more than 300 digits")


def _width(argument: object) -> int:
    if isinstance(argument, list | tuple):
        return sum(map(_width, argument))
    return len(argument) if isinstance(argument, str) else abs(argument) if isinstance(argument, int) else 0


FILTERS: Mapping[str, Callable[[RenderBudget, object, int, Sequence[object]], None]] = {
    "batch": _charge_ints,
    "center": _charge_ints,
    "format": _charge_percent,
    "indent": _charge_lines,
    "join": _charge_join,
    "replace": _charge_replace,
    "round": _check_precision,
    "slice": _charge_ints,
    "sum": _charge_sum,
    "tojson": _charge_each,
    "trim": _charge_trim,
    "urlize": _charge_each,
    "wordwrap": _charge_each,
    "xmlattr": _charge_each,
}


def _number(args: Sequence[object], default: int) -> int:
    """The first argument, where it is a number."""
    first = args[0] if args else default
    return max(0, first) if isinstance(first, int) else 0


def _size(value: object) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return ITEM_UNITS * len(value) if isinstance(value, list | tuple) else 0
