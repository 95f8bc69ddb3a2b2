"""Tool declarations that nobody wrote: nested objects and arrays, enums, unicode, `$ref`, optional keys, all bounded.

What an answer can say by them has an end, so that a model that draws at random gets there too.
"""

from collections.abc import Callable
from random import Random

NAMES = ("city", "days", "größe", "数量", "is_open", "a b", "naïve-key", "x", "options", "名前")
WORDS = ("red", "light blue", "grün", "東京", 'a"b', "back\\slash", "", "new\nline", "ß", "42")
MAX_DEPTH = 3


def declaration(seed: int) -> dict[str, object]:
    """A function tool as OpenAI's clients send it, strict."""
    random = Random(seed)
    parameters = _object(random, 0)
    if random.random() < 0.3:
        parameters["$defs"] = {"shared": _schema(random, MAX_DEPTH)}
        properties = parameters["properties"]
        assert isinstance(properties, dict)
        properties["shared"] = {"$ref": "#/$defs/shared"}
    name = random.choice(("get_weather", "lookup", "set-light", "run.it", "f")) + str(seed)
    described = {"description": random.choice(WORDS)} if random.random() < 0.5 else {}
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True, **described}}


def _schema(random: Random, depth: int) -> dict[str, object]:
    leaves: tuple[Callable[[Random], dict[str, object]], ...] = (_string, _integer, _number, _enum, _constant, _flag)
    if depth < MAX_DEPTH and random.random() < 0.4:
        return random.choice((_object, _array, _any_of))(random, depth)
    return random.choice(leaves)(random)


def _object(random: Random, depth: int) -> dict[str, object]:
    names = random.sample(NAMES, random.randint(1, 4 - depth))
    properties = {name: _schema(random, depth + 1) for name in names}
    required = [name for name in names if random.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(random: Random, depth: int) -> dict[str, object]:
    least = random.randint(0, 2)
    return {"type": "array", "items": _schema(random, depth + 1), "minItems": least, "maxItems": least + 1}


def _any_of(random: Random, depth: int) -> dict[str, object]:
    return {"anyOf": [_schema(random, depth + 1), {"type": "null"}]}


def _string(random: Random) -> dict[str, object]:
    if random.random() < 0.3:
        return {"type": "string", "pattern": random.choice(("^[a-z]{1,6}$", "^(ja|nein)$", "^[0-9]{4}-[0-9]{2}$"))}
    return {"type": "string", "maxLength": random.randint(0, 8)}


def _integer(random: Random) -> dict[str, object]:
    least = random.randint(-50, 50)
    return {"type": "integer", "minimum": least, "maximum": least + random.randint(0, 500)}


def _number(random: Random) -> dict[str, object]:
    return {"enum": [random.randint(-5, 5) / 4, 1e3, -0.5]}


def _enum(random: Random) -> dict[str, object]:
    return {"enum": random.sample(WORDS, random.randint(1, 4))}


def _constant(random: Random) -> dict[str, object]:
    return {"const": random.choice((True, None, 7, "一", ["a", 1], {"k": "v"}))}


def _flag(random: Random) -> dict[str, object]:
    return {"type": "boolean"} if random.random() < 0.7 else {"type": ["boolean", "null"]}
