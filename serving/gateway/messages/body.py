"""The body of a request for a message: Anthropic's shapes.

What is known and not served is here too, to be refused by name; what is unknown is not (`openai.unknown`).
"""

import msgspec

from moonshard.serving.gateway.openai.body import ABSENT, BodyDecoder
from moonshard.serving.gateway.openai.sampling import Number, SamplingBody


class InnerBlock(msgspec.Struct, kw_only=True):
    """A block of a tool's result, or of the system's prompt."""

    type: str
    text: str | None = None
    source: msgspec.Raw = ABSENT
    cache_control: msgspec.Raw = ABSENT  # prefixes are cached unasked
    citations: msgspec.Raw = ABSENT


class TurnBlock(msgspec.Struct, kw_only=True):
    """A block of a turn."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None  # nothing is signed here
    id: str | None = None
    name: str | None = None
    input: dict[str, object] | None = None
    tool_use_id: str | None = None
    content: str | list[InnerBlock] | None = None
    is_error: bool | None = None  # the model reads what went wrong
    source: msgspec.Raw = ABSENT
    data: msgspec.Raw = ABSENT
    cache_control: msgspec.Raw = ABSENT
    citations: msgspec.Raw = ABSENT


class Turn(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[TurnBlock]


class SchemaTool(msgspec.Struct, kw_only=True):
    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, object] | None = None
    strict: bool | None = None
    cache_control: msgspec.Raw = ABSENT


class ToolChoice(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(msgspec.Struct, kw_only=True):
    type: str
    budget_tokens: Number | None = None  # a wish: there is no bound on a thought alone


class OutputFormat(msgspec.Struct, kw_only=True):
    type: str
    schema: dict[str, object] | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(msgspec.Struct, kw_only=True):
    user_id: str | None = None


class ContextEdit(msgspec.Struct, kw_only=True):
    type: str


class ContextManagement(msgspec.Struct, kw_only=True):
    edits: list[ContextEdit] | None = None


class CountBody(SamplingBody, kw_only=True):
    """What has tokens to be counted, and whatever else an answer to it would be asked with."""

    messages: list[Turn]
    model: str | None = None
    system: str | list[InnerBlock] | None = None
    tools: list[SchemaTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, object] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    priority: Number | None = None  # vLLM's
    metadata: Metadata | None = None
    cache_control: msgspec.Raw = ABSENT
    service_tier: str | None = None  # there is one
    # what is not served
    container: msgspec.Raw = ABSENT
    context_management: ContextManagement | None = None
    mcp_servers: msgspec.Raw = ABSENT


class MessagesBody(CountBody, kw_only=True):
    max_tokens: Number


DECODER = BodyDecoder(MessagesBody)
COUNT_DECODER = BodyDecoder(CountBody)
