"""Every parameter of the table, over every surface: from a client's words to its column on the device."""

import json
from dataclasses import dataclass, fields

import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.models.folder.generation import GenerationDefaults
from moonshard.models.sampling import RowSampling
from moonshard.rpc import inference_pb2 as pb
from moonshard.rpc import link_pb2
from moonshard.rpc.codec import encode_generate
from moonshard.rpc.status import InvalidArgument
from moonshard.rpc.types import GenerateOptions
from moonshard.serving.control.plan import DecodePlan, DecodeRow, PrefillChunk, PrefillPlan
from moonshard.serving.control.request import Request, SequenceId, SlotId
from moonshard.serving.control.sampling_parameters import PARAMETERS, Parameter, Sampling
from moonshard.serving.engine.draws import row_sampling
from moonshard.serving.engine.encoder import StepEncoder
from moonshard.serving.engine.steps import Step, StepKind, StepShapes
from moonshard.serving.gateway.grpc.front import generation_request
from moonshard.serving.gateway.openai.body import BodyDecoder
from moonshard.serving.gateway.openai.requests import ChatBody, CompletionBody, chat_request, completion_requests
from moonshard.serving.gateway.pipeline.generation import engine_sampling
from moonshard.serving.gateway.request import GenerationRequest, check_parameters
from moonshard.serving.wire.requests import Limits, request_from

VOCAB_SIZE = 100
MESSAGES = [{"role": "user", "content": "hello"}]
LIMITS = Limits(vocab_size=VOCAB_SIZE, block_size=16, max_context_tokens=64)
SHAPES = StepShapes(
    slots_per_partition=2,
    columns_per_sequence=4,
    max_context_tokens=64,
    q_tile=4,
    prefill_buckets=(4,),
    decode_buckets=(2,),
)
ASKED = {  # other than by default, and exact in float32
    "temperature": 0.75,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.25,
    "repetition_penalty": 1.5,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.125,
    "seed": 0xFEDCBA9876543210,
}
BOUNDS = {  # what a client is told, in these words
    "temperature": "at least 0 and at most 2",
    "top_p": "greater than 0 and at most 1",
    "top_k": "at least -1 and at most 2147483647",
    "min_p": "at least 0 and at most 1",
    "repetition_penalty": "greater than 0 and at most 1000000",
    "presence_penalty": "at least -2 and at most 2",
    "frequency_penalty": "at least -2 and at most 2",
    "seed": "at least -9223372036854775808 and at most 18446744073709551616",
}
each_parameter = pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)


@dataclass(frozen=True)
class Surface:
    """How a client spells a number, and how an error names it."""

    name: str
    prefix: str = ""

    def asks(self, **said: object) -> GenerationRequest:
        """InvalidArgument where it is out of bounds; other errors where it cannot be said at all."""
        asked = self._asks(said)
        check_parameters(asked, vocab_size=VOCAB_SIZE, has_tokenizer=False)
        return asked

    def _asks(self, said: dict[str, object]) -> GenerationRequest:
        match self.name:
            case "chat":
                body, _ = BodyDecoder(ChatBody).decode(json.dumps({"messages": MESSAGES, **said}).encode())
                return chat_request(body, request_id="r", received_ns=0)
            case "completion":
                body, _ = BodyDecoder(CompletionBody).decode(json.dumps({"prompt": [1], **said}).encode())
                return completion_requests(body, request_id="r", received_ns=0)[0]
            case _:
                options: GenerateOptions = said  # pyright: ignore[reportAssignmentType]  # any of its names
                sent = encode_generate([1], options).SerializeToString()
                return generation_request(pb.GenerateRequest.FromString(sent), received_ns=0)


HTTP = (Surface("chat"), Surface("completion"))
GRPC = Surface("grpc", "sampling.")
each_surface = pytest.mark.parametrize("surface", [*HTTP, GRPC], ids=lambda surface: surface.name)


def at_the_worker(sampling: link_pb2.EngineSampling) -> Request:
    run = link_pb2.Run(request_id=bytes(16), prompt_tokens=[1, 2, 3], max_tokens=9, n=1, sampling=sampling)
    return request_from(link_pb2.Run.FromString(run.SerializeToString()), LIMITS)


def steps_of(request: Request) -> list[Step]:
    """A prefill and a decode that draw for the request in the second of two rows, behind one that asks for nothing."""
    plain = Request(id=b"p" * 16, prompt=(1,), max_tokens=1)
    kinds = {"request": request, "sequence": SequenceId(request.id, 0), "slot": SlotId(0, 1), "block_table": (1,)}
    other = {"request": plain, "sequence": SequenceId(plain.id, 0), "slot": SlotId(0, 0), "block_table": (0,)}
    chunk = PrefillChunk(start=0, tokens=request.prompt, samples=((SequenceId(request.id, 0), SlotId(0, 1)),), **kinds)
    rows = tuple(DecodeRow(position=3, **of) for of in (other, kinds))
    encoder = StepEncoder(SHAPES)
    return [encoder.encode(PrefillPlan(number=0, chunks=(chunk,))), encoder.encode(DecodePlan(number=1, rows=rows))]


