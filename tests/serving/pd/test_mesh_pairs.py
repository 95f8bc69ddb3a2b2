"""Prefill on one mesh, decode on another, KV through Mooncake: the bytes arrive as they left, and the tokens hold."""

import asyncio
import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from moonshard.kv.mooncake import MooncakeConfig, MooncakeTransport
from moonshard.kv.transfer import Transport
from moonshard.serving.control.sampling_parameters import Sampling
from moonshard.serving.engine.engine import Engine
from moonshard.sharding.rules import DECODE, PREFILL, DecodeRules, Rules
from moonshard.sharding.shape import MeshShape
from tests.agreement import LOGIT_TOLERANCE, assert_drawn_from, reference
from tests.engine_room import long_text
from tests.serving.pd.pd_pair import Meshes, Pair, run, running
from tests.sizes import BLOCK_SIZE

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.timeout(600)]
PREFILLS: dict[str, tuple[MeshShape, Rules]] = {
    "alone": (MeshShape(), PREFILL),
    "tensor 2": (MeshShape(tensor=2), PREFILL),
    "expert 4": (MeshShape(expert=4), PREFILL),
    "data 2 expert 2": (MeshShape(data=2, expert=2), PREFILL),
    "expert 2 tensor 2": (MeshShape(expert=2, tensor=2), PREFILL),
    "tensor 4 by tokens": (MeshShape(tensor=4), Rules(kv_tokens=("tensor",))),
    "pipe 2": (MeshShape(pipe=2), PREFILL),
    "data 2 tensor 2 pipe 2": (MeshShape(data=2, tensor=2, pipe=2), PREFILL),
}
DECODES: dict[str, tuple[MeshShape, DecodeRules]] = {
    "alone": (MeshShape(), DECODE),
    "tensor 4": (MeshShape(tensor=4), DECODE),
    "expert 8": (MeshShape(expert=8), DECODE),
    "data 2 expert 2": (MeshShape(data=2, expert=2), DECODE),
    "expert 2 tensor 2": (MeshShape(expert=2, tensor=2), DECODE),
    "data 2 expert 2 tensor 2": (MeshShape(data=2, expert=2, tensor=2), DECODE),
    "data 2 tensor 2 by tokens": (MeshShape(data=2, tensor=2), DecodeRules(kv_tokens=("tensor",))),
    "pipe 4": (MeshShape(pipe=4), DECODE),
    "data 2 tensor 2 pipe 2": (MeshShape(data=2, tensor=2, pipe=2), DECODE),
}
FEW = [  # every axis on either side
    ("alone", "data 2 tensor 2 by tokens"),
    ("data 2 expert 2", "data 2 expert 2 tensor 2"),
    ("data 2 expert 2", "data 2 tensor 2 pipe 2"),
    ("tensor 4 by tokens", "alone"),
    ("data 2 tensor 2 pipe 2", "data 2 tensor 2 by tokens"),
]
ALL = [
    pytest.param(*pair, marks=[] if pair in FEW else pytest.mark.slow) for pair in itertools.product(PREFILLS, DECODES)
]
LENGTHS = (15, 16, 17, 64, 65, 150)
NUM_TOKENS = 16
PROMPT = long_text(100, seed=1)  # its last block is not full


def mooncake() -> tuple[Transport, Transport]:
    """Two transports as in two processes, each with a session of its own: all bytes go through the network."""
    here, there = (MooncakeTransport.start("127.0.0.1", config=MooncakeConfig(timeout_s=10.0)) for _ in range(2))
    return here, there


