"""Tools as TypeScript: what Kimi K2.5's own encoder writes, what it cannot write, and errors that name the tool.

`declared.json` holds what `tool_declaration_ts.py` of moonshotai/Kimi-K2.5 wrote for those tools, keys sorted.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.models.tokenizers.tokenizer import Tokenizer, load_tokenizer
from moonshard.serving.chat.declarations import (
    MAX_INLINED,
    MAX_INLINED_CHARS,
    ToolSchemaError,
    declare_tools,
    sorted_tools,
)
from moonshard.serving.chat.template import ChatTemplate

RECORDED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "declared.json").read_text("utf-8"))
FIXTURES = Path(__file__).parents[2] / "fixtures"
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


def tool(parameters: object, name: str = "look") -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda each: each["case"])
def test_tools_are_declared_as_the_models_own_encoder_does(recorded: dict[str, Any]):
    assert declare_tools(sorted_tools(recorded["tools"])) == recorded["declared"]


@given(value=values)
def test_sorting_changes_the_order_of_keys_alone(value: object):
    assert json.dumps(sorted_tools(value)) == json.dumps(value, sort_keys=True)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"oneOf": [{"type": "string"}, {"const": 3}]}, "string | 3"),
        ({"allOf": [{"$ref": "#/$defs/base"}, {"type": "object"}]}, "base & {}"),
        ({"const": "end"}, '"end"'),
        ({"description": "Whatever."}, "any"),
        ({"properties": {"y": {"type": "string"}}}, "{\n    y?: string\n  }"),
        ({"items": {"type": "integer"}}, "Array<number>"),
        ({"type": "string", "enum": ["a", 1]}, '"a" | 1'),
        ({"$ref": "#/properties/other"}, "boolean"),
        ({"$ref": "#/definitions/a~1b~0c"}, "null"),
    ],
)
def test_what_that_encoder_gives_up_at_has_an_obvious_type(schema: object, expected: str):
    beside = {"$defs": {"base": {"type": "object"}}, "definitions": {"a/b~c": {"type": "null"}}}
    properties = {"other": {"type": "boolean"}, "x": schema}
    text = declare_tools([tool({"properties": properties, "required": ["x"], **beside})])
    assert f"x: {expected},\n  other?: boolean\n" in text


def nested(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ("string", "parameters.x: is no object"),
        (None, "parameters.x: is no object"),
        ({"type": 3}, "parameters.x.type"),
        ({"type": ["string", "text"]}, "'text' is no type"),
        ({"type": "string", "description": ["a"]}, "parameters.x.description: is no string"),
        ({"anyOf": {"type": "string"}}, "parameters.x.anyOf: is no list"),
        ({"enum": "abc"}, "parameters.x.enum: is no list"),
        ({"type": "object", "properties": ["a"]}, "parameters.x.properties: is no object"),
        ({"type": "object", "required": "a"}, "parameters.x.required: is no list"),
        ({"type": "object", "additionalProperties": 1}, "parameters.x.additionalProperties: is no object"),
        ({"$ref": "#/$defs/none"}, "there is no '#/$defs/none'"),
        ({"$ref": "#/properties/none"}, "there is no '#/properties/none'"),
        ({"$ref": "https://example.org/a.json"}, "does not point into the tool's parameters"),
        ({"$ref": "#/properties/x"}, "nested deeper than 32"),
        ({"anyOf": [{"$ref": "#/properties/y"}] * (MAX_INLINED + 1)}, "references"),
        (nested(40), "nested deeper than 32"),
    ],
)
def test_what_cannot_be_declared_names_the_tool_and_the_place(schema: object, problem: str):
    parameters = {"type": "object", "properties": {"x": schema, "y": {"type": "string"}}}
    with pytest.raises(ToolSchemaError, match="'look'") as raised:
        declare_tools([tool({}, "fine"), tool(parameters)])
    assert problem in str(raised.value)


def referring(schema: object, count: int, name: str = "look") -> dict[str, object]:
    """A tool whose parameters refer to one of them so many times."""
    refers = {"anyOf": [{"$ref": "#/properties/y"}] * count}
    return tool({"type": "object", "properties": {"x": refers, "y": schema}}, name)


def test_what_references_write_is_bounded_over_all_tools_of_a_request():
    text, half = {"type": "string"}, MAX_INLINED // 2
    assert declare_tools([referring(text, half, "a"), referring(text, half, "b")]).count("| string") == 2 * half - 2
    with pytest.raises(ToolSchemaError, match=r"'b'.*references"):
        declare_tools([referring(text, half, "a"), referring(text, half + 1, "b")])
    long = {"enum": ["e" * (MAX_INLINED_CHARS // 8)]}
    declare_tools([referring(long, 3, "a"), referring(long, 4, "b")])
    with pytest.raises(ToolSchemaError, match=r"'b'.*characters"):
        declare_tools([referring(long, 3, "a"), referring(long, 5, "b")])


def test_a_deep_value_is_refused_and_not_a_recursion_error():
    value: object = 1
    for _ in range(10_000):
        value = [value]
    with pytest.raises(ToolSchemaError, match="nested deeper"):
        sorted_tools([tool({"properties": {"x": {"default": value}}})])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = load_tokenizer(FIXTURES / "kimi_k2")
    assert tokenizer is not None
    return tokenizer


TOOLS = [{"type": "function", "function": {"parameters": {"type": "object"}, "name": "f", "description": "<think>"}}]
OF_TEMPLATE = {
    "kimi_k2": json.dumps(TOOLS),
    "kimi_k2_thinking": json.dumps(TOOLS),
    "kimi_k25": declare_tools(TOOLS),
    "kimi_k26": declare_tools(TOOLS),
}


@pytest.mark.parametrize("name", OF_TEMPLATE)
def test_a_template_that_asks_for_declarations_gets_them_and_their_text_holds_no_special_token(
    tokenizer: Tokenizer, name: str
):
    template = ChatTemplate((FIXTURES / "templates" / f"{name}.jinja").read_text(), {})
    ids = template.encode_chat(tokenizer, [{"role": "system", "content": ""}], template_kwargs={"tools": TOOLS})
    system, middle, end = (tokenizer.special_tokens[name] for name in ("<|im_system|>", "<|im_middle|>", "<|im_end|>"))
    head = [system, *tokenizer.encode("tool_declare"), middle, *tokenizer.encode(OF_TEMPLATE[name]), end]
    assert ids[: len(head)] == head


def test_the_order_of_a_tools_keys_makes_no_other_prompt(tokenizer: Tokenizer):
    template = ChatTemplate((FIXTURES / "templates" / "kimi_k25.jinja").read_text(), {})
    messages = [{"role": "user", "content": "hi"}]
    first = {"a": {"default": {"x": 1, "y": 2}}, "b": {"anyOf": [{"type": "null"}, {"type": "integer"}]}}
    second = dict(reversed(first.items())) | {"a": {"default": {"y": 2, "x": 1}}}
    prompts = [
        template.encode_chat(tokenizer, messages, template_kwargs={"tools": [tool(parameters)]})
        for parameters in ({"properties": first, "type": "object"}, {"type": "object", "properties": second})
    ]
    assert prompts[0] == prompts[1]
