"""The public API's values and their messages say the same."""

from dataclasses import fields, replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc.codec import collect, decode_delta, decode_summary, encode_generate, encode_tokenize
from moonshard.rpc.status import InternalError, InvalidArgument
from moonshard.rpc.types import Choice, Delta, GenerateOptions, Summary, Timing, ToolCall, Usage

TIMING = Timing(
    e2e_ms=10.0,
    ttft_ms=3.0,
    gateway_queue_ms=1.0,
    first_token_ms=2.0,
    decode_ms=6.5,
    finish_ms=0.5,
    worker_queue_ms=0.25,
    worker_prefill_ms=1.5,
    worker_decode_ms=6.0,
    wire_ms=0.25,
    handoff_gap_ms=2.5,
    transfer_ms=1.75,
    exposed_transfer_ms=0.75,
    land_ms=0.125,
    join_ms=0.375,
    num_retries=2,
    num_outputs=5,
)
USAGE = Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=0)
SUMMARY = Summary(request_id="r", model="m", seed=0, usage=USAGE, timing=TIMING)


def test_every_option_reaches_its_field():
    options = GenerateOptions(
        model="tiny",
        max_tokens=8,
        min_tokens=2,
        temperature=0.0,
        top_p=0.5,
        top_k=-1,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias={3: -100.0},
        seed=2**64 - 1,
        stop=["\n", "end"],
        stop_token_ids=[9],
        ignore_eos=True,
        n=2,
        logprobs=0,
        prompt_logprobs=0,
        request_id="mine",
        tools=[{"name": "f", "parameters": "{}", "strict": True}],
        template_kwargs={"thinking": False},
        reasoning_effort="none",
        forced_function="f",
        single_tool_call=True,
        require_tool_call=True,
        structured_outputs={"json_schema": {"type": "object"}},
        priority=-3,
    )
    assert set(options) == set(GenerateOptions.__annotations__)
    request = encode_generate([{"role": "user", "content": "x"}], options)
    stop = pb.StopConditions(max_tokens=8, min_tokens=2, stop=["\n", "end"], stop_token_ids=[9], ignore_eos=True)
    sampling = pb.SamplingParams(
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias={3: -100.0},
        seed=2**64 - 1,
    )
    chat = pb.ChatPrompt(
        messages=[pb.ChatMessage(role="user", content="x")],
        tools=[pb.Tool(name="f", parameters="{}", strict=True)],
        template_kwargs='{"thinking": false}',
        reasoning_effort="none",
    )
    whole = {"chat": chat, "model": "tiny", "n": 2, "logprobs": 0, "prompt_logprobs": 0, "request_id": "mine"}
    whole |= {"forced_function": "f", "single_tool_call": True, "require_tool_call": True, "priority": -3}
    whole |= {"structured_outputs": pb.StructuredOutputs(json_schema='{"type": "object"}')}
    assert request == pb.GenerateRequest(**whole, sampling=sampling, stop=stop)
    with pytest.raises(InvalidArgument, match="tools"):
        encode_generate("x", {"tools": [{"name": "f"}]})
    with pytest.raises(InvalidArgument, match="template_kwargs"):
        encode_generate([{"role": "user", "content": "x"}], {"template_kwargs": {"thinking": {1}}})


def test_structured_outputs_are_one_constraint():
    right: list[tuple[Any, Any]] = [
        ({"json_schema": "{}"}, {"json_schema": "{}"}),
        ({"json_object": True}, {"json_object": True}),
        ({"regex": "a"}, {"regex": "a"}),
        ({"choice": ["a", "b"]}, {"choice": pb.Texts(texts=["a", "b"])}),
        ({"grammar": "g"}, {"grammar": "g"}),
    ]
    for asked, field in right:
        request = encode_generate("x", {"structured_outputs": asked})
        assert request.structured_outputs == pb.StructuredOutputs(**field)
    wrong: list[Any] = [{}, {"regex": "a", "grammar": "g"}, {"colour": 1}, {"regex": 1}, "a"]
    for asked in wrong:
        with pytest.raises(InvalidArgument, match="structured_outputs"):
            encode_generate("x", {"structured_outputs": asked})


def test_thoughts_add_up_beside_the_text():
    deltas = [decode_delta(pb.Delta(reasoning="Hm", text="")), decode_delta(pb.Delta(reasoning=".", text="Yes"))]
    (choice,) = collect((), deltas, SUMMARY).choices
    assert (choice.reasoning, choice.text) == ("Hm.", "Yes")


def test_parts_of_calls_add_up_and_one_without_a_beginning_is_an_error():
    begun = pb.ToolCallPart(index=0, id="functions.f:0", name="f")
    parts = [pb.ToolCallPart(index=0, arguments=piece) for piece in ('{"a"', ": 1}")]
    deltas = [decode_delta(pb.Delta(tool_calls=[part])) for part in (begun, *parts)]
    (choice,) = collect((), deltas, SUMMARY).choices
    assert choice.tool_calls == (ToolCall(id="functions.f:0", name="f", arguments='{"a": 1}'),)
    with pytest.raises(InternalError):
        collect((), deltas[1:], SUMMARY)


