"""Whether calls are what was declared: the function is one of the tools, its arguments are JSON by that tool's schema.

As in the verifier, `format` is an annotation and a schema that cannot be applied makes its calls invalid. Unlike there,
a function declared without parameters may be called, as OpenAI's API has it. Schemas refer to nothing outside
themselves: nothing is fetched.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from moonshard.experiments.verification.strict_json import parse

NO_PARAMETERS = {"type": "object"}
ITSELF_ALONE: Registry = Registry()
# What schemas that are none raise, according to where they are wrong.
BAD_SCHEMA = (SchemaError, Unresolvable, re.error, RecursionError, TypeError, ValueError, AttributeError)


def are_valid(calls: object, tools: Sequence[Any]) -> bool:
    """Whether a response's `tool_calls` are valid, every one; a response that says it calls and does not is invalid."""
    return isinstance(calls, list) and bool(calls) and all(is_valid(call, tools) for call in calls)


def is_valid(call: Any, tools: Sequence[Any]) -> bool:
    try:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        schema = _declared(name, tools)
        # as the verifier, which takes arguments that a server has parsed already
        arguments = parse(arguments) if isinstance(arguments, str) else arguments
    except (LookupError, TypeError, ValueError):
        return False
    return follows(arguments, schema)


def follows(value: Any, schema: Any) -> bool:
    """Whether the value is valid by a JSON Schema, of draft 2020-12 unless it names another."""
    try:
        validator = validator_for(schema, default=Draft202012Validator)
        validator.check_schema(schema)
        return validator(schema, registry=ITSELF_ALONE).is_valid(value)
    except BAD_SCHEMA:
        return False


def _declared(name: str, tools: Sequence[Any]) -> Any:
    """The parameters' schema of the first function of this name. LookupError without one."""
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            return NO_PARAMETERS if parameters is None else parameters
    raise LookupError(name)
