"""Tools as TypeScript declarations, for templates that ask for them (`tools_ts_str`), and tools with sorted keys.

Kimi K2.5 was trained on tools in this form: the tokenizer of its folder (moonshotai/Kimi-K2.5, `tokenization_kimi.py`
and `tool_declaration_ts.py`) sorts the keys of every object of the tools, writes them as below, and gives its template
both.

    # Tools

    ## functions
    namespace functions {
    // Weather of a city.
    type get_weather = (_: {
      city: string,
      unit?: "C" | "F"
    }) => any;
    }

Whatever those functions can write is written here byte for byte, Python's spelling of `True` and `None` and their
order of properties included. Where they give up, and the model would be shown JSON instead, forms that have an obvious
type get it: `oneOf` is a union, `allOf` an intersection, `const` an enum of one value, a schema without a type is what
its other keys make it, else `any`; an enum's values are its own, whatever its type says; and a `$ref` to anything but
`$defs` is the type of what it points at. What is left is an error that names the tool.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

INDENT = "  "
MAX_TYPE_DEPTH = 32  # of types within each other, each of which indents its lines further
MAX_VALUE_DEPTH = 100  # of lists and objects: as much as a template may print
# Of what references of all tools point at, each of which is written where it is referred to: a schema of some hundred
# KB with 200 of them made 60 MB.
MAX_INLINED, MAX_INLINED_CHARS = 200, 1 << 18
_OF_TYPE = {  # in a list of types
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_CONSTRAINTS = {  # told in a comment, by the type that they belong to
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}

type Schema = Mapping[str, object]


class ToolSchemaError(ValueError):
    """A tool whose parameters cannot be declared: names the tool, and where in its schema."""


def sorted_tools(value: object, depth: int = 0) -> object:
    """The same with every object's keys in order. ToolSchemaError for what is nested too deeply."""
    if depth > MAX_VALUE_DEPTH:
        raise ToolSchemaError(f"a tool is nested deeper than {MAX_VALUE_DEPTH}")
    if isinstance(value, Mapping):
        return {key: sorted_tools(value[key], depth + 1) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [sorted_tools(item, depth + 1) for item in value]
    return value


def declare_tools(tools: object) -> str:
    """The declarations of these tools, in OpenAI's form and sorted; empty where none is a function."""
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ToolSchemaError("they are no list")
    functions, inlined = [_object(tool, f"[{index}]") for index, tool in enumerate(tools)], _Inlined()
    declared = [
        _declare_function(_object(tool["function"], "function"), inlined)
        for tool in functions
        if tool.get("type") == "function" and tool.get("function")
    ]
    if not declared:
        return ""
    return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(declared) + "\n}\n"


@final
@dataclass(slots=True)
class _Inlined:
    """How much was written of what references point at, of all functions so far."""

    num: int = 0
    num_chars: int = 0


def _declare_function(function: Schema, inlined: _Inlined) -> str:
    """One function's declaration, and before it the interfaces that its parameters refer to."""
    name = str(function.get("name", "function"))
    try:
        parameters = _object(function.get("parameters") or {}, "parameters")
        return _Function(name, parameters, inlined).declaration(function.get("description"))
    except ToolSchemaError as error:
        raise ToolSchemaError(f"the tool {name!r} cannot be declared to the model: {error}") from None


@dataclass(frozen=True, slots=True)
class _Property:
    name: str
    is_optional: bool
    text: str  # with its comment lines


@final
@dataclass(slots=True)
class _Function:
    """What is found while one function's parameters are written."""

    name: str
    parameters: Schema
    inlined: _Inlined
    definitions: dict[str, object] = field(default_factory=dict)  # of every `$defs` so far, in their order
    is_recursive: bool = False  # something refers to the parameters as a whole

    def declaration(self, description: object) -> str:
        properties, others = self._members(self.parameters, "", 0, "parameters")
        lines: list[str] = []
        if self.is_recursive:  # the whole has a name, in which properties keep their order
            lines.append(f"interface parameters {_braced([each.text for each in properties], '', empty='{}')}")
            taken = "parameters"
        else:
            taken = _object_text(properties, others, "")
        for name, definition in list(self.definitions.items()):
            where = f"$defs.{name}"
            body = self._type(definition, "", 0, where)
            lines += _comment(_described(definition, where), "")
            lines.append(f"interface {name} {body}")
        lines += _comment(_text(description, "description"), "")
        return "\n".join([*lines, f"type {self.name} = (_: {taken}) => any;"])

    def _type(self, schema: object, indent: str, depth: int, where: str) -> str:
        """The type of a schema, whose later lines begin with `indent`."""
        if depth > MAX_TYPE_DEPTH:
            raise ToolSchemaError(f"{where[:200]}: types are nested deeper than {MAX_TYPE_DEPTH}")
        if isinstance(schema, bool):
            return "any" if schema else "null"
        schema, depth = _object(schema, where), depth + 1
        if "$ref" in schema:
            return self._reference(schema["$ref"], indent, depth, where)
        if "anyOf" in schema:
            return self._joined(" | ", schema, "anyOf", indent, depth, where)
        if "enum" in schema:
            return " | ".join(map(_literal, _list(schema["enum"], f"{where}.enum")))
        if "type" in schema:
            return self._typed(schema, schema["type"], indent, depth, where)
        if "oneOf" in schema:
            return self._joined(" | ", schema, "oneOf", indent, depth, where)
        if "allOf" in schema:
            return self._joined(" & ", schema, "allOf", indent, depth, where)
        if "const" in schema:
            return _literal(schema["const"])
        return self._typed(schema, _implied(schema), indent, depth, where)

    def _typed(self, schema: Schema, kind: object, indent: str, depth: int, where: str) -> str:
        match kind:
            case "object":
                return _object_text(*self._members(schema, indent, depth, where), indent)
            case "array":
                return self._array(schema, indent, depth, where)
            case "integer":
                return "number"
            case str():
                return kind  # also what no standard knows
            case list():
                if unknown := [each for each in kind if not isinstance(each, str) or each not in _OF_TYPE]:
                    raise ToolSchemaError(f"{where}.type: {unknown[0]!r} is no type")
                return " | ".join(_OF_TYPE[each] for each in kind)
            case _:
                raise ToolSchemaError(f"{where}.type: is neither a string nor a list")

    def _joined(self, by: str, schema: Schema, key: str, indent: str, depth: int, where: str) -> str:
        members = _list(schema[key], f"{where}.{key}")
        return by.join(self._type(each, indent, depth, f"{where}.{key}[{i}]") for i, each in enumerate(members))

    def _array(self, schema: Schema, indent: str, depth: int, where: str) -> str:
        item, where = schema.get("items") or True, f"{where}.items"
        comments = _comments(item, indent + INDENT, where)
        if not comments:
            return f"Array<{self._type(item, indent, depth, where)}>"
        inner = indent + INDENT
        return "\n".join(["Array<", *comments, f"{inner}{self._type(item, inner, depth, where)}", f"{indent}>"])

    def _members(self, schema: Schema, indent: str, depth: int, where: str) -> tuple[list[_Property], str | None]:
        """An object's properties in their order, and the type of all others where that is said."""
        self.definitions.update(_object(schema.get("$defs") or {}, f"{where}.$defs"))
        others = self._others(schema.get("additionalProperties"), indent + INDENT, depth, where)
        required = _list(schema.get("required") or [], f"{where}.required")
        names = frozenset(name for name in required if isinstance(name, str))
        properties = _object(schema.get("properties") or {}, f"{where}.properties")
        return [
            self._property(name, each, name not in names, indent + INDENT, depth, f"{where}.{name}")
            for name, each in properties.items()
        ], others

    def _others(self, additional: object, indent: str, depth: int, where: str) -> str | None:
        match additional:
            case None:
                return None
            case False:
                return "never"
            case True:
                return "any"
            case _:
                return self._type(additional, indent, depth, f"{where}.additionalProperties")

    def _property(self, name: str, schema: object, is_optional: bool, indent: str, depth: int, where: str) -> _Property:
        comments = _comments(schema, indent, where)
        default = schema.get("default") if isinstance(schema, Mapping) else None
        if default is not None:
            spelt = repr(default) if isinstance(default, int | float) else json.dumps(default, ensure_ascii=False)
            comments.append(f"{indent}// Default: {spelt}")
        mark = "?" if is_optional else ""
        line = f"{indent}{name}{mark}: {self._type(schema, indent, depth, where)}"
        return _Property(name, is_optional, "\n".join([*comments, line]))

    def _reference(self, reference: object, indent: str, depth: int, where: str) -> str:
        if reference == "#":
            self.is_recursive = True
            return "parameters"
        if not isinstance(reference, str) or not reference.startswith("#/"):
            raise ToolSchemaError(f"{where}.$ref: {reference!r} does not point into the tool's parameters")
        name = reference.rpartition("/")[2]
        if not reference.startswith("#/$defs/"):
            return self._inlined(reference, indent, depth, where)
        if name not in self.definitions:
            raise ToolSchemaError(f"{where}.$ref: there is no {reference!r}")
        return name

    def _inlined(self, reference: str, indent: str, depth: int, where: str) -> str:
        """The type of what a JSON pointer (RFC 6901) points at."""
        self.inlined.num += 1
        if self.inlined.num > MAX_INLINED:
            raise ToolSchemaError(f"more than {MAX_INLINED} references to other schemas than $defs")
        found: object = self.parameters
        for step in reference.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or key not in found:
                raise ToolSchemaError(f"{where}.$ref: there is no {reference!r}")
            found = found[key]
        text = self._type(found, indent, depth, where)
        self.inlined.num_chars += len(text)
        if self.inlined.num_chars > MAX_INLINED_CHARS:
            raise ToolSchemaError(
                f"references to other schemas than $defs make more than {MAX_INLINED_CHARS} characters"
            )
        return text


def _object_text(properties: Sequence[_Property], others: str | None, indent: str) -> str:
    """Required properties first, each kind by name."""
    ordered = sorted(properties, key=lambda each: (each.is_optional, each.name))
    members = [each.text for each in ordered]
    if others is not None:
        members.append(f"{indent}{INDENT}[k: string]: {others}")
    return _braced(members, indent, empty="{}")


def _braced(members: Sequence[str], indent: str, *, empty: str) -> str:
    return "{\n" + ",\n".join(members) + f"\n{indent}}}" if members else empty


def _comments(schema: object, indent: str, where: str) -> list[str]:
    """What is said of a type before it: its description, then its bounds."""
    if not isinstance(schema, Mapping):
        return []
    lines = _comment(_described(schema, where), indent)
    bounds = [f"{key}: {schema[key]}" for key in _bounds(schema) if key in schema]
    return [*lines, f"{indent}// {', '.join(bounds)}"] if bounds else lines


def _bounds(schema: Schema) -> Sequence[str]:
    """The keys that bound a value of this type; none where the type is not what describes it."""
    if {"$ref", "anyOf", "enum"} & schema.keys():
        return ()
    kind = schema.get("type")
    return _CONSTRAINTS.get(kind, ()) if isinstance(kind, str) else ()


def _implied(schema: Schema) -> str:
    """The type of a schema that names none."""
    if "properties" in schema:
        return "object"
    return "array" if "items" in schema else "any"


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _comment(text: str, indent: str) -> list[str]:
    """Its lines as comments; an empty one stays empty."""
    return [f"{indent}// {line}" if line else "" for line in text.split("\n")] if text else []


def _described(schema: object, where: str) -> str:
    return _text(schema.get("description"), f"{where}.description") if isinstance(schema, Mapping) else ""


def _text(value: object, where: str) -> str:
    if value is not None and not isinstance(value, str):
        raise ToolSchemaError(f"{where}: is no string")
    return value or ""


def _object(value: object, where: str) -> Schema:
    if not isinstance(value, Mapping):
        raise ToolSchemaError(f"{where}: is no object")
    return value


def _list(value: object, where: str) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise ToolSchemaError(f"{where}: is no list")
    return value
