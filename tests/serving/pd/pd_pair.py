"""A prefill worker and a decode worker in one process, their real programs, and a gateway reduced to its state machine.

Messages are handed over as they are, through their wire form, on the event loop; KV goes through the in-process
transport, or whatever transport a test gives. A test that wants trouble changes `to_prefill` or `to_decode`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Literal

from moonshard.kv.inproc import InprocNetwork, InprocTransport
from moonshard.kv.slab import Slab
from moonshard.kv.store.stack import TierStack
from moonshard.kv.transfer import Transport
from moonshard.rpc import link_pb2
from moonshard.serving.config.keys import (
    Config,
    DecodeConfig,
    KvConfig,
    ModelConfig,
    PrefillConfig,
    SpeculationConfig,
    WorkerRole,
)
from moonshard.serving.control.handoff import messages as m
from moonshard.serving.control.handoff.gateway import (
    Deliver,
    GatewayAction,
    GatewaySide,
    Outcome,
    SendDecode,
    SendPrefill,
)
from moonshard.serving.engine.compiled.compilations import CompilationCounter
from moonshard.serving.engine.loading.model import LoadedModel, load_model
from moonshard.serving.transfer.plane import KvPlane
from moonshard.serving.wire import handoffs as handoff_wire
from moonshard.serving.wire.relayed import (
    RelayedCredits,
    RelayedManifest,
    RelayedTarget,
    relayed_credits,
    relayed_manifest,
    relayed_target,
)
from moonshard.serving.worker.decode import DecodeHandoffs
from moonshard.serving.worker.prefill import PrefillHandoffs
from moonshard.serving.worker.roles.decode import DecodeRole
from moonshard.serving.worker.roles.prefill import PrefillRole
from moonshard.serving.worker.spans import WorkerSpans
from moonshard.serving.worker.store.places import alone
from moonshard.serving.worker.worker import Worker
from moonshard.sharding.rules import DECODE, PREFILL, DecodeRules, Rules
from moonshard.sharding.shape import MeshShape
from tests.agreement import FIXTURES
from tests.compiled import compiled_once
from tests.engine_room import at_first_launch
from tests.sizes import BLOCK_SIZE, CHUNK_TOKENS, MAX_CONTEXT_TOKENS, NUM_BLOCKS, NUM_SLOTS

NUM_SLAB_CELLS = 8  # fewer than a long prompt has blocks
LEASE_S = 120.0  # no test waits for it, and a loaded machine may take its time
ONE_DEVICE = MeshShape()
FOLDER = FIXTURES / "kimi_k2"
NO_GUESSES = SpeculationConfig()
type Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Meshes:
    """The mesh and rules of each of the two workers."""

    prefill: MeshShape = ONE_DEVICE
    decode: MeshShape = ONE_DEVICE
    prefill_rules: Rules = PREFILL
    decode_rules: DecodeRules = DECODE


ALONE = Meshes()


def pd_config(
    dtype: Dtype = "float32",
    meshes: Meshes = ALONE,
    short_share: float = 0.5,
    folder: Path = FOLDER,
    speculation: SpeculationConfig = NO_GUESSES,
    **kv: object,
) -> Config:
    """The configuration in the sizes of `tests.engine_room`, so that compiled programs are shared."""
    num_slots = [NUM_SLOTS * mesh.num_partitions for mesh in (meshes.prefill, meshes.decode)]
    return Config(
        model=ModelConfig(path=folder, name="tiny", dtype=dtype, max_context_tokens=MAX_CONTEXT_TOKENS),
        prefill=PrefillConfig(
            chunk_tokens=CHUNK_TOKENS,
            short_share=short_share,
            max_slots=num_slots[0],
            mesh=meshes.prefill,
            rules=meshes.prefill_rules,
        ),
        decode=DecodeConfig(max_slots=num_slots[1], mesh=meshes.decode, rules=meshes.decode_rules),
        speculation=speculation,
        kv=KvConfig(
            **{"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "quarantine_s": 0.2, "lease_s": LEASE_S, **kv}
        ),
    )


def loaded(
    role: WorkerRole,
    dtype: Dtype = "float32",
    meshes: Meshes = ALONE,
    folder: Path = FOLDER,
    speculation: SpeculationConfig = NO_GUESSES,
) -> LoadedModel:
    """A role's model, compiled once for each mesh of the role, whatever the other's is."""
    if role == "prefill":
        own = Meshes(prefill=meshes.prefill, prefill_rules=meshes.prefill_rules)
        drafted = speculation if speculation.draft_model else NO_GUESSES
        return _loaded(role, dtype, own, folder, drafted)
    return _loaded(role, dtype, Meshes(decode=meshes.decode, decode_rules=meshes.decode_rules), folder, speculation)


@compiled_once
def _loaded(
    role: WorkerRole, dtype: Dtype, meshes: Meshes, folder: Path, speculation: SpeculationConfig
) -> LoadedModel:
    config = pd_config(dtype, meshes, folder=folder, speculation=speculation)
    model = load_model(config, role, lambda message: None, prepares="none")
    at_first_launch(model.programs)
    return model


@dataclass
class Answer:
    """What a client of the pair got, by choice."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)
    num_cached: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)  # of these, from tiers below the device's pages
    phases: link_pb2.WorkerPhases = field(default_factory=link_pb2.WorkerPhases)
    first_tokens_came_before_last_chunk: bool | None = None
    cause: m.Cause | None = None
    failed: link_pb2.Failed | None = None
    is_over: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, output: link_pb2.SequenceOutput) -> None:
        self.tokens.setdefault(output.choice, []).extend(output.token_ids)
        self.logprobs.setdefault(output.choice, []).extend(position.chosen.logprob for position in output.logprobs)
        self.phases.MergeFrom(output.phases)
        self.num_cached = max(self.num_cached, output.cached_tokens)
        self.by_tier |= output.cached_by_tier
        if output.finish_reason:
            self.finish[output.choice] = output.finish_reason


