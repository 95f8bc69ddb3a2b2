"""An engine with real programs for tests: compiled once per process, driven by one call."""

import asyncio
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from moonshard.kv.blocks import BlockPool
from moonshard.models import weights
from moonshard.models.experts import moe
from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.serving.constrained.grammars import Grammars, load_grammars
from moonshard.serving.constrained.masks import Masks
from moonshard.serving.control.batching.queue import Rejected
from moonshard.serving.control.batching.scheduler import Scheduler, SchedulerConfig
from moonshard.serving.control.drafting.drafter import Drafters
from moonshard.serving.control.plan import PrefillPlan
from moonshard.serving.control.request import Logprobs, PromptLogprobs, Request, SequenceId
from moonshard.serving.deploy.startup import programs_folder
from moonshard.serving.deploy.timings import Timings
from moonshard.serving.engine.capacity.sizes import buckets, split_stages
from moonshard.serving.engine.compiled.preparation import Preparation
from moonshard.serving.engine.compiled.prepared import Wanted
from moonshard.serving.engine.compiled.stage_model import StageModel
from moonshard.serving.engine.compiled.store import ProgramStore
from moonshard.serving.engine.encoder import StepEncoder
from moonshard.serving.engine.engine import Engine
from moonshard.serving.engine.events import StepReport
from moonshard.serving.engine.loading.draft import OpenDraft
from moonshard.serving.engine.programs import Programs
from moonshard.serving.engine.steps import StepShapes
from moonshard.sharding.mesh import build_mesh
from moonshard.sharding.shard import ALONE, Shard
from tests.agreement import FIXTURES, reference
from tests.compiled import compiled_once
from tests.listeners import Listeners, ignore
from tests.sizes import BLOCK_SIZE, CHUNK_TOKENS, MAX_CONTEXT_TOKENS, NUM_BLOCKS, NUM_SLOTS

Q_TILE = 32
TRANSFER_BUCKETS = (1, 2, 4)


def programs(
    name: str = "kimi_k2", worker: int = 0, shard: Shard = ALONE, q_len: int = 1, draft: OpenDraft | None = None
) -> Programs:
    """Programs that are each prepared by their first launch; another `worker` gets pages of its own."""
    return _programs(name, worker, shard, q_len, draft)


@compiled_once
def _programs(name: str, worker: int, shard: Shard, q_len: int, draft: OpenDraft | None) -> Programs:
    del worker  # only tells one from another
    return at_first_launch(uncompiled_programs(name, shard=shard, q_len=q_len, draft=draft))


def prepared(programs: Programs) -> Programs:
    """Programs that are all compiled, as in a worker that is ready."""
    own = programs.prepared
    Preparation(own, program_store(), Timings()).prepare((*own.needed, *own.others))
    return programs


def at_first_launch(programs: Programs) -> Programs:
    """Prepares each program when it is launched first, for a test that launches few of them.

    What any process of a run of tests has compiled is there for the others.
    """
    preparation = Preparation(programs.prepared, program_store(), Timings())

    def prepare(wanted: Wanted, *arguments: object) -> object:
        preparation.prepare([wanted])
        return programs.stages[wanted.stage].programs[wanted.key](*arguments)

    for wanted in (*programs.prepared.needed, *programs.prepared.others):
        programs.prepared.take(wanted, functools.partial(prepare, wanted))
    return programs


def program_store() -> ProgramStore:
    folder = programs_folder(os.environ)
    assert folder is not None  # as conftest says
    return ProgramStore(folder)


def uncompiled_programs(
    name: str = "kimi_k2",
    dtype: str = "float32",
    shard: Shard = ALONE,
    q_len: int = 1,
    draft: OpenDraft | None = None,
    *,
    has_buckets: bool | None = None,
) -> Programs:
    """For a test that launches few of them: each is compiled by its first launch. `draft` guesses all that a row of
    `q_len` can verify. `has_buckets`: more than one of each kind; None: on one device, with one model alone.
    """
    model = reference(name).model
    # one bucket of each kind: what buckets do is seen on one device and with one model
    is_small = shard.mesh.num_devices > 1 or name != "kimi_k2" or draft is not None
    is_small = is_small if has_buckets is None else not has_buckets
    shapes = StepShapes(
        num_partitions=shard.mesh.num_partitions,
        slots_per_partition=NUM_SLOTS,
        columns_per_sequence=MAX_CONTEXT_TOKENS // BLOCK_SIZE,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        q_tile=Q_TILE,
        q_len=q_len,
        num_ahead=0 if draft is None else q_len - 1,
        prefill_buckets=(CHUNK_TOKENS,) if is_small else buckets(CHUNK_TOKENS, Q_TILE),
        decode_buckets=(NUM_SLOTS,) if is_small else buckets(NUM_SLOTS),
        transfer_buckets=TRANSFER_BUCKETS,
    )
    parts = []
    for index, layers in enumerate(split_stages(model, shard)):
        mesh = build_mesh(shard.mesh, index)
        loaded = weights.load(model.declare(layers), Checkpoint.open(FIXTURES / name), dtype, mesh, shard.rules)
        behind = None if draft is None else draft.behind(layers, loaded, mesh, shard)
        if draft is not None and behind is not None:
            behind = replace(behind, weights=draft.load(loaded, mesh, shard))
        where = {"mesh": mesh, "shard": shard, "backend": moe.blocks, "draft": behind}
        parts.append(StageModel(model=model, layers=layers, weights=loaded, **where))
    return Programs.of(parts, shapes, blocks_per_partition=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype)


