"""What rendering a chat template may cost, counted in units and not in seconds, so that the same messages fare alike.

A unit is about ten nanoseconds, or one character copied. Everything a template can do is charged before it is done, so
that one render is bounded in time and in memory however its loops are nested. Values that a template makes are weighed
when they are made (`weigh`): a list doubled within itself forty times is a handful of objects, and 2^40 in print.
Units are rough: some operations take ten times as long as they are charged. So a render also ends when it has taken so
much processor time of its own (`clock`; `MAX_RENDER_S`) that no template has a use for, whatever it has left.
`environment` and `costs` charge here; what single operations cost is `costs`'.
"""

import time
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import NamedTuple, final

import jinja2
from jinja2.utils import Namespace

BASE_UNITS = 2_000_000  # about 20 ms
UNITS_PER_INPUT_CHAR = 128
INPUT_NODE_CHARS = 50  # a number, list or object of the input allows as much work as so many characters
MAX_UNITS = 512_000_000
STEP_UNITS = 256  # a loop's turn, a call, a filter, an operator
ITEM_UNITS = 32  # an element of a list or an object
UNITS_PER_PROMPT_CHAR = 16  # so many units allow one character of the prompt, which is tokenised afterwards
MAX_RENDER_S = 1.0
STEPS_PER_LOOK = 16  # at the clock
MAX_DEPTH = 100
MAX_INT_BITS = 1 << 14  # no JSON number has more

CONTAINERS = (list, tuple, dict, set, frozenset, KeysView, ValuesView, ItemsView)
OPAQUE = (Namespace, FunctionType, BuiltinFunctionType, MethodType, type, Iterator)  # not data, or of unknown size


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """A template that does more than its input allows. No ValueError: filters such as `int` swallow those."""


def allowed_units(num_chars: int, num_nodes: int) -> int:
    """The units for rendering an input of so many characters in so many strings, numbers, lists and objects."""
    return min(MAX_UNITS, BASE_UNITS + UNITS_PER_INPUT_CHAR * (num_chars + INPUT_NODE_CHARS * num_nodes))


class _Weighed(NamedTuple):
    value: object  # keeps the object alive, so that its id stays its own
    weight: int
    depth: int


@final
class RenderBudget:
    """What is left to one render."""

    def __init__(self, units: int, clock: Callable[[], float] = time.thread_time):
        self._left = units
        self._clock, self._ends_s = clock, clock() + MAX_RENDER_S
        self._looks_in = STEPS_PER_LOOK
        self._prompt_chars_left = units // UNITS_PER_PROMPT_CHAR
        self._weighed: dict[int, _Weighed] = {}

    def spend(self, units: int) -> None:
        """Raises TemplateLimitError when there are not so many left, and from then on for the least thing."""
        self._left -= units
        self._looks_in -= 1
        if self._looks_in <= 0:
            self._look_at_the_clock()
        if self._left < 0:
            self._left = -1
            raise TemplateLimitError("it does more work than messages of this size allow")

    def step(self) -> None:
        self.spend(STEP_UNITS)

    def _look_at_the_clock(self) -> None:
        self._looks_in = STEPS_PER_LOOK
        if self._clock() > self._ends_s:
            raise TemplateLimitError(f"it takes more than {MAX_RENDER_S:g} s")

    def read(self, value: object) -> None:
        """Charge for all of `value`, as printing, comparing or hashing goes through it."""
        self.spend(self.weigh(value))

    def extend_prompt(self, text: str) -> None:
        """Charge for a piece of the finished prompt."""
        self._prompt_chars_left -= len(text)
        if self._prompt_chars_left < 0:
            raise TemplateLimitError("it makes a longer prompt than messages of this size allow")

    def admit(self, value: object) -> None:
        """Charge for a value that was made, which from here on no operation can find too large to handle."""
        if isinstance(value, str | bytes):
            self.spend(len(value))
        elif isinstance(value, int):
            check_int(value)
        elif isinstance(value, CONTAINERS):
            self.weigh(value)

    def weigh(self, value: object) -> int:
        """Characters and elements, each counted as often as a print would show it."""
        return self._weigh(value, 0)[0]

    def _weigh(self, value: object, level: int) -> tuple[int, int]:
        """Weight and depth. A container is gone through (and paid for) once, since no template can change it."""
        if isinstance(value, str | bytes):
            return len(value) + 1, 0
        if not isinstance(value, CONTAINERS):
            if isinstance(value, OPAQUE):
                raise TemplateLimitError(f"a {type(value).__name__} can be neither printed, compared nor put in a list")
            return ITEM_UNITS, 0
        if known := self._weighed.get(id(value)):
            return known.weight, known.depth
        weight, depth = ITEM_UNITS, 0
        self.spend(ITEM_UNITS * (1 + len(value)))
        for child in _children(value):
            if level + depth >= MAX_DEPTH:
                raise TemplateLimitError(f"recursion: lists and objects are nested deeper than {MAX_DEPTH}")
            child_weight, child_depth = self._weigh(child, level + 1)
            weight, depth = weight + child_weight, max(depth, child_depth + 1)
        if weight > self._left or level + depth > MAX_DEPTH:
            self.spend(self._left + 1)
        self._weighed[id(value)] = _Weighed(value, weight, depth)
        return weight, depth


def _children(value: object) -> Sequence[object]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, CONTAINERS) else ()


def check_int(value: int) -> None:
    if value.bit_length() > MAX_INT_BITS:
        raise TemplateLimitError(f"a number has more than {MAX_INT_BITS} bits")
