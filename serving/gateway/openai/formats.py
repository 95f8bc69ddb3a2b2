"""The form of an answer under the names that clients know: OpenAI's `response_format`, vLLM's `structured_outputs` and
the older `guided_*`, SGLang's `regex`, `ebnf` and `json_schema`, llama.cpp's `grammar` and `json_schema`.
"""

from collections.abc import Iterator, Mapping

import msgspec

from moonshard.rpc.status import InvalidArgument
from moonshard.serving.constrained.parts import Part
from moonshard.serving.gateway.forms import read_form
from moonshard.serving.gateway.openai.body import ABSENT, is_nothing
from moonshard.serving.gateway.openai.sampling import SamplingBody
from moonshard.serving.gateway.quoted import quoted

type Schema = dict[str, object]
type Asked = tuple[str, str, object]  # kind, name, value
_KIND_OF: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}
KINDS = ("json", "json_object", "regex", "choice", "grammar")
_UNSERVED: Mapping[str, tuple[object, ...]] = {
    "structural_tag": (),
    "whitespace_pattern": (),
    "disable_fallback": (True, False),  # there is nothing to fall back to
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
}


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """OpenAI's. What `strict: false` lets pass is kept to all the same."""

    name: str | None = None
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: Schema | None = None  # llama.cpp's, of a `json_object`


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's."""

    json: Schema | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: msgspec.Raw = ABSENT
    whitespace_pattern: msgspec.Raw = ABSENT
    disable_fallback: msgspec.Raw = ABSENT
    disable_any_whitespace: msgspec.Raw = ABSENT
    disable_additional_properties: msgspec.Raw = ABSENT


class FormBody(SamplingBody, kw_only=True):
    """What a body may say of the form."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: Schema | str | None = None
    grammar: str | None = None


def asked_form(body: FormBody) -> Part | None:
    """None where nothing is asked. InvalidArgument for several, and for what is not served."""
    return read_form([*_by_response_format(body.response_format), *_by_structured_outputs(body), *_by_name(body)])


def _by_response_format(asked: ResponseFormat | None) -> Iterator[Asked]:
    name = "response_format"
    match asked:
        case None | ResponseFormat(type="text"):
            return
        case ResponseFormat(type="json_object", schema=None):
            yield "json_object", name, True
        case ResponseFormat(type="json_object", schema=schema):
            yield "json", f"{name}.schema", schema
        case ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=dict() as schema)):
            yield "json", f"{name}.json_schema.schema", schema
        case ResponseFormat(type="json_schema"):
            field = f"{name}.json_schema.schema"
            raise InvalidArgument(f"{field} is missing", field=field)
        case _:
            raise InvalidArgument(
                f"{name}.type: must be 'text', 'json_object' or 'json_schema', not {quoted(asked.type)}",
                field=f"{name}.type",
            )


def _by_structured_outputs(body: FormBody) -> Iterator[Asked]:
    if (asked := body.structured_outputs) is None:
        return
    for name, accepted in _UNSERVED.items():
        if not is_nothing(getattr(asked, name), accepted):
            field = f"structured_outputs.{name}"
            raise InvalidArgument(f"{field} is not supported", field=field)
    kinds = [kind for kind in KINDS if getattr(asked, kind) not in (None, False)]
    if not kinds:
        raise InvalidArgument(f"structured_outputs: one of {', '.join(KINDS)} is expected", field="structured_outputs")
    yield from ((kind, f"structured_outputs.{kind}", getattr(asked, kind)) for kind in kinds)


def _by_name(body: FormBody) -> Iterator[Asked]:
    """An empty text or object there asks for nothing."""
    for name, kind in _KIND_OF.items():
        if (value := getattr(body, name)) not in (None, "", {}):
            yield kind, name, value
