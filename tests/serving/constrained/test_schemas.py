"""Schemas that no answer could keep to are told from recursive ones that end, and features are found in schemas."""

from typing import Any

import pytest

from moonshard.serving.constrained.schemas import SchemaError, check_schema, place_of


def node(**more: object) -> dict[str, Any]:
    return {"type": "object", "properties": {"next": {"$ref": "#"}, "v": {"type": "string"}}} | more


def chain(num: int, last: object) -> dict[str, Any]:
    definitions: dict[str, object] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(num)}
    return {"$ref": "#/$defs/d0", "$defs": definitions | {f"d{num}": last}}


MUTUAL = {
    "a": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}]},
    "b": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}, "c": {"$ref": "#/$defs/c"}}, "required": ["a"]},
}
ENDING = [
    {},
    node(),
    node(required=["v"]),
    {"type": "array", "items": {"$ref": "#"}},
    {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"anyOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 1}, {"type": "null"}]},
    {"$ref": "#/$defs/a", "$defs": MUTUAL | {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}}},
    {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "string"}}},
    {"$ref": "#/$defs/nowhere"},
    {"enum": [1], "required": ["a"]},
    chain(50, {"type": "null"}),
    {"required": ["a"], "properties": {"a": {"$ref": "#"}}},
    {"type": "array", "prefixItems": [{"type": "null"}], "minItems": 1, "items": {"$ref": "#"}},
]
ENDLESS = [
    {"$ref": "#"},
    node(required=["next"]),
    node(required=["v", "next"]),
    {"type": "object", "required": ["a"], "properties": {"a": {"allOf": [{}, {"$ref": "#"}]}}},
    {"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 2},
    {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
    {"$ref": "#/$defs/a", "$defs": MUTUAL},
    {"oneOf": [{"$ref": "#"}, node(required=["next"])]},
    chain(50, {"$ref": "#/$defs/d7"}),
]


@pytest.mark.parametrize("schema", ENDING)
def test_what_may_end_is_taken(schema: dict[str, Any]):
    check_schema(schema)


@pytest.mark.parametrize("schema", ENDLESS)
def test_what_requires_itself_is_refused(schema: dict[str, Any]):
    with pytest.raises(SchemaError, match="no end"):
        check_schema(schema)


def test_depth_is_bounded():
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(49):
        deep = {"type": "object", "properties": {"a": deep}}
    check_schema(deep)
    with pytest.raises(SchemaError, match="deeper than 100"):
        check_schema({"anyOf": [deep, {"anyOf": [deep]}]})
    with pytest.raises(SchemaError, match="too deeply"):
        check_schema(chain(5_000, {"type": "null"}))


def test_a_feature_is_found_where_it_stands_and_not_where_a_property_has_its_name():
    schema = {
        "properties": {"not": {"type": "string"}, "oneOf": {"format": "uuid"}, "x~/y": {"items": {"not": {}}}},
        "$defs": {"a": {"type": "array", "items": {"format": "iri"}, "uniqueItems": True}},
        "additionalProperties": {"oneOf": [{"$ref": "#/$defs/b"}]},
    }
    places = {
        'Unimplemented keys: ["not"]': "#/properties/x~0~1y/items/not",
        'Unimplemented keys: ["uniqueItems", "not"]': "#/$defs/a/uniqueItems",
        "Unknown format: iri": "#/$defs/a/items/format",
        "Pointer '/$defs/b' does not exist": "#/additionalProperties/oneOf/0/$ref",
        "oneOf constraints are not supported. Enable": "#/additionalProperties/oneOf",
        'Unimplemented keys: ["contains"]': None,
        "something else": None,
    }
    assert {words: place_of(schema, words) for words in places} == places
    assert place_of({"oneOf": [], "items": {"oneOf": []}}, "oneOf constraints are not supported") is None


@pytest.mark.parametrize(
    "nest",
    [
        lambda inner: {"type": "object", "properties": {"a": inner}, "required": ["a", "a"]},
        lambda inner: {"type": ["object", "object"], "properties": {"a": inner}, "required": ["a"]},
    ],
    ids=["required", "types"],
)
def test_a_schema_that_asks_for_the_same_again_and_again_is_looked_at_once(nest):
    """At twice the work for each level these 45 would take years."""
    schema: dict[str, object] = {"type": "string"}
    for _ in range(45):
        schema = nest(schema)
    check_schema(schema)
    endless: dict[str, object] = {"$ref": "#"}
    for _ in range(18):
        endless = nest(endless)
    with pytest.raises(SchemaError, match="no end"):
        check_schema({"type": "object", "properties": {"b": endless}, "required": ["b"]})