@dataclass
class Run:
    """What a run of requests produced, by sequence."""

    tokens: dict[SequenceId, list[int]] = field(default_factory=dict)
    logprobs: dict[SequenceId, list[Logprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[bytes, PromptLogprobs] = field(default_factory=dict)
    finish: dict[SequenceId, str] = field(default_factory=dict)
    num_steps: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_wasted_tokens: int = 0
    num_prefill_steps: int = 0
    num_decode_steps: int = 0
    num_guessed: int = 0
    num_accepted: int = 0
    turned_down: dict[bytes, Rejected] = field(default_factory=dict)

    def of(self, request: Request, choice: int = 0) -> list[int]:
        return self.tokens[SequenceId(request.id, choice)]

    def take(self, report: StepReport) -> None:
        self.num_steps += 1
        for emitted in report.emitted:
            output = emitted.output
            self.tokens.setdefault(output.sequence, []).extend(output.token_ids)
            self.logprobs.setdefault(output.sequence, []).extend(output.logprobs)
            if output.prompt_logprobs is not None:
                self.prompt_logprobs[output.sequence.request_id] = output.prompt_logprobs
            if output.finish is not None:
                self.finish[output.sequence] = output.finish.value


def serve(
    requests: Sequence[Request],
    *,
    num_blocks: int = NUM_BLOCKS,
    num_slots: int = NUM_SLOTS,
    model: str = "kimi_k2",
    on_step: Callable[[Engine, Run], None] = lambda engine, run: None,
    max_prefill_sequences: int = 8,
    shard: Shard = ALONE,
    drafters: Drafters | None = None,
    q_len: int = 1,
    draft: OpenDraft | None = None,
) -> Run:
    """Submits all requests at once and runs until the engine is idle; then everything must be given back.

    `on_step` is called after every step that gave tokens: to cancel, or to submit more.
    """
    executor = programs(model, shard=shard, q_len=q_len, draft=draft)
    return asyncio.run(_serve(requests, num_blocks, num_slots, executor, on_step, max_prefill_sequences, drafters))


async def _serve(requests, num_blocks, num_slots, executor, on_step, max_prefill_sequences, drafters) -> Run:
    run, blocks = Run(), BlockPool(executor.shapes.num_partitions, num_blocks, BLOCK_SIZE)

    def take(report: StepReport) -> None:
        run.take(report)
        on_step(engine, run)

    engine = an_engine(
        executor,
        blocks,
        take,
        num_slots=num_slots,
        max_prefill_sequences=max_prefill_sequences,
        on_turned_down=run.turned_down.__setitem__,
        drafters=drafters,
    )
    engine.start()
    for request in requests:
        engine.submit(request)
    await until_idle(engine)
    totals = engine.counters().totals
    run.num_preemptions, run.num_wasted_tokens = totals.num_preemptions, totals.wasted_tokens
    run.num_cached_tokens = totals.cached_tokens
    run.num_prefill_steps = totals.num_prefill_steps
    run.num_decode_steps = totals.num_decode_steps
    run.num_guessed, run.num_accepted = totals.draft_tokens, totals.accepted_tokens
    await engine.close()
    engine.failed.cancel()
    assert all(blocks.counts(partition).free == num_blocks for partition in range(blocks.num_partitions))
    return run


def an_engine(
    executor: Programs,
    blocks: BlockPool,
    on_step: Callable[[StepReport], None],
    on_prefill: Callable[[PrefillPlan], None] = lambda plan: None,
    *,
    num_slots: int = NUM_SLOTS,
    max_prefill_sequences: int = 8,
    on_turned_down: Callable[[bytes, Rejected], None] = ignore,
    drafters: Drafters | None = None,
) -> Engine:
    """An engine on the running event loop, not started, with one microbatch per stage, as a worker has."""
    num_stages = len(executor.stages)
    config = SchedulerConfig(
        slots_per_partition=num_slots,
        num_microbatches=min(num_stages, num_slots),
        chunk_tokens=CHUNK_TOKENS,
        q_tile=Q_TILE,
        q_len=executor.shapes.q_len,
        max_prefill_sequences=max_prefill_sequences,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        max_queued_requests=1000,
        queue_timeout_s=1000.0,
    )
    shapes = executor.shapes
    return Engine(
        scheduler=Scheduler(config, blocks, drafters),
        executor=executor,
        encoder=StepEncoder(executor.shapes),
        events=Listeners(on_step=on_step, on_prefill=on_prefill, on_turned_down=on_turned_down),
        masks=Masks(grammars, shapes.num_partitions * shapes.slots_per_partition, shapes.num_partitions, shapes.q_len),
        num_stages=num_stages,
    )


@functools.cache
def grammars() -> Grammars:
    """Of the fixtures, which all have one tokenizer."""
    return load_grammars(FIXTURES / "kimi_k2", reference().config.vocab_size)


async def until_idle(engine: Engine) -> None:
    """Waits until the engine is idle. Raises what failed it."""
    idle = asyncio.ensure_future(engine.wait_idle())
    await asyncio.wait({idle, engine.failed}, return_when=asyncio.FIRST_COMPLETED)
    if engine.failed.done():
        engine.failed.result()


_ids = iter(range(1, 1 << 60))


def request(prompt: Sequence[int], max_tokens: int = 64, **options) -> Request:
    return Request(id=next(_ids).to_bytes(16, "big"), prompt=tuple(prompt), max_tokens=max_tokens, **options)


def long_text(num_tokens: int, seed: int = 0) -> list[int]:
    """A prompt of arbitrary ordinary tokens."""
    return np.random.default_rng(seed).integers(0, 2016, num_tokens).tolist()