def on_the_device(step: Step) -> RowSampling:
    assert step.sampling is not None
    return row_sampling(SHAPES.layout(StepKind.DRAW).unpack(jnp.asarray(step.sampling[0])))


def value_of(column: np.ndarray, parameter: Parameter) -> float:
    """The value in one row."""
    if parameter.is_wide:
        high, low = column.tolist()
        return high << 32 | low
    return column.tolist()


@each_surface
@each_parameter
def test_what_a_client_asks_for_reaches_its_column_on_the_device(parameter: Parameter, surface: Surface):
    asked = surface.asks(**{parameter.name: ASKED[parameter.name]})
    request = at_the_worker(engine_sampling(asked, GenerationDefaults(), 1))
    assert getattr(request.sampling, parameter.name) == ASKED[parameter.name] != parameter.default
    prefill, decode = map(on_the_device, steps_of(request))
    assert value_of(np.asarray(getattr(prefill, parameter.name))[0], parameter) == ASKED[parameter.name]
    rows = np.asarray(getattr(decode, parameter.name))
    assert [value_of(row, parameter) for row in rows] == [parameter.default, ASKED[parameter.name]]


@each_parameter
def test_what_nobody_asks_for_is_the_tables_default_and_costs_nothing_in_an_empty_row(parameter: Parameter):
    unsaid = at_the_worker(engine_sampling(GRPC.asks(seed=0), GenerationDefaults(), 1))
    assert getattr(unsaid.sampling, parameter.name) == parameter.default == getattr(Sampling(), parameter.name)
    prefill, _ = steps_of(unsaid)  # of whose two rows the second is nobody's
    assert value_of(np.asarray(getattr(on_the_device(prefill), parameter.name))[1], parameter) == parameter.neutral


@each_surface
@each_parameter
def test_what_is_out_of_bounds_is_refused_in_the_words_of_the_surface(parameter: Parameter, surface: Surface):
    low, high = parameter.bounds.low, parameter.bounds.high
    outside = [low - 1 if low > -(2**53) else low * 2, high + 1 if high < 2**53 else high * 2]
    if surface is GRPC and parameter.is_integer:  # the message itself holds no more
        outside = [number for number in outside if parameter.name == "top_k" and number >= -(2**31)][:1]
    spelt = surface.prefix + parameter.name
    for number in map(int, outside):
        said = number if parameter.is_integer else float(number)
        with pytest.raises(InvalidArgument) as refused:
            surface.asks(**{parameter.name: number})
        assert str(refused.value) == f"{spelt}: must be {BOUNDS[parameter.name]}, not {said}"
        assert refused.value.field == spelt


@each_parameter
def test_a_worker_refuses_what_its_device_cannot_take(parameter: Parameter):
    message = engine_sampling(GRPC.asks(seed=0), GenerationDefaults(), 1)
    low, high = parameter.engine_bounds.low, parameter.engine_bounds.high
    wrong = [float("nan"), float("inf"), low - 1, *([high + 1] if high < 1e9 else [])]
    if parameter.is_integer:
        wrong = [] if parameter.is_wide else [-1]  # the message itself holds nothing else
    for value in [*wrong, *([low] if parameter.engine_bounds.open_low else [])]:
        setattr(message, parameter.name, value)
        with pytest.raises(InvalidArgument, match=f"^{parameter.name} of a Run message is out of range$"):
            at_the_worker(message)


@each_parameter
def test_a_client_may_ask_for_the_very_bounds(parameter: Parameter):
    low, high = parameter.bounds.low, parameter.bounds.high
    for value in [high, *([] if parameter.bounds.open_low else [low])]:
        asked = HTTP[0].asks(**{parameter.name: value})
        at_the_worker(engine_sampling(asked, GenerationDefaults(), 1))


def test_a_folders_default_is_what_a_client_does_not_ask_for():
    defaults = GenerationDefaults(temperature=3.0, top_k=-1, min_p=0.5)
    sampling = at_the_worker(engine_sampling(HTTP[0].asks(min_p=0.25), defaults, 1)).sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.top_p) == (3.0, 0, 0.25, 1.0)


def test_every_parameter_is_a_field_of_the_public_message_the_links_message_the_client_and_the_device():
    names = {parameter.name for parameter in PARAMETERS}
    assert names | {"logit_bias"} == set(pb.SamplingParams.DESCRIPTOR.fields_by_name)
    assert names | {"bias_ids", "bias_values"} == set(link_pb2.EngineSampling.DESCRIPTOR.fields_by_name)
    assert names <= GenerateOptions.__annotations__.keys()
    of_a_row = {"choice", "position", "has_bias", "bans_stops", "wants_logprobs", "is_masked"}
    assert names | of_a_row == {field.name for field in fields(RowSampling)}


@each_parameter
def test_history_is_needed_for_what_depends_on_past_tokens_alone(parameter: Parameter):
    sampling = Sampling(**{parameter.name: ASKED[parameter.name]})
    assert sampling.needs_history == parameter.name.endswith("_penalty")
