"""Fields are counted off an encoded message as its parser would find them."""

import random

import pytest
from google.protobuf.message import DecodeError, Message

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc.wire_fields import count_fields
from moonshard.serving.gateway.grpc.front import JSON_NAMES

KIND = pb.DESCRIPTOR.message_types_by_name["GenerateRequest"]


def num_fields(message: Message) -> int:
    """By what the parsed message holds: each value is one field, but for packed numbers."""
    num = 0
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            num += 3 * len(value)  # an entry, its key and its value
        elif field.message_type is not None:
            inner = value if field.is_repeated else [value]
            num += len(inner) + sum(map(num_fields, inner))
        else:
            num += len(value) if field.is_repeated and not field.is_packed else 1
    return num


def any_message(draw: random.Random) -> pb.GenerateRequest:
    def calls():
        return [pb.ToolCall(id="c", name="f", arguments="{}")] * draw.randrange(4)

    def message():
        return pb.ChatMessage(role="user", content="hi" * draw.randrange(3), tool_calls=calls())

    chat = pb.ChatPrompt(messages=[message() for _ in range(draw.randrange(9))], tools=[pb.Tool(name="f")])
    bias = dict.fromkeys(range(1, draw.randrange(2, 20)), 1.5)
    return pb.GenerateRequest(
        model="m",
        chat=chat,
        sampling=pb.SamplingParams(temperature=0.5, logit_bias=bias),
        stop=pb.StopConditions(stop=["a"] * draw.randrange(5), stop_token_ids=range(draw.randrange(1, 9))),
    )


@pytest.mark.parametrize("seed", range(50))
def test_as_many_as_the_parsed_message_has(seed: int):
    message = any_message(random.Random(seed))
    found = count_fields(message.SerializeToString(), KIND, limit=10_000)
    assert found.num_fields == num_fields(message)
    assert found.num_packed == len(message.stop.stop_token_ids)


def test_counting_ends_once_there_are_too_many():
    message = pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage()] * 10_000))
    assert count_fields(message.SerializeToString(), KIND, limit=100).num_fields == 101


def test_empty_messages_are_each_a_field_and_packed_numbers_are_one():
    chat = pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage()] * 5_000))
    assert count_fields(chat.SerializeToString(), KIND, limit=10_000).num_fields == 5_001
    ids = [0, 127, 128, 2**14, 2**21, 2**28, 2**32 - 1] * 1_000
    found = count_fields(pb.GenerateRequest(tokens=pb.TokenIds(ids=ids)).SerializeToString(), KIND, limit=10)
    assert (found.num_fields, found.num_packed) == (2, len(ids))


def test_values_of_json_are_fields_where_it_is_said_to_be_json():
    parameters = '{"enum": [1, 2, {"a": []}], "b": null}'
    chat = pb.GenerateRequest(chat=pb.ChatPrompt(tools=[pb.Tool(name="f", parameters=parameters)]))
    data = chat.SerializeToString()
    assert count_fields(data, KIND, limit=100).num_fields == 4
    assert count_fields(data, KIND, limit=100, json_names=JSON_NAMES).num_fields == 4 + 7


def test_what_protobuf_parses_is_counted_but_for_groups():
    draw = random.Random(0)
    whole = bytearray(any_message(draw).SerializeToString())
    num_refused = num_parsed = 0
    for number in range(2_000):
        data = bytearray(whole)
        data[draw.randrange(len(data))] = draw.randrange(256)
        sent = bytes(data[: draw.randrange(len(data))] if number % 2 else data)
        if (refusal := refusal_of(sent)) is None:
            num_parsed += is_parsed(sent)
        else:
            num_refused += 1
            assert "wire type" in refusal or not is_parsed(sent)
    assert min(num_refused, num_parsed) > 200


def refusal_of(data: bytes) -> str | None:
    try:
        count_fields(data, KIND, 100_000)
    except DecodeError as error:
        return str(error)
    return None


def is_parsed(data: bytes) -> bool:
    try:
        pb.GenerateRequest.FromString(data)
    except DecodeError:
        return False
    return True