class _WorkerLink:
    """The worker's end; what it sends reaches the pair in the loop's next round, as from a wire."""

    def __init__(self, receive: Callable[[link_pb2.WorkerMessage], None]):
        self._receive = receive

    def send(self, message: link_pb2.WorkerMessage) -> None:
        copy = link_pb2.WorkerMessage.FromString(message.SerializeToString())
        asyncio.get_running_loop().call_soon(self._receive, copy)


class Pair:
    def __init__(self, prefill: Worker, decode: Worker):
        self.prefill, self.decode = prefill, decode
        self.answers: dict[bytes, Answer] = {}
        self.side = GatewaySide()
        self.to_prefill = self.prefill.receive
        self.to_decode = self.decode.receive
        self._links = {id(worker): _WorkerLink(self._receive) for worker in (prefill, decode)}
        self._runs: dict[bytes, link_pb2.Run] = {}
        self._num_choices: dict[bytes, int] = {}
        self._first: dict[bytes, link_pb2.FirstTokens] = {}
        self._prefill_partitions: dict[bytes, int | None] = {}
        self._local: set[bytes] = set()  # prefilled where they are decoded
        for worker in (prefill, decode):
            worker.open_link(self.link(worker))

    def link(self, worker: Worker) -> _WorkerLink:
        return self._links[id(worker)]

    def begin(self, run: link_pb2.Run, lease_s: float = LEASE_S, prefill_partition: int | None = None) -> Answer:
        """Decodes in the run's partition. Where none is named for a worker, it chooses."""
        answer = self._expect(run)
        self._prefill_partitions[run.request_id] = prefill_partition
        reserve = m.Reserve(
            handoff=run.request_id,
            writer_epoch=handoff_wire.epoch_from(self.prefill.epoch),
            lease_s=lease_s,
        )
        self._act(self.side.begin(reserve, handoff_wire.epoch_from(self.decode.epoch), time.perf_counter()))
        return answer

    def _expect(self, run: link_pb2.Run) -> Answer:
        answer = self.answers[run.request_id] = Answer()
        self._runs[run.request_id] = run
        return answer

    async def ask(self, run: link_pb2.Run, prefill_partition: int | None = None) -> Answer:
        answer = self.begin(run, prefill_partition=prefill_partition)
        await answer.is_over.wait()
        return answer

    async def ask_decode_alone(self, run: link_pb2.Run) -> Answer:
        """Prefills on the decode worker too: no KV moves."""
        answer = self._expect(run)
        self._local.add(run.request_id)
        self.to_decode(link_pb2.GatewayMessage(run=run), self.link(self.decode))
        await answer.is_over.wait()
        return answer

    def cancel(self, run: link_pb2.Run) -> None:
        self._act(self.side.cancel(run.request_id))

    def _act(self, actions: Sequence[GatewayAction]) -> None:
        for action in actions:
            match action:
                case SendPrefill():
                    self.to_prefill(self._to_worker(action.message), self.link(self.prefill))
                case SendDecode():
                    self.to_decode(self._to_worker(action.message), self.link(self.decode))
                case Deliver():
                    for output in self._first.pop(action.handoff).outputs:
                        self.answers[action.handoff].take(output)
                case Outcome():
                    self.answers[action.handoff].cause = action.cause
                    self.answers[action.handoff].is_over.set()

    def _to_worker(self, message: object) -> link_pb2.GatewayMessage:
        wrap = link_pb2.GatewayMessage
        match message:
            case m.Reserve():
                return wrap(reserve=handoff_wire.reserve_message(message, self._runs[message.handoff]))
            case m.Run(target=RelayedTarget(handoff=handoff, message=target)):
                endpoint = self.decode.welcome().endpoint
                partition = self._prefill_partitions[handoff]
                return wrap(run=handoff_wire.run_message(self._runs[handoff], target, endpoint, partition))
            case RelayedManifest(message=manifest):
                return wrap(landed=manifest)
            case m.Start(handoff=handoff, tokens=tokens, last=RelayedManifest(message=last), guesses=guesses):
                return wrap(start=handoff_wire.start_message(handoff, tokens, last, guesses))
            case RelayedCredits(message=credits):
                return wrap(credits=credits)
            case m.Drained():
                return wrap(drained=handoff_wire.drained_message(message))
            case m.Cancel():
                return wrap(cancel=handoff_wire.cancel_message(message))
        raise AssertionError(message)

    def _receive(self, message: link_pb2.WorkerMessage) -> None:
        match message.WhichOneof("message"):
            case "target":
                self._act(self.side.target(relayed_target(message.target)))
            case "credits":
                self._act(self.side.credits(relayed_credits(message.credits)))
            case "chunk":
                manifest = relayed_manifest(message.chunk)
                if manifest.is_last and manifest.handoff in self.answers:
                    answer = self.answers[manifest.handoff]
                    answer.first_tokens_came_before_last_chunk = bool(answer.tokens)
                self._act(self.side.chunk(manifest))
            case "first_tokens":
                self._first[message.first_tokens.handoff] = message.first_tokens
                self._act(self.side.first_tokens(handoff_wire.first_tokens_from(message.first_tokens)))
            case "drained":
                self._act(self.side.drained(handoff_wire.drained_from(message.drained)))
            case "step":
                for output in message.step.outputs:
                    self._take(output)
            case "failed":
                self._fail(message.failed)

    def _take(self, output: link_pb2.SequenceOutput) -> None:
        answer = self.answers[output.request_id]
        answer.take(output)
        if len(answer.finish) < max(1, self._runs[output.request_id].n):
            return
        if output.request_id in self._local:
            answer.is_over.set()
        else:
            epoch = handoff_wire.epoch_from(self.decode.epoch)
            self._act(self.side.finished(m.Finished(handoff=output.request_id, epoch=epoch)))

    def _fail(self, failed: link_pb2.Failed) -> None:
        answer = self.answers.get(failed.request_id)
        if answer is not None and not answer.is_over.is_set():
            answer.failed = failed
        cause = handoff_wire.cause_from(failed)
        if cause is not None:
            for epoch in (self.prefill.epoch, self.decode.epoch):
                failure = m.Failed(handoff=failed.request_id, epoch=handoff_wire.epoch_from(epoch), cause=cause)
                self._act(self.side.failed(failure))
        else:
            self._act(self.side.cancel(failed.request_id))


