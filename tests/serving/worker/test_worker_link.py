"""A worker over a real link on loopback: tokens, errors, cancels, lost gateways. The model is real and tiny."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from moonshard.rpc import link_pb2
from moonshard.rpc.link import PROTOCOL_VERSION
from moonshard.rpc.server.server import build_server
from moonshard.serving.config.keys import Config, DecodeConfig, GatewayConfig, KvConfig, ModelConfig, PrefillConfig
from moonshard.serving.control.sampling_parameters import Sampling
from moonshard.serving.engine.compiled.compilations import CompilationCounter
from moonshard.serving.engine.loading.model import LoadedModel, load_model
from moonshard.serving.worker import link_service
from moonshard.serving.worker.link_service import LinkServicer, LinkSession
from moonshard.serving.worker.spans import WorkerSpans
from moonshard.serving.worker.worker import Worker
from tests.agreement import FIXTURES, assert_drawn_from, reference
from tests.compiled import compiled_once
from tests.dialling import inspect, open_link, own_key
from tests.engine_room import at_first_launch, long_text
from tests.sizes import BLOCK_SIZE, CHUNK_TOKENS, MAX_CONTEXT_TOKENS, NUM_BLOCKS, NUM_SLOTS

pytestmark = pytest.mark.xdist_group("jax")


def config(**gateway) -> Config:
    return Config(
        model=ModelConfig(
            path=Path(FIXTURES / "kimi_k2"), name="tiny", dtype="float32", max_context_tokens=MAX_CONTEXT_TOKENS
        ),
        gateway=GatewayConfig(**gateway),
        prefill=PrefillConfig(chunk_tokens=CHUNK_TOKENS, max_slots=NUM_SLOTS),
        decode=DecodeConfig(max_slots=NUM_SLOTS),
        kv=KvConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS),
    )


@compiled_once
def model() -> LoadedModel:
    model = load_model(config(), "both", lambda message: None, prepares="none")
    at_first_launch(model.programs)
    return model


@contextlib.asynccontextmanager
async def serving(**gateway) -> AsyncIterator[tuple[Worker, str]]:
    """The worker, and the address where it listens."""
    worker = Worker(config(**gateway), "both", model(), CompilationCounter(), None, spans=WorkerSpans())
    worker.start()
    ready: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
    ready.set_result(worker)
    server = build_server(
        host="127.0.0.1",
        port=0,
        add_servicers=[LinkServicer(ready).add_to],
        service_names=["moonshard.v1.Worker"],
        key=own_key().proofs,
    )
    await server.start()
    yield worker, f"127.0.0.1:{server.port}"
    await server.stop(0)
    await worker.engine.wait_idle()
    await worker.close()
    worker.engine.failed.cancel()
    state = worker.inspect().partitions[0]
    assert (state.free_blocks, state.free_slots) == (NUM_BLOCKS, NUM_SLOTS)


def sampling(**fields: Any) -> link_pb2.EngineSampling:
    """Greedy sampling parameters, except for these."""
    return link_pb2.EngineSampling(**{"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, **fields})


def run_message(number: int, prompt: list[int], max_tokens: int = 20, **fields) -> link_pb2.GatewayMessage:
    run = link_pb2.Run(
        request_id=number.to_bytes(16, "big"),
        prompt_tokens=prompt,
        max_tokens=max_tokens,
        **{"n": 1, "sampling": sampling(), **fields},
    )
    return link_pb2.GatewayMessage(run=run)


TELL_PREFIXES = link_pb2.GatewayMessage(tell_prefixes=link_pb2.TellPrefixes())
# By itself gRPC takes more and more ahead of whoever does not read, and ends calls in another way meanwhile.
TAKES_LITTLE = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536))


class Gateway:
    """The other end of a link, scripted."""

    call: Any  # its messages are WorkerMessage

    def __init__(self, address: str, options: Sequence[tuple[str, int]] = ()):
        self._address = address
        self._channel = grpc.aio.insecure_channel(address, options=options)

    async def hello(self, version: int = PROTOCOL_VERSION) -> link_pb2.Welcome:
        self.call = await open_link(self._channel, self._address)
        await self.call.write(link_pb2.GatewayMessage(hello=link_pb2.Hello(protocol_version=version)))
        return (await self.call.read()).welcome

    async def run(self, number: int, prompt: list[int], max_tokens: int = 20) -> None:
        await self.call.write(run_message(number, prompt, max_tokens))

    async def cancel(self, number: int) -> None:
        cancel = link_pb2.Cancel(request_id=number.to_bytes(16, "big"))
        await self.call.write(link_pb2.GatewayMessage(cancel=cancel))

    async def first_tokens(self) -> None:
        """Waits until some token has been generated."""
        while not (await self.call.read()).step.outputs:
            pass

    async def read_to_the_end(self) -> None:
        while await self.call.read():
            pass

    async def outputs(self, num_ended: int) -> dict[int, list[int]]:
        """Tokens by request until that many sequences have finished; a failure ends a request with its code."""
        tokens: dict[int, list[int]] = {}
        while num_ended:
            message = await self.call.read()
            assert isinstance(message, link_pb2.WorkerMessage), "the worker ended the stream"
            if message.WhichOneof("message") == "failed":
                tokens[int.from_bytes(message.failed.request_id, "big")] = [-message.failed.code]
                num_ended -= 1
            for output in message.step.outputs:
                tokens.setdefault(int.from_bytes(output.request_id, "big"), []).extend(output.token_ids)
                num_ended -= output.finish_reason != 0
        return tokens


async def test_a_link_carries_several_requests_and_their_tokens():
    async with serving() as (_, address):
        gateway = Gateway(address)
        welcome = await gateway.hello()
        assert (welcome.vocab_size, welcome.num_blocks) == (2048, NUM_BLOCKS)
        assert welcome.max_context_tokens == MAX_CONTEXT_TOKENS
        prompts = {number: long_text(20 * number, seed=number) for number in (1, 2, 3)}
        for number, prompt in prompts.items():
            await gateway.run(number, prompt)
        tokens = await gateway.outputs(3)
        await gateway.call.done_writing()
        for number, prompt in prompts.items():
            assert len(tokens[number]) == 20
            assert_drawn_from(reference(), prompt, tokens[number], Sampling(temperature=0))


async def test_a_worker_knows_whether_any_gateway_ever_reached_it():
    async with serving() as (worker, address):
        assert not worker.was_reached
        gateway = Gateway(address)
        await gateway.hello()
        assert worker.was_reached
        await gateway.call.done_writing()
        await gateway.read_to_the_end()
        assert worker.was_reached


async def test_phases_come_with_the_first_and_the_last_token():
    async with serving() as (_, address):
        gateway = Gateway(address)
        await gateway.hello()
        await gateway.run(1, long_text(30), max_tokens=3)
        outputs: list[link_pb2.SequenceOutput] = []
        while len(outputs) < 3:
            outputs += (await gateway.call.read()).step.outputs
        assert [output.HasField("phases") for output in outputs] == [True, False, True]
        assert outputs[0].phases.prefill_ms > 0 == outputs[0].phases.decode_ms
        assert outputs[2].phases.decode_ms > 0
        await gateway.call.done_writing()


async def test_another_protocol_version_is_refused_by_name():
    async with serving() as (_, address):
        gateway = Gateway(address)
        with pytest.raises(grpc.aio.AioRpcError, match="protocol_version") as caught:
            await gateway.hello(version=99)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_gateway_that_refuses_again_and_again_is_logged_once_per_reason(caplog: pytest.LogCaptureFixture):
    async with serving() as (_, address):
        for reason in ("another dtype", "another dtype", "another checkpoint"):
            gateway = Gateway(address)
            await gateway.hello()
            await gateway.call.write(link_pb2.GatewayMessage(refused=link_pb2.Refused(message=reason)))
            await gateway.run(1, [1], max_tokens=1)
            await gateway.outputs(num_ended=1)  # so what came before the run has been read
            await gateway.call.done_writing()
    refusals = [record.getMessage() for record in caplog.records if "refuses" in record.getMessage()]
    assert refusals == [f"a gateway refuses this worker: another {what}" for what in ("dtype", "checkpoint")]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (run_message(1, [2048]), "prompt_tokens"),
        (run_message(1, []), "prompt"),
        (run_message(1, [1], max_tokens=0), "max_tokens"),
        (run_message(1, [1], max_tokens=MAX_CONTEXT_TOKENS), "max_tokens"),
        (run_message(1, [1], stop_token_ids=range(17)), "stop_token_ids"),
        (run_message(1, [1], logprobs=21), "logprobs"),
        (run_message(1, [1], n=0), "n"),
        (run_message(1, [1], n=2**32 - 1), "n"),
        (run_message(1, [1] * (MAX_CONTEXT_TOKENS + 1)), "prompt"),
        (run_message(1, [1], min_tokens=21), "min_tokens"),
        (run_message(1, [1], partition=1), "partition"),
        (run_message(1, [1], prefix_root=bytes(65)), "prefix_root"),
        (run_message(1, [1] * 2 * BLOCK_SIZE, block_names=bytes(32)), "block_names"),
        (run_message(1, [1] * 2 * BLOCK_SIZE, block_names=bytes(31)), "block_names"),
        (run_message(1, [1], resumed=[link_pb2.Resumed(choice=0)] * 2), "resumed"),
        (run_message(1, [1], resumed=[link_pb2.Resumed(choice=1)]), "resumed"),
        *(
            (run_message(1, [1], sampling=sampling(**{field: value})), field)
            for field, value in (
                ("temperature", math.nan),
                ("temperature", math.inf),
                ("top_p", math.nan),
                ("top_k", -1),
                ("min_p", math.nan),
                ("min_p", 1.5),
                ("repetition_penalty", math.inf),
                ("presence_penalty", math.nan),
                ("frequency_penalty", 3.0),
            )
        ),
        (run_message(1, [1], sampling=sampling(bias_ids=[7])), "bias_values"),
        (
            run_message(1, [1], sampling=sampling(bias_ids=[7], bias_values=[math.nan])),
            "bias_values",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_request_that_cannot_be_served_fails_alone_and_names_its_field(message, field):
    async with serving() as (_, address):
        gateway = Gateway(address)
        await gateway.hello()
        await gateway.call.write(message)
        while (answer := await gateway.call.read()).WhichOneof("message") != "failed":
            pass
        assert (answer.failed.code, answer.failed.field) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], field)
        await gateway.run(2, [1, 2, 3])
        assert len((await gateway.outputs(1))[2]) == 20
        await gateway.call.done_writing()


async def test_a_cancelled_request_frees_its_blocks_and_slot():
    async with serving() as (worker, address):
        gateway = Gateway(address)
        await gateway.hello()
        await gateway.run(1, long_text(100), max_tokens=400)
        await gateway.first_tokens()
        await gateway.cancel(1)
        async with asyncio.timeout(1):
            await worker.engine.wait_idle()
        assert (await asyncio.to_thread(inspect, address)).partitions[0].free_blocks == NUM_BLOCKS
        await gateway.call.done_writing()


async def test_a_gateway_hears_well_within_a_second_that_a_cancelled_request_is_gone():
    async with serving() as (_, address):
        gateway = Gateway(address)
        await gateway.hello()
        await gateway.run(1, long_text(100), max_tokens=400)
        await gateway.first_tokens()
        await gateway.cancel(1)
        async with asyncio.timeout(0.8):
            while (load := (await gateway.call.read()).load).free_blocks != [NUM_BLOCKS] or load.num_running:
                pass
        await gateway.call.done_writing()


async def test_a_gateway_that_vanishes_takes_its_requests_along_and_no_others():
    async with serving() as (worker, address):
        lost, kept = Gateway(address), Gateway(address)
        await lost.hello()
        await kept.hello()
        await lost.run(1, long_text(100), max_tokens=400)
        await kept.run(2, long_text(50), max_tokens=100)
        await lost.first_tokens()
        lost.call.cancel()
        assert len((await kept.outputs(1))[2]) == 100
        async with asyncio.timeout(1):
            await worker.engine.wait_idle()
        await kept.call.done_writing()


async def test_a_gateway_cannot_cancel_the_request_of_another():
    async with serving() as (_, address):
        owner, other = Gateway(address), Gateway(address)
        await owner.hello()
        await other.hello()
        await owner.run(1, long_text(50), max_tokens=60)
        await other.cancel(1)
        assert len((await owner.outputs(1))[1]) == 60
        await owner.call.done_writing()
        await other.call.done_writing()


async def test_waiting_longer_than_the_queue_allows_ends_with_resource_exhausted():
    async with serving(queue_timeout_s=0.05) as (_, address):
        gateway = Gateway(address)
        await gateway.hello()
        for number in (1, 2):  # each needs most of the pool
            await gateway.run(number, long_text(1100, seed=number), max_tokens=180)
        tokens = await gateway.outputs(2)
        assert len(tokens[1]) == 180
        assert tokens[2] == [-grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]]
        await gateway.call.done_writing()


async def test_a_draining_worker_refuses_what_is_new_and_finishes_what_runs():
    async with serving() as (worker, address):
        gateway = Gateway(address)
        await gateway.hello()
        await gateway.run(1, long_text(20), max_tokens=50)
        await gateway.first_tokens()
        worker.begin_drain()
        await gateway.run(2, long_text(20))
        tokens = await gateway.outputs(2)
        assert tokens[2] == [-grpc.StatusCode.UNAVAILABLE.value[0]]
        assert len(tokens[1]) == 49
        await gateway.call.done_writing()


async def test_a_drain_is_told_to_every_gateway_before_the_next_heartbeat(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link_service, "LOAD_PERIOD_S", 60.0)
    async with serving() as (worker, address):
        gateways = [Gateway(address), Gateway(address)]
        for gateway in gateways:
            await gateway.hello()
            assert not (await gateway.call.read()).load.draining
        worker.begin_drain()
        async with asyncio.timeout(5):
            assert all([(await gateway.call.read()).load.draining for gateway in gateways])
        for gateway in gateways:
            await gateway.call.done_writing()


def test_what_waits_for_a_gateway_is_bounded_and_then_dropped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link_service, "MAX_UNREAD_BYTES", 100_000)
    session, message = LinkSession(), link_pb2.WorkerMessage(failed=link_pb2.Failed(message="x" * 1000))
    most = 0
    for _ in range(10_000):
        session.send(message)
        most = max(most, len(session._waiting))
    assert 70 < most < 110
    assert session.overflowed.is_set()
    assert session.is_empty


async def test_a_gateway_that_does_not_read_loses_its_link_and_nobody_elses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(link_service, "MAX_UNREAD_BYTES", 2_000_000)
    async with serving() as (worker, address), asyncio.timeout(60):
        closed, close_link = asyncio.Event(), worker.close_link
        monkeypatch.setattr(worker, "close_link", lambda session: (close_link(session), closed.set()))
        deaf, other = Gateway(address, TAKES_LITTLE), Gateway(address)
        await deaf.hello()
        await other.hello()
        await other.run(1, long_text(NUM_BLOCKS * BLOCK_SIZE // 2), max_tokens=1)
        await other.outputs(1)
        await deaf.run(2, long_text(100), max_tokens=400)
        asking = asyncio.create_task(ask_for_ever(deaf, TELL_PREFIXES))
        await closed.wait()
        await worker.engine.wait_idle()
        await other.run(3, long_text(20), max_tokens=10)
        assert len((await other.outputs(1))[3]) == 10
        with pytest.raises(grpc.aio.AioRpcError):  # a client whose write is cut off is told of that, not of the cause
            await deaf.read_to_the_end()
        await asking
        await other.call.done_writing()


async def ask_for_ever(gateway: Gateway, message: link_pb2.GatewayMessage) -> None:
    """Each is answered; until the link is gone."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await gateway.call.write(message)


@pytest.mark.parametrize(
    "message",
    [
        link_pb2.GatewayMessage(),
        link_pb2.GatewayMessage(hello=link_pb2.Hello(protocol_version=PROTOCOL_VERSION)),
        link_pb2.GatewayMessage(cancel=link_pb2.Cancel(request_id=b"short")),
        link_pb2.GatewayMessage(run=link_pb2.Run(request_id=bytes(17))),
    ],
    ids=["nothing", "hello again", "a short id", "a long id"],
)
async def test_what_no_gateway_says_ends_its_link_with_an_invalid_argument(message):
    async with serving() as (worker, address), asyncio.timeout(30):
        gateway = Gateway(address)
        await gateway.hello()
        await gateway.run(1, long_text(100), max_tokens=400)
        await gateway.call.write(message)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await gateway.read_to_the_end()
        assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await worker.engine.wait_idle()
