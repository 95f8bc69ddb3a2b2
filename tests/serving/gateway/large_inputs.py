"""What a client may send that is large: of each kind as much as a body may have, and as much as is served.

Each is a path and a body; of paths of gRPC methods it is a message.
"""

import asyncio
import json
from collections.abc import Mapping

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc.wire_fields import count_fields
from moonshard.serving.gateway.grpc_gate import MAX_FIELDS
from moonshard.serving.gateway.intake import MAX_OBJECTS, OBJECT_BYTES, VALUE_BYTES, num_objects_and_values
from tests.rpc.raw_grpc import field

type Inputs = Mapping[str, tuple[str, bytes]]

MB = 1_000_000
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GENERATE, TOKENIZE = "/moonshard.v1.Inference/Generate", "/moonshard.v1.Inference/Tokenize"
SPELL = "/moonshard.v1.Inference/Detokenize"
SENTENCE, SENTENCE_TOKENS = "The quick brown fox. ", 12
_KINDS = {
    path: pb.DESCRIPTOR.message_types_by_name[name]
    for path, name in ((GENERATE, "GenerateRequest"), (TOKENIZE, "TokenizeRequest"), (SPELL, "DetokenizeRequest"))
}
SAY = [{"role": "user", "content": "hi"}]
SAY_PB = [pb.ChatMessage(role="user", content="hi")]


