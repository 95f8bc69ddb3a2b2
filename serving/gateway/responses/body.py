"""The body of a request for a response: OpenAI's shapes.

What is known and not served is here too, to be refused by name; what is unknown is not (`openai.unknown`).
"""

import msgspec

from moonshard.serving.gateway.openai.body import ABSENT, BodyDecoder
from moonshard.serving.gateway.openai.sampling import Number, SamplingBody


class Part(msgspec.Struct, kw_only=True):
    """A part of a message's content, of a call's output, or of a thought."""

    type: str
    text: str | None = None
    refusal: msgspec.Raw = ABSENT
    image_url: msgspec.Raw = ABSENT
    detail: msgspec.Raw = ABSENT
    file_id: msgspec.Raw = ABSENT
    file_data: msgspec.Raw = ABSENT
    file_url: msgspec.Raw = ABSENT
    filename: msgspec.Raw = ABSENT
    input_audio: msgspec.Raw = ABSENT
    annotations: msgspec.Raw = ABSENT  # of answers that are sent back, as is what follows
    logprobs: msgspec.Raw = ABSENT
    parsed: msgspec.Raw = ABSENT


class Item(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One of the input: a message, a call, its output, or a thought."""

    type: str | None = None  # of a message it may be left out
    id: str | None = None
    status: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    phase: str | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    parsed_arguments: msgspec.Raw = ABSENT  # the arguments once more, as OpenAI's client adds them
    output: str | list[Part] | None = None


class FlatTool(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class Reasoning(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None  # thoughts are told as they are, whatever summary is asked for
    generate_summary: str | None = None


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, object] | None = None
    strict: bool | None = None


class Text(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    include_obfuscation: bool | None = None


class ResponsesBody(SamplingBody, kw_only=True):
    input: str | list[Item] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Number | None = None
    priority: Number | None = None  # vLLM's
    tools: list[FlatTool] | None = None
    tool_choice: msgspec.Raw = ABSENT
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    chat_template_kwargs: dict[str, object] | None = None
    include: list[str] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, object] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    # what asks for nothing here, whatever it says
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_retention: str | None = None
    max_tool_calls: Number | None = None  # of tools that the server runs: there are none
    # what is not served
    background: msgspec.Raw = ABSENT
    conversation: msgspec.Raw = ABSENT
    context_management: msgspec.Raw = ABSENT
    moderation: msgspec.Raw = ABSENT
    prompt: msgspec.Raw = ABSENT
    top_logprobs: msgspec.Raw = ABSENT
    truncation: msgspec.Raw = ABSENT


DECODER = BodyDecoder(ResponsesBody)