@pytest.mark.parametrize(("prefill", "decode"), ALL)
async def test_any_mesh_hands_over_to_any_mesh(prefill: str, decode: str):
    (prefill_mesh, prefill_rules), (decode_mesh, decode_rules) = PREFILLS[prefill], DECODES[decode]
    meshes = Meshes(prefill=prefill_mesh, decode=decode_mesh, prefill_rules=prefill_rules, decode_rules=decode_rules)
    async with running(meshes=meshes, transports=mooncake) as pair:
        await bytes_arrive_as_they_left(pair, meshes)
        await tokens_are_the_references(pair, meshes)
        sent, landed = (worker.inspect().load.kv_transfer for worker in (pair.prefill, pair.decode))
        assert sent.published_bytes == landed.landed_bytes  # every byte once
        num_blocks = sum(-(-length // BLOCK_SIZE) for length in (*LENGTHS, len(PROMPT)))
        assert landed.num_landed_blocks == num_blocks


async def bytes_arrive_as_they_left(pair: Pair, meshes: Meshes) -> None:
    """In the last partitions: bit for bit what prefill has, and but for the order of sums what decode computes."""
    here, there = meshes.prefill.num_partitions - 1, meshes.decode.num_partitions - 1
    num_blocks = -(-len(PROMPT) // BLOCK_SIZE)
    first, second = range(num_blocks), range(num_blocks, 2 * num_blocks)  # as a pool gives out its blocks
    await blank(pair.decode.engine, there, [*first, *second])
    await pair.ask(run(PROMPT, 2, partition=there), prefill_partition=here)
    left, arrived = await kv_of(pair.prefill.engine, here, first), await kv_of(pair.decode.engine, there, first)
    assert left.any()
    assert (left.view(np.uint32) == arrived.view(np.uint32)).all()
    await pair.ask_decode_alone(run(PROMPT, 2, partition=there, prefix_root=b"another"))  # it finds nothing again
    alone = await kv_of(pair.decode.engine, there, second)
    assert np.abs(alone - arrived).max() < LOGIT_TOLERANCE


async def blank(engine: Engine, partition: int, blocks: Sequence[int]) -> None:
    """Zeroes the blocks, so that nothing left by another test can pass for what this one transfers."""
    landed = asyncio.get_running_loop().create_future()
    pages = await export(engine, partition, blocks)
    engine.land(partition, blocks, np.zeros_like(pages), lambda: landed.set_result(None))
    await landed


async def kv_of(engine: Engine, partition: int, blocks: Sequence[int]) -> np.ndarray:
    """The KV of the prompt, [tokens, layers, features]."""
    pages = await export(engine, partition, blocks)
    return pages.swapaxes(1, 2).reshape(-1, *pages.shape[1::2])[: len(PROMPT)]


async def export(engine: Engine, partition: int, blocks: Sequence[int]) -> np.ndarray:
    """The exported blocks, [blocks, layers, block_size, features]."""
    found = asyncio.get_running_loop().create_future()
    engine.export(partition, blocks, found.set_result)
    return (await found).copy()


async def tokens_are_the_references(pair: Pair, meshes: Meshes) -> None:
    """All tokens are the reference's, with requests in every partition of either side at once."""
    runs, answers = [], []
    for number, length in enumerate(LENGTHS):
        temperature = 0.8 if number % 2 else 0.0
        each = run(
            long_text(length, seed=length),
            NUM_TOKENS,
            sampling={"temperature": temperature, "seed": number},
            partition=number % meshes.decode.num_partitions,
        )
        runs.append((each, Sampling(temperature=temperature, seed=number)))
        answers.append(pair.ask(each, prefill_partition=number % meshes.prefill.num_partitions))
    for (each, sampling), answer in zip(runs, await asyncio.gather(*answers), strict=True):
        assert answer.cause is None
        assert len(answer.tokens[0]) == NUM_TOKENS
        assert_drawn_from(reference(), each.prompt_tokens, answer.tokens[0], sampling)


def test_among_the_few_pairs_is_every_axis():
    assert set(FEW) <= set(itertools.product(PREFILLS, DECODES))
    for side, meshes in enumerate((PREFILLS, DECODES)):
        assert len(meshes) >= 8
        shapes, rules = zip(*(meshes[pair[side]] for pair in FEW), strict=True)
        for axis in ("data", "expert", "tensor", "pipe"):
            assert max(getattr(shape, axis) for shape in shapes) > 1, axis
        assert any(table.kv_tokens for table in rules)
