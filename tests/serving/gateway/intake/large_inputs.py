"""What a client may send that is large: of each kind as much as a body may have, and as much as is served."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc.wire_fields import count_fields
from moonshard.serving.control.request import MAX_LOGIT_BIAS
from moonshard.serving.gateway.grpc.front import JSON_NAMES
from moonshard.serving.gateway.grpc.gate import MAX_FIELDS
from moonshard.serving.gateway.intake.bounds import MAX_OBJECTS
from moonshard.serving.gateway.intake.json_marks import Contents, contents_of
from tests.rpc.raw_grpc import field

MB = 1_000_000
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GENERATE, TOKENIZE = "/moonshard.v1.Inference/Generate", "/moonshard.v1.Inference/Tokenize"
DETOKENIZE = "/moonshard.v1.Inference/Detokenize"
SENTENCE, SENTENCE_TOKENS = "The quick brown fox. ", 12  # of the fixture's tokenizer, and a half
SAY = [{"role": "user", "content": "hi"}]
SAY_PB = [pb.ChatMessage(role="user", content="hi")]
_KINDS = {
    path: pb.DESCRIPTOR.message_types_by_name[name]
    for path, name in ((GENERATE, "GenerateRequest"), (TOKENIZE, "TokenizeRequest"), (DETOKENIZE, "DetokenizeRequest"))
}


@dataclass(frozen=True)
class Input:
    """A large input; the body is a message where the path is a gRPC method. `num_text_bytes` are tokenised at once."""

    path: str
    body: bytes
    num_text_bytes: int = 0

    def bytes_in_flight(self) -> int:
        """How many bytes it counts as once it is let in."""
        if self.path in _KINDS:
            found = count_fields(self.body, _KINDS[self.path], MAX_FIELDS, JSON_NAMES)
            contents = Contents(num_objects=found.num_fields, num_values=found.num_packed)
        else:
            contents = contents_of(self.body)
        return len(self.body) + contents.num_bytes


type Inputs = Mapping[str, Input]


def body_of(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def large_bodies() -> Inputs:
    """Of nearly `max_body_bytes`: more than is served at any context."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": ["x"] * (6 * MB)}}}
    prose = SENTENCE * (31 * MB // len(SENTENCE))
    nested = b',"metadata":' + b"[" * (15 * MB) + b"]" * (15 * MB) + b"}"
    return {
        "one word": Input(TEXT, body_of(prompt="a" * (31 * MB))),
        "prose": Input(TEXT, body_of(prompt=prose)),
        "prose to count": Input("/tokenize", body_of(prompt=prose)),
        "escapes": Input(TEXT, b'{"prompt":"' + b"\\u6f22" * (5 * MB) + b'"}'),
        "a message": Input(CHAT, body_of(messages=[{"role": "user", "content": "word " * (6 * MB)}])),
        "messages": Input(CHAT, body_of(messages=SAY * (31 * MB // 40))),
        "ids": Input(TEXT, b'{"prompt":[' + b"1," * (15 * MB) + b"1]}"),
        "ids to detokenize": Input("/detokenize", b'{"tokens":[' + b"1," * (15 * MB) + b"1]}"),
        "metadata": Input(CHAT, body_of(messages=SAY, metadata={str(n): "a" for n in range(2 * MB)})),
        "a tool's schema": Input(CHAT, body_of(messages=SAY, tools=[tool])),
        "nesting": Input(CHAT, body_of(messages=SAY)[:-1] + nested),
        "stops": Input(TEXT, body_of(prompt="a", stop=["b"] * (6 * MB))),
        "biases": Input(TEXT, body_of(prompt="a", logit_bias={str(n): 1 for n in range(2 * MB)})),
        "some biases": Input(TEXT, body_of(prompt="a", logit_bias={str(n): 1 for n in range(16_000)})),
        "no JSON": Input(TEXT, b"{" * (31 * MB)),
    }


def large_messages() -> Inputs:
    """The same over gRPC, nearly as large as a message may be; and one as large as a body may be."""
    schema = pb.Tool(name="f", parameters=json.dumps({"enum": ["x"] * (3 * MB)}))
    prose = SENTENCE * (16 * MB // len(SENTENCE))
    return {
        "gRPC: too large": Input(GENERATE, pb.GenerateRequest(text="a" * (31 * MB)).SerializeToString()),
        "gRPC: one word": Input(GENERATE, pb.GenerateRequest(text="a" * (16 * MB)).SerializeToString()),
        "gRPC: prose to count": Input(TOKENIZE, pb.TokenizeRequest(text=prose).SerializeToString()),
        "gRPC: ids": Input(GENERATE, field(3, field(1, b"\x01" * (16 * MB)))),
        "gRPC: ids one by one": Input(GENERATE, field(3, b"\x08\x01" * (8 * MB))),
        "gRPC: empty messages": Input(GENERATE, field(4, b"\x0a\x00" * (8 * MB))),
        "gRPC: stops": Input(GENERATE, field(2, b"a") + field(6, b"\x1a\x01b" * (5 * MB))),
        "gRPC: what nobody knows": Input(GENERATE, field(2, b"a") + b"\x98\x06\x01" * (5 * MB)),
        "gRPC: a tool's schema": Input(GENERATE, _asked(chat=pb.ChatPrompt(messages=SAY_PB, tools=[schema]))),
        "gRPC: no message": Input(GENERATE, b"\xff" * (16 * MB)),
    }


def longest_bodies(context_tokens: int) -> Inputs:
    """What is served at that context, or nearly so. At a small one the bodies bounded by `MAX_OBJECTS` are refused."""
    ids = [7] * (context_tokens - 10)
    prose = SENTENCE * ((context_tokens - 20) * 2 // (2 * SENTENCE_TOKENS + 1))
    parts = [{"type": "text", "text": "a"}] * (MAX_OBJECTS - 10)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": ["x"] * 16_000}}}
    biases = {str(n): 1 for n in range(MAX_LOGIT_BIAS)}
    metadata = {str(n): "a" for n in range(16_000)}
    return {
        "longest: ids": Input(TEXT, body_of(prompt=ids, max_tokens=1)),
        "longest: prose": Input(TEXT, body_of(prompt=prose, max_tokens=1), len(prose)),
        "longest: prose to count": Input("/tokenize", body_of(prompt=2 * prose), 2 * len(prose)),
        "longest: ids to detokenize": Input("/detokenize", body_of(tokens=2 * ids)),
        "longest: messages": Input(CHAT, body_of(messages=SAY * (MAX_OBJECTS - 10), max_tokens=1)),
        "longest: parts": Input(CHAT, body_of(messages=[{"role": "user", "content": parts}], max_tokens=1)),
        "longest: a tool's schema": Input(CHAT, body_of(messages=SAY, tools=[tool], max_tokens=1)),
        "longest: biases": Input(TEXT, body_of(prompt="a", logit_bias=biases, max_tokens=1)),
        "longest: metadata": Input(CHAT, body_of(messages=SAY, metadata=metadata, max_tokens=1)),
    }


def longest_messages(context_tokens: int) -> Inputs:
    """The longest messages over gRPC."""
    ids = [7] * (context_tokens - 10)
    prose = SENTENCE * ((context_tokens - 20) * 2 // (2 * SENTENCE_TOKENS + 1))
    counted = pb.TokenizeRequest(text=2 * prose).SerializeToString()
    many = MAX_FIELDS // 3 - 10
    tools = [pb.Tool(name=f"f{number}") for number in range(MAX_FIELDS // 2 - 10)]
    schema = pb.Tool(name="f", parameters=json.dumps({"enum": ["x"] * 16_000}))
    return {
        "gRPC, longest: ids": Input(GENERATE, _asked(tokens=pb.TokenIds(ids=ids))),
        "gRPC, longest: prose": Input(GENERATE, _asked(text=prose), len(prose)),
        "gRPC, longest: prose to count": Input(TOKENIZE, counted, 2 * len(prose)),
        "gRPC, longest: ids to detokenize": Input(DETOKENIZE, pb.DetokenizeRequest(ids=2 * ids).SerializeToString()),
        "gRPC, longest: messages": Input(GENERATE, _asked(chat=pb.ChatPrompt(messages=SAY_PB * many))),
        "gRPC, longest: tools": Input(GENERATE, _asked(chat=pb.ChatPrompt(messages=SAY_PB, tools=tools))),
        "gRPC, longest: a tool's schema": Input(GENERATE, _asked(chat=pb.ChatPrompt(messages=SAY_PB, tools=[schema]))),
    }


def _asked(**prompt: object) -> bytes:
    return pb.GenerateRequest(**prompt, stop=pb.StopConditions(max_tokens=1)).SerializeToString()  # pyright: ignore[reportArgumentType]