def body_of(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def large_bodies() -> Inputs:
    """Of nearly `max_body_bytes`."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": ["x"] * (6 * MB)}}}
    return {
        "one word": (TEXT, body_of(prompt="a" * (31 * MB))),
        "prose": (TEXT, body_of(prompt=SENTENCE * (31 * MB // 21))),
        "prose to count": ("/tokenize", body_of(prompt=SENTENCE * (31 * MB // 21))),
        "escapes": (TEXT, b'{"prompt":"' + b"\\u6f22" * (5 * MB) + b'"}'),
        "a message": (CHAT, body_of(messages=[{"role": "user", "content": "word " * (6 * MB)}])),
        "messages": (CHAT, body_of(messages=SAY * (31 * MB // 40))),
        "ids": (TEXT, b'{"prompt":[' + b"1," * (15 * MB) + b"1]}"),
        "ids to spell": ("/detokenize", b'{"tokens":[' + b"1," * (15 * MB) + b"1]}"),
        "metadata": (CHAT, body_of(messages=SAY, metadata={str(n): "a" for n in range(2 * MB)})),
        "a tool's schema": (CHAT, body_of(messages=SAY, tools=[tool])),
        "nesting": (CHAT, body_of(messages=SAY)[:-1] + b',"metadata":' + b"[" * (15 * MB) + b"]" * (15 * MB) + b"}"),
        "stops": (TEXT, body_of(prompt="a", stop=["b"] * (6 * MB))),
        "biases": (TEXT, body_of(prompt="a", logit_bias={str(n): 1 for n in range(2 * MB)})),
        "no JSON": (TEXT, b"{" * (31 * MB)),
    }


def large_messages() -> Inputs:
    """The same over gRPC, nearly as large as a message may be; and one as large as a body may be."""
    schema = pb.Tool(name="f", parameters=json.dumps({"enum": ["x"] * (3 * MB)}))
    return {
        "gRPC: too large": (GENERATE, pb.GenerateRequest(text="a" * (31 * MB)).SerializeToString()),
        "gRPC: one word": (GENERATE, pb.GenerateRequest(text="a" * (16 * MB)).SerializeToString()),
        "gRPC: prose to count": (TOKENIZE, pb.TokenizeRequest(text=SENTENCE * (16 * MB // 21)).SerializeToString()),
        "gRPC: ids": (GENERATE, field(3, field(1, b"\x01" * (16 * MB)))),
        "gRPC: ids one by one": (GENERATE, field(3, b"\x08\x01" * (8 * MB))),
        "gRPC: empty messages": (GENERATE, field(4, b"\x0a\x00" * (8 * MB))),
        "gRPC: stops": (GENERATE, field(2, b"a") + field(6, b"\x1a\x01b" * (5 * MB))),
        "gRPC: what nobody knows": (GENERATE, field(2, b"a") + b"\x98\x06\x01" * (5 * MB)),
        "gRPC: a tool's schema": (GENERATE, _asked(chat=pb.ChatPrompt(messages=SAY_PB, tools=[schema]))),
        "gRPC: no message": (GENERATE, b"\xff" * (16 * MB)),
    }


def longest_bodies(context_tokens: int) -> Inputs:
    """What is served at that context, and nearly too much; of a small one some of it is more."""
    ids = [7] * (context_tokens - 10)
    prose = SENTENCE * ((context_tokens - 20) // SENTENCE_TOKENS)
    parts = [{"type": "text", "text": "a"}] * (MAX_OBJECTS - 10)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": ["x"] * 16_000}}}
    return {
        "longest: ids": (TEXT, body_of(prompt=ids, max_tokens=1)),
        "longest: prose": (TEXT, body_of(prompt=prose, max_tokens=1)),
        "longest: prose to count": ("/tokenize", body_of(prompt=prose)),
        "longest: ids to spell": ("/detokenize", body_of(tokens=2 * ids)),
        "longest: messages": (CHAT, body_of(messages=SAY * (MAX_OBJECTS - 10), max_tokens=1)),
        "longest: parts": (CHAT, body_of(messages=[{"role": "user", "content": parts}], max_tokens=1)),
        "longest: a tool's schema": (CHAT, body_of(messages=SAY, tools=[tool], max_tokens=1)),
        "longest: biases": (TEXT, body_of(prompt="a", logit_bias={str(n): 1 for n in range(16_000)})),
        "longest: metadata": (CHAT, body_of(messages=SAY, metadata={str(n): "a" for n in range(16_000)}, max_tokens=1)),
    }


def longest_messages(context_tokens: int) -> Inputs:
    """The same over gRPC."""
    ids = [7] * (context_tokens - 10)
    prose = SENTENCE * ((context_tokens - 20) // SENTENCE_TOKENS)
    many = MAX_FIELDS // 3 - 10
    tools = [pb.Tool(name=f"f{number}") for number in range(MAX_FIELDS // 2 - 10)]
    schema = pb.Tool(name="f", parameters=json.dumps({"enum": ["x"] * 16_000}))
    return {
        "gRPC, longest: ids": (GENERATE, _asked(tokens=pb.TokenIds(ids=ids))),
        "gRPC, longest: prose": (GENERATE, _asked(text=prose)),
        "gRPC, longest: prose to count": (TOKENIZE, pb.TokenizeRequest(text=prose).SerializeToString()),
        "gRPC, longest: ids to spell": (SPELL, pb.DetokenizeRequest(ids=2 * ids).SerializeToString()),
        "gRPC, longest: messages": (GENERATE, _asked(chat=pb.ChatPrompt(messages=SAY_PB * many))),
        "gRPC, longest: tools": (GENERATE, _asked(chat=pb.ChatPrompt(messages=SAY_PB, tools=tools))),
        "gRPC, longest: a tool's schema": (GENERATE, _asked(chat=pb.ChatPrompt(messages=SAY_PB, tools=[schema]))),
    }


def bytes_in_flight(path: str, body: bytes) -> int:
    """What it counts as, once it is let in."""
    if path in _KINDS:
        found = count_fields(body, _KINDS[path], MAX_FIELDS)
        num_objects, num_values = found.num_fields, found.num_packed
    else:
        num_objects, num_values = asyncio.run(num_objects_and_values(body))
    return len(body) + OBJECT_BYTES * num_objects + VALUE_BYTES * num_values


def _asked(**prompt: object) -> bytes:
    return pb.GenerateRequest(**prompt, stop=pb.StopConditions(max_tokens=1)).SerializeToString()  # pyright: ignore[reportArgumentType]
