"""The tools that the demo declares, and what they do: small, and run in the demo's own process.

Declared as the embedded model's training declares them, under the first name of each; what they return is this table's
and this clock's.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import MappingProxyType

from moonshard.experiments.training.texts.conversation import Call, Tool
from moonshard.experiments.training.texts.tools.tool_library import PURPOSES, Declared, Purpose
from moonshard.experiments.training.texts.tools.tool_words import Value

WEATHER, TIME, MULTIPLY = "get_weather", "get_time", "multiply"
Result = dict[str, Value]


@dataclass(frozen=True, slots=True)
class City:
    degrees: int
    sky: str
    utc_offset_h: int  # without summer time


CITIES: Mapping[str, City] = MappingProxyType(
    {
        "Oslo": City(4, "rainy", 1),
        "Lima": City(19, "foggy", -5),
        "Rome": City(21, "sunny", 1),
        "Paris": City(14, "cloudy", 1),
        "Cairo": City(29, "sunny", 2),
        "Tokyo": City(17, "windy", 9),
        "Berlin": City(9, "rainy", 1),
        "Madrid": City(23, "sunny", 1),
        "Dublin": City(11, "rainy", 0),
        "Athens": City(25, "windy", 2),
        "Vienna": City(12, "cloudy", 1),
        "Prague": City(8, "foggy", 1),
        "Lisbon": City(20, "windy", 0),
        "Boston": City(6, "cloudy", -5),
        "Denver": City(-3, "snowy", -7),
        "Havana": City(28, "cloudy", -5),
        "Quito": City(13, "rainy", -5),
        "Seoul": City(10, "sunny", 9),
        "Sydney": City(24, "windy", 10),
        "Geneva": City(7, "foggy", 1),
        "Milan": City(15, "sunny", 1),
        "Naples": City(22, "cloudy", 1),
        "Zurich": City(5, "snowy", 1),
        "Bergen": City(3, "snowy", 1),
        "Nairobi": City(26, "rainy", 3),
        "Tunis": City(27, "sunny", 1),
        "Hanoi": City(30, "foggy", 7),
        "Manila": City(31, "rainy", 8),
        "Riga": City(2, "windy", 2),
    }
)


class ToolFailed(Exception):
    """Raised with what the model is told instead of a result."""


def weather(city: object) -> Result:
    found = _city(city)
    return {"degrees": found.degrees, "sky": found.sky}


def local_time(city: object) -> Result:
    now = datetime.now(UTC) + timedelta(hours=_city(city).utc_offset_h)
    return {"time": f"{now.hour}:{now.minute:02d}"}


def multiply(a: object, b: object) -> Result:
    if not isinstance(a, int) or not isinstance(b, int):
        raise ToolFailed("not a number")
    return {"product": a * b}


FUNCTIONS: Mapping[str, Callable[..., Result]] = MappingProxyType(
    {WEATHER: weather, TIME: local_time, MULTIPLY: multiply}
)


def purpose_of(name: str) -> Purpose:
    """The purpose whose first name this is."""
    return next(purpose for purpose in PURPOSES if purpose.names[0] == name)


def declared(name: str) -> Declared:
    purpose = purpose_of(name)
    return Declared(
        purpose=purpose, name=name, parameter_names=tuple(parameter.names[0] for parameter in purpose.parameters)
    )


def declarations() -> list[Tool]:
    """All tools, in the form of OpenAI's API."""
    return [declared(name).tool() for name in FUNCTIONS]


def run_tool(call: Call) -> str:
    """The result as JSON. Whatever is wrong with the call comes back as `error`, since a model wrote it."""
    try:
        if call.arguments.keys() != set(declared_parameters(call.name)):
            raise ToolFailed("wrong arguments")
        return json.dumps(FUNCTIONS[call.name](**call.arguments))
    except ToolFailed as failure:
        return json.dumps({"error": str(failure)})


def declared_parameters(name: str) -> tuple[str, ...]:
    """The parameters of a declared tool. ToolFailed for an unknown one."""
    if name not in FUNCTIONS:
        raise ToolFailed("unknown tool")
    return declared(name).parameter_names


def _city(name: object) -> City:
    found = CITIES.get(name) if isinstance(name, str) else None
    if found is None:
        raise ToolFailed("unknown city")
    return found