@asynccontextmanager
async def running(
    *,
    dtype: Dtype = "float32",
    num_slab_cells: int = NUM_SLAB_CELLS,
    transports: Callable[[], tuple[Transport, Transport]] | None = None,
    meshes: Meshes = ALONE,
    spans: tuple[WorkerSpans, WorkerSpans] | None = None,
    short_share: float = 0.5,
    folder: Path = FOLDER,
    speculation: SpeculationConfig = NO_GUESSES,
    tiers: tuple[TierStack | None, TierStack | None] = (None, None),
    **kv: object,
) -> AsyncIterator[Pair]:
    """A pair that serves; afterwards every pool and slab must be as it began."""
    prefill_spans, decode_spans = spans or (WorkerSpans(), WorkerSpans())
    network = InprocNetwork()
    make = transports or (lambda: (InprocTransport(network), InprocTransport(network)))
    prefill_end, decode_end = make()
    config = pd_config(dtype, meshes, short_share, folder, speculation, **kv)
    models = (loaded(role, dtype, meshes, folder, speculation) for role in ("prefill", "decode"))
    prefill = _worker(config, "prefill", prefill_end, num_slab_cells, next(models), prefill_spans, tiers[0])
    decode = _worker(config, "decode", decode_end, num_slab_cells, next(models), decode_spans, tiers[1])
    for worker in (prefill, decode):
        worker.start()
    pair = Pair(prefill, decode)
    try:
        yield pair
        async with asyncio.timeout(30):
            for worker in (prefill, decode):
                await until_as_it_began(worker)
    finally:
        for worker in (prefill, decode):
            await worker.close()
            worker.engine.failed.cancel()


