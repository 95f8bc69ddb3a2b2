"""The windowed model loaded as a worker loads it, and an engine that serves it: compiled once, driven by one call."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from moonshard.kv.blocks import BlockPool
from moonshard.serving.config.keys import (
    Config,
    DecodeConfig,
    GatewayConfig,
    KvConfig,
    ModelConfig,
    PrefillConfig,
    WorkerRole,
)
from moonshard.serving.control.batching.scheduler import Scheduler
from moonshard.serving.control.plan import PrefillPlan
from moonshard.serving.control.request import Request
from moonshard.serving.control.sampling_parameters import Sampling
from moonshard.serving.engine.encoder import StepEncoder
from moonshard.serving.engine.engine import Engine
from moonshard.serving.engine.events import StepReport
from moonshard.serving.engine.loading.model import LoadedModel, load_model
from tests.agreement import NEAR_TIE, noise
from tests.compiled import compiled_once
from tests.engine_room import Run, at_first_launch, until_idle
from tests.listeners import Listeners
from tests.windowed.folder import WINDOW
from tests.windowed.reference import Reference

BLOCK_SIZE = 16
NUM_BLOCKS = 160
NUM_SLOTS = 4
MAX_CONTEXT_TOKENS = 640
GREEDY = Sampling(temperature=0.0)


def config(folder: Path, chunk_tokens: int, **kv: object) -> Config:
    return Config(
        model=ModelConfig(path=folder, name="windowed", dtype="float32", max_context_tokens=MAX_CONTEXT_TOKENS),
        prefill=PrefillConfig(chunk_tokens=chunk_tokens, max_slots=NUM_SLOTS),
        decode=DecodeConfig(max_slots=NUM_SLOTS),
        gateway=GatewayConfig(queue_timeout_s=1000.0),  # what compiles may take its time
        kv=KvConfig(**{"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, **kv}),
    )


@compiled_once
def loaded(folder: Path, chunk_tokens: int, role: WorkerRole = "both", **kv: object) -> LoadedModel:
    model = load_model(config(folder, chunk_tokens, **kv), role, lambda message: None, prepares="none")
    at_first_launch(model.programs)
    return model


def serve(
    folder: Path,
    requests: Sequence[Request],
    *,
    chunk_tokens: int = 32,
    num_blocks: int = NUM_BLOCKS,
    block_size: int = BLOCK_SIZE,
    on_step: Callable[[Engine, BlockPool, Run], None] = lambda engine, blocks, run: None,
    on_prefill: Callable[[PrefillPlan], None] = lambda plan: None,
) -> Run:
    """Submits all requests at once and runs until the engine is idle; then every block must be free.

    `num_blocks` may be fewer than the pages have. `on_step` is called after every step that gave tokens.
    """
    return asyncio.run(_serve(folder, requests, chunk_tokens, num_blocks, block_size, on_step, on_prefill))


async def _serve(folder, requests, chunk_tokens, num_blocks, block_size, on_step, on_prefill) -> Run:
    model, run = loaded(folder, chunk_tokens, block_size=block_size), Run()
    blocks = BlockPool(1, num_blocks, block_size, model.shapes.groups)
    scheduler = Scheduler(model.scheduler_config(config(folder, chunk_tokens, block_size=block_size)), blocks)

    def take(report: StepReport) -> None:
        run.take(report)
        on_step(engine, blocks, run)

    engine = Engine(
        scheduler=scheduler,
        executor=model.programs,
        encoder=StepEncoder(model.shapes, model.programs.prepared.bucket_for),
        events=Listeners(on_step=take, on_prefill=on_prefill),
        num_stages=model.num_stages,
    )
    engine.start()
    for request in requests:
        engine.submit(request)
    await until_idle(engine)
    totals = engine.counters().totals
    run.num_preemptions, run.num_prefill_steps = totals.num_preemptions, totals.num_prefill_steps
    await engine.close()
    engine.failed.cancel()
    assert blocks.counts(0).free == num_blocks
    assert scheduler.num_free_slots(0) == NUM_SLOTS
    return run


def most_window_blocks(chunk_tokens: int) -> int:
    """Of the window group, for one sequence: all that the queries of a chunk see, wherever in a block it begins."""
    return -(-(WINDOW - 1 + chunk_tokens) // BLOCK_SIZE) + 1


def assert_drawn_from(
    reference: Reference, prompt: Sequence[int], completion: Sequence[int], sampling: Sampling, choice: int = 0
) -> None:
    """Every token is the one that the reference draws after the tokens before it, or all but ties with that one.

    Of greedy tokens no tie is let pass: none that the folder's seed gives is near.
    """
    scores = reference.logits([*prompt, *completion])[len(prompt) - 1 : -1]
    if sampling.temperature == 0:
        assert scores.argmax(axis=1).tolist() == list(completion)
        return
    positions = range(len(prompt), len(prompt) + len(completion))
    scores = scores / sampling.temperature + noise(sampling.seed, choice, positions, scores.shape[1])
    short = scores.max(axis=1) - scores[np.arange(len(completion)), completion]
    assert short.max() < NEAR_TIE, f"token {int(short.argmax())} falls short by {short.max():.4f}"
