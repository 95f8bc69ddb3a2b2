"""Over a mesh, the engine gives the tokens of one device, in every partition, and hands out the same KV."""

import asyncio

import numpy as np
import pytest

from moonshard.kv.blocks import BlockPool
from moonshard.serving.control.request import Request
from moonshard.serving.control.sampling_parameters import Sampling
from moonshard.serving.engine.compiled.compilations import CompilationCounter
from moonshard.serving.engine.engine import Engine
from moonshard.sharding.rules import DECODE, PREFILL, DecodeRules, Rules
from moonshard.sharding.shape import MeshShape
from moonshard.sharding.shard import ALONE, Shard
from tests.agreement import LOGIT_TOLERANCE, assert_drawn_from, reference
from tests.engine_room import Run, an_engine, long_text, prepared, programs, serve, until_idle
from tests.sizes import BLOCK_SIZE, NUM_BLOCKS

pytestmark = pytest.mark.xdist_group("jax")
CONTEXT_PARALLEL = DecodeRules(kv_tokens=("tensor",))
FORMS = [
    (MeshShape(tensor=2), PREFILL),
    (MeshShape(expert=4), DECODE),
    (MeshShape(data=2, expert=2, tensor=2), DECODE),
    (MeshShape(data=2, tensor=2), CONTEXT_PARALLEL),
    (MeshShape(pipe=2), PREFILL),
    (MeshShape(data=2, tensor=2, pipe=2), DECODE),
]
FEW = (FORMS[2], FORMS[3], FORMS[5])  # in which every axis is cut; `test_mesh_pairs` runs the same programs
ALL = [pytest.param(*form, marks=[] if form in FEW else pytest.mark.slow) for form in FORMS]
ONE_OF_FEW = [pytest.param(*form, marks=[] if form == FORMS[3] else pytest.mark.slow) for form in FEW]
NUM_REQUESTS = 10


def requests() -> list[Request]:
    random = np.random.default_rng(0)
    lengths = (1, 15, 16, 17, 63, 64, 65, 100, 33, 150)
    return [
        Request(
            id=number.to_bytes(16),
            prompt=tuple(random.integers(0, 2000, length).tolist()),
            max_tokens=20,
            sampling=Sampling(
                temperature=0.0 if number % 2 else 1.0, seed=number, frequency_penalty=0.5 if number % 3 == 0 else 0.0
            ),
            n=2 if number == 4 else 1,
        )
        for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize(("mesh", "rules"), ALL, ids=lambda each: str(each).split("(")[0])
def test_every_partition_draws_the_tokens_of_one_device(mesh: MeshShape, rules: Rules):
    run = serve(requests(), shard=Shard(mesh=mesh, rules=rules))
    for request in requests():
        for choice in range(request.n):
            assert len(run.of(request, choice)) == 20
            assert_drawn_from(reference(), request.prompt, run.of(request, choice), request.sampling, choice)


@pytest.mark.parametrize(("mesh", "rules"), [FORMS[2], FORMS[5]], ids=lambda each: str(each).split("(")[0])
def test_partitions_too_small_for_their_requests_preempt_and_draw_the_same(mesh: MeshShape, rules: Rules):
    asked = [
        Request(
            id=number.to_bytes(16),
            prompt=tuple(long_text(60, seed=number)),
            max_tokens=40,
            sampling=Sampling(temperature=float(number % 2), seed=number),
        )
        for number in range(3 * mesh.num_partitions)  # as many to each, and each partition holds less than two of them
    ]
    *staying, cancelled = asked

    def cancel(engine: Engine, run: Run) -> None:
        if run.num_steps == 8:
            engine.cancel(cancelled.id)

    run = serve(asked, num_blocks=12, shard=Shard(mesh=mesh, rules=rules), on_step=cancel)
    assert run.num_preemptions >= mesh.num_partitions
    assert cancelled.id not in {sequence.request_id for sequence in run.finish}
    for request in staying:
        assert len(run.of(request)) == 40
        assert_drawn_from(reference(), request.prompt, run.of(request), request.sampling)


@pytest.mark.parametrize(("mesh", "rules"), ALL, ids=lambda each: str(each).split("(")[0])
def test_blocks_leave_and_enter_every_partition_as_they_are_on_one_device(mesh: MeshShape, rules: Rules):
    shard = Shard(mesh=mesh, rules=rules)
    alone = asyncio.run(_prefilled(ALONE, 0))
    for partition in range(mesh.num_partitions):
        found = asyncio.run(_prefilled(shard, partition))
        assert np.abs(found - alone).max() < LOGIT_TOLERANCE
        assert np.array_equal(asyncio.run(_through(shard, partition, found)), found)


@pytest.mark.parametrize(("mesh", "rules"), ALL, ids=lambda each: str(each).split("(")[0])
def test_nothing_compiles_while_a_mesh_serves_or_blocks_leave_and_enter(mesh: MeshShape, rules: Rules):
    shard, partition = Shard(mesh=mesh, rules=rules), mesh.num_partitions - 1
    prepared(programs(shard=shard))
    counter = CompilationCounter()
    counter.start()
    counter.mark_serving()
    serve(requests(), shard=shard)
    asyncio.run(_through(shard, partition, asyncio.run(_prefilled(shard, partition))))
    assert counter.num_while_serving == 0


async def _prefilled(shard: Shard, partition: int) -> np.ndarray:
    """The blocks of a prompt that a partition prefilled, [blocks, layers, block_size, features]."""
    executor = programs(shard=shard)
    blocks, run = BlockPool(executor.shapes.num_partitions, NUM_BLOCKS, BLOCK_SIZE), Run()
    engine = an_engine(executor, blocks, run.take)
    engine.start()
    prompt = tuple(np.random.default_rng(1).integers(0, 2000, 5 * BLOCK_SIZE).tolist())
    asked = Request(id=bytes(16), prompt=prompt, max_tokens=2, sampling=Sampling(temperature=0.0))
    engine.submit(asked, partition=partition)
    await until_idle(engine)
    found = await _export(engine, partition, tuple(range(5)))
    await engine.close()
    return found


async def _through(shard: Shard, partition: int, payload: np.ndarray) -> np.ndarray:
    """Landed and exported again."""
    executor = programs(shard=shard)
    blocks = BlockPool(executor.shapes.num_partitions, NUM_BLOCKS, BLOCK_SIZE)
    engine = an_engine(executor, blocks, lambda report: None)
    engine.start()
    landed = asyncio.get_running_loop().create_future()
    ids = (9, 3, NUM_BLOCKS - 1, 7, 11)
    engine.land(partition, ids, payload, lambda: landed.set_result(None))
    await landed
    found = await _export(engine, partition, ids)
    await engine.close()
    return found


async def _export(engine, partition: int, blocks: tuple[int, ...]) -> np.ndarray:
    found = asyncio.get_running_loop().create_future()
    engine.export(partition, blocks, found.set_result)
    return (await found).copy()