def test_options_left_out_and_none_are_unset():
    request = encode_generate("x", {"temperature": None, "max_tokens": None, "logprobs": None})
    assert request == pb.GenerateRequest(text="x")


def test_zero_is_not_unset():
    request = encode_generate("x", {"temperature": 0, "seed": 0, "max_tokens": 0, "logprobs": 0})
    assert request.sampling.HasField("temperature")
    assert request.sampling.HasField("seed")
    assert request.stop.HasField("max_tokens")
    assert request.HasField("logprobs")


def test_one_stop_string_is_not_its_characters():
    assert list(encode_generate("x", {"stop": "end"}).stop.stop) == ["end"]


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("text", "text"),
        ("", "text"),
        ([1, 2], "tokens"),
        ((), "tokens"),
        (range(3), "tokens"),
        ([{"role": "user", "content": "hi"}], "chat"),
    ],
)
def test_the_prompts_type_picks_its_kind(prompt, kind):
    assert encode_generate(prompt, {}).WhichOneof("prompt") == kind


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**70}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias"),
        ({"stop": [1]}, "stop"),
    ],
)
def test_a_value_no_message_can_hold_is_refused_by_name(options, field):
    with pytest.raises(InvalidArgument, match=field) as caught:
        encode_generate("x", options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("prompt", "field"), [([-1], "tokens"), ([1, "a"], "tokens"), ([{"role": "user", "colour": "x"}], "chat")]
)
def test_a_prompt_no_message_can_hold_is_refused_by_name(prompt, field):
    with pytest.raises(InvalidArgument) as caught:
        encode_generate(prompt, {})
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["max_token", "text", "tokens", "sampling"])
def test_an_unknown_option_is_a_type_error(name):
    with pytest.raises(TypeError, match=name):
        encode_generate("x", cast(GenerateOptions, {name: 1}))


def test_tokens_cannot_be_tokenized():
    with pytest.raises(InvalidArgument) as caught:
        encode_tokenize([1, 2], "")
    assert caught.value.field == "tokens"


def test_stop_token_zero_is_a_stop_reason():
    assert decode_delta(pb.Delta(stop_token_id=0)).stop_reason == 0
    assert decode_delta(pb.Delta(stop_string="\n")).stop_reason == "\n"
    assert decode_delta(pb.Delta()).stop_reason is None


def test_a_finish_reason_of_a_newer_server_is_not_taken_for_none():
    newer = pb.Delta.FromString(pb.Delta(finish_reason=pb.FINISH_REASON_STOP).SerializeToString()[:-1] + b"\x09")
    with pytest.raises(InternalError, match="9"):
        decode_delta(newer)


@given(st.lists(st.tuples(st.integers(0, 3), st.text(max_size=3), st.integers(0, 99)), max_size=30))
def test_each_choice_is_its_own_deltas_in_order(steps):
    deltas = [Delta(choice=choice, text=text, token_ids=(token,)) for choice, text, token in steps]
    completion = collect((1,), deltas, SUMMARY)
    indices = sorted({choice for choice, _, _ in steps})
    assert [choice.text for choice in completion.choices] == [
        "".join(text for choice, text, _ in steps if choice == index) for index in indices
    ]
    assert [choice.token_ids for choice in completion.choices] == [
        tuple(token for choice, _, token in steps if choice == index) for index in indices
    ]


def test_finish_reason_is_the_last_deltas():
    deltas = [Delta(text="a"), Delta(finish_reason="stop", stop_reason="b")]
    expected = Choice(text="a", token_ids=(), logprobs=(), finish_reason="stop", stop_reason="b")
    assert collect((), deltas, SUMMARY).choices == (expected,)


def test_every_duration_of_a_summary_is_decoded():
    told = {field.name: getattr(TIMING, field.name) for field in fields(Timing)}
    assert set(told) == set(pb.Timing.DESCRIPTOR.fields_by_name)
    message = pb.Summary(request_id="r", model="m", usage=pb.Usage(prompt_tokens=1, completion_tokens=2))
    message.timing.MergeFrom(pb.Timing(**told))
    assert decode_summary(message) == SUMMARY


def test_usage_says_by_tier_what_was_cached_and_no_tier_is_not_a_tier_of_nothing():
    by_tier = {"host": 3, "ssd": 1}
    message = pb.Summary(usage=pb.Usage(prompt_tokens=9, completion_tokens=2, cached_tokens=5, cached_by_tier=by_tier))
    assert decode_summary(message).usage == Usage(
        prompt_tokens=9, completion_tokens=2, cached_tokens=5, cached_by_tier=by_tier
    )
    assert USAGE.cached_by_tier == {}
    assert hash(decode_summary(message).usage) == hash(replace(decode_summary(message).usage, cached_by_tier={}))


def test_phases_come_in_the_order_they_happen_and_sum_to_e2e():
    assert list(TIMING.phases()) == ["gateway_queue_ms", "first_token_ms", "decode_ms", "finish_ms"]
    assert sum(TIMING.phases().values()) == TIMING.e2e_ms