def _worker(
    config: Config,
    role: WorkerRole,
    transport: Transport,
    num_slab_cells: int,
    model: LoadedModel,
    spans: WorkerSpans,
    tiers: TierStack | None,
) -> Worker:
    """`num_slab_cells` are each partition's."""
    plane = KvPlane(
        transport,
        Slab(num_slab_cells * model.pool.num_partitions, model.block_bytes),
        name="inproc",
        layout=model.layout,
        fingerprint=model.fingerprint,
        num_partitions=model.pool.num_partitions,
    )
    places = None if tiers is None else alone(tiers, model.layout.groups[0].block, model.shapes.num_partitions)
    return Worker(config, role, model, CompilationCounter(), plane, places, spans=spans)


def prefill_handoffs(worker: Worker) -> PrefillHandoffs:
    assert isinstance(worker.role, PrefillRole)
    return worker.role.handoffs


def decode_handoffs(worker: Worker) -> DecodeHandoffs:
    assert isinstance(worker.role, DecodeRole)
    return worker.role.handoffs


def kv_plane(worker: Worker) -> KvPlane:
    assert isinstance(worker.role, PrefillRole | DecodeRole)
    plane = worker.role._plane
    assert isinstance(plane, KvPlane)
    return plane


async def until_as_it_began(worker: Worker) -> None:
    """Polls until all is as it began: a quarantine ends by the clock."""
    while not is_as_it_began(worker):
        if worker.engine.failed.done():
            worker.engine.failed.result()
        await asyncio.sleep(0.01)


def is_as_it_began(worker: Worker) -> bool:
    inspection = worker.inspect()
    kv = inspection.load.kv_transfer
    is_free = all(
        state.free_blocks == state.total_blocks and state.free_slots == state.total_slots
        for state in inspection.partitions
    )
    return is_free and kv.free_slab_slots == kv.total_slab_slots and kv.num_handoffs == 0


_numbers = count(1)


def run(
    prompt: Sequence[int], max_tokens: int = 32, *, sampling: dict[str, object] | None = None, **fields
) -> link_pb2.Run:
    """Runs one request; greedy unless `sampling` says otherwise."""
    neutral = {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0}
    return link_pb2.Run(
        request_id=next(_numbers).to_bytes(16, "big"),
        prompt_tokens=prompt,
        sampling=link_pb2.EngineSampling(**{**neutral, **(sampling or {})}),
        max_tokens=max_tokens,
        **{"n": 1, **fields},
    )
