"""Fields are counted off an encoded message as its parser would find them."""

import random

import pytest
from google.protobuf.message import DecodeError, Message

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc.wire_fields import SMALL_BYTES, has_more_fields

KIND = pb.DESCRIPTOR.message_types_by_name["GenerateRequest"]
LONG = "x" * SMALL_BYTES  # else nothing is counted


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
        model=LONG,
        chat=chat,
        sampling=pb.SamplingParams(temperature=0.5, logit_bias=bias),
        stop=pb.StopConditions(stop=["a"] * draw.randrange(5), stop_token_ids=range(draw.randrange(1, 9))),
    )


@pytest.mark.parametrize("seed", range(50))
def test_as_many_as_the_parsed_message_has(seed: int):
    message = any_message(random.Random(seed))
    num = num_fields(message)
    assert not has_more_fields(message.SerializeToString(), KIND, num)
    assert has_more_fields(message.SerializeToString(), KIND, num - 1)


def test_empty_messages_are_each_a_field_and_packed_numbers_are_one():
    chat = pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage()] * SMALL_BYTES))
    assert has_more_fields(chat.SerializeToString(), KIND, SMALL_BYTES)
    assert not has_more_fields(chat.SerializeToString(), KIND, SMALL_BYTES + 1)
    ids = pb.GenerateRequest(tokens=pb.TokenIds(ids=range(2 * SMALL_BYTES)))
    assert not has_more_fields(ids.SerializeToString(), KIND, 2)


def test_what_protobuf_parses_is_counted_but_for_groups():
    draw = random.Random(0)
    whole = bytearray(any_message(draw).SerializeToString())
    refused = 0
    for _ in range(2_000):
        data = bytearray(whole)
        for _ in range(draw.randrange(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        cut = bytes(data[: draw.randrange(SMALL_BYTES, len(data))])
        try:
            has_more_fields(cut, KIND, 100_000)
        except DecodeError as error:
            refused += 1
            if "wire type" not in str(error):
                with pytest.raises(DecodeError):
                    pb.GenerateRequest.FromString(cut)
    assert 0 < refused < 2_000
