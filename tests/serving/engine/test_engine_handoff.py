"""KV prefilled in one engine and landed in another gives there the tokens that it gives at home."""

import asyncio
from dataclasses import replace

import jax
import numpy as np
import pytest

from moonshard.kv.blocks import BlockPool
from moonshard.serving.control.plan import PrefillPlan
from moonshard.serving.control.request import Request, SequenceId
from moonshard.serving.control.sampling_parameters import Sampling
from moonshard.serving.engine.clocks import Phases
from moonshard.serving.engine.events import StepReport
from moonshard.serving.engine.steps import NOWHERE, Step, StepKind
from tests.agreement import assert_drawn_from, reference
from tests.engine_room import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    TRANSFER_BUCKETS,
    Run,
    an_engine,
    long_text,
    programs,
    request,
    serve,
    uncompiled_programs,
    until_idle,
)

pytestmark = pytest.mark.xdist_group("jax")
LARGEST = TRANSFER_BUCKETS[-1]


class Prefiller:
    """An engine that exports every block as soon as the chunk that fills it was launched."""

    def __init__(self, num_blocks: int = NUM_BLOCKS):
        self.run = Run()
        self.exported: dict[bytes, list[np.ndarray]] = {}
        self._engine = an_engine(
            programs(), BlockPool(1, num_blocks, BLOCK_SIZE), self.run.take, self._export, max_prefill_sequences=1
        )

    async def prefill(self, *requests: Request) -> None:
        self._engine.start()
        for each in requests:
            self._engine.submit(replace(each, max_tokens=1))
        await until_idle(self._engine)
        await self._engine.close()

    def kv(self, asked: Request) -> np.ndarray:
        """The KV of the whole prompt. Whatever lies behind the prompt in the last block is not compared."""
        kv = np.concatenate(self.exported[asked.id])
        num_rest = -len(asked.prompt) % BLOCK_SIZE
        return kv[:-1] if num_rest else kv

    def _export(self, plan: PrefillPlan) -> None:
        for chunk in plan.chunks:
            first = chunk.start // BLOCK_SIZE
            end = -(-(chunk.start + len(chunk.tokens)) // BLOCK_SIZE)
            into = self.exported.setdefault(chunk.request.id, [])
            self._engine.export(chunk.slot.partition, chunk.block_table[first:end], into.append)


async def decode(asked: Request, kv: np.ndarray, tokens: tuple[int, ...]) -> tuple[Run, list[Phases]]:
    """The tokens that a second engine decodes, without the first ones; its pool is partly taken, so ids differ."""
    run, phases, blocks = Run(), [], BlockPool(1, NUM_BLOCKS, BLOCK_SIZE)
    others = blocks.allocate(0, 7) or ()

    def take(report: StepReport) -> None:
        run.take(report)
        phases.extend(emitted.phases for emitted in report.emitted if emitted.phases is not None)

    engine = an_engine(programs(worker=1), blocks, take)
    engine.start()
    table = blocks.allocate(0, len(kv)) or ()
    engine.land(0, table, kv, lambda: None)
    assert engine.join(asked, 0, table, tokens, land_ms=3.0)
    await until_idle(engine)
    await engine.close()
    blocks.release(0, others)
    assert blocks.counts(0).free == NUM_BLOCKS
    return run, phases


def handed_off(asked: Request) -> list[list[int]]:
    """The tokens of every choice of a request that one engine prefills and another decodes."""

    async def both() -> list[list[int]]:
        prefiller = Prefiller()
        await prefiller.prefill(asked)
        choices = [SequenceId(asked.id, choice) for choice in range(asked.n)]
        first = tuple(prefiller.run.tokens[choice][0] for choice in choices)
        run, _ = await decode(asked, np.concatenate(prefiller.exported[asked.id]), first)
        return [[token, *run.tokens[choice]] for token, choice in zip(first, choices, strict=True)]

    return asyncio.run(both())


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(seed=2**63 + 5)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_tokens", [15, 16, 17, 63, 64, 65, 300])
def test_a_request_prefilled_here_and_decoded_there_gets_the_references_tokens(num_tokens, sampling):
    asked = request(long_text(num_tokens), sampling=sampling)
    (tokens,) = handed_off(asked)
    assert len(tokens) == 64
    assert_drawn_from(reference(), asked.prompt, tokens, sampling)


def test_penalties_count_the_prompt_and_the_first_token_once():
    penalties = Sampling(seed=4, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3)
    asked = request(long_text(70), 60, sampling=penalties)
    assert handed_off(asked) == [serve([asked]).of(asked)]


def test_every_choice_goes_on_from_its_own_first_token():
    asked = request(long_text(37), 30, sampling=Sampling(seed=3, frequency_penalty=0.3), n=3)
    run = serve([asked])
    assert handed_off(asked) == [run.of(asked, choice) for choice in range(3)]


def test_an_export_behind_a_chunk_sees_it_and_not_who_takes_the_blocks_next():
    first, second, third = (request(long_text(150, seed=n), 1) for n in range(3))
    num_blocks = -(-151 // BLOCK_SIZE)  # one request at a time, each in the blocks of the one before

    async def kv_of(*requests: Request) -> list[np.ndarray]:
        prefiller = Prefiller(num_blocks)
        await prefiller.prefill(*requests)
        return [prefiller.kv(each) for each in requests]

    together = asyncio.run(kv_of(first, second, third))
    for each, kv in zip((first, second, third), together, strict=True):
        (alone,) = asyncio.run(kv_of(each))
        assert kv.any()
        np.testing.assert_array_equal(kv, alone)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_are_bit_equal_in_the_pages_of_another_worker(dtype):
    here, there = uncompiled_programs(dtype=dtype), uncompiled_programs(dtype=dtype)
    shape = (LARGEST, *pages_of(here).shape[1:])
    bits = np.random.default_rng(5).integers(0, 2**32, shape, np.uint32)
    given = bits.view(np.float32) if dtype == "float32" else bits.astype(np.uint16).view(pages_of(here).dtype)
    is_finite = np.isfinite(given.astype(np.float32))
    assert not is_finite.all()
    move(here, given, (9, 0, NUM_BLOCKS - 1, 31))
    (exported,) = exports(here, (9, 0, NUM_BLOCKS - 1, 31))
    move(there, exported, (4, 100, NOWHERE, 0))
    (found,) = exports(there, (4, 100, 0, 1))
    as_bits = np.dtype(f"u{given.itemsize}")
    expected = np.where(is_finite, given.view(as_bits), 0)
    np.testing.assert_array_equal(exported.view(as_bits), expected)
    np.testing.assert_array_equal(found[:3].view(as_bits), expected[[0, 1, 3]])
    assert np.count_nonzero(np.asarray(pages_of(there), np.float32).any(axis=(1, 2, 3))) == 3  # and nowhere else


def test_exports_and_lands_leave_the_pages_at_their_address():
    worker = uncompiled_programs()
    place = pages_of(worker).unsafe_buffer_pointer()
    for _ in range(3):
        (kv,) = exports(worker, (1, 2, 3, 4))
        move(worker, kv, (4, 3, 2, 1))
        assert pages_of(worker).unsafe_buffer_pointer() == place


def test_a_land_has_ended_when_it_was_waited_for():
    worker = uncompiled_programs()
    packed, _ = worker.shapes.layout(StepKind.LAND, 1).blank()
    payload = np.ones((1, *pages_of(worker).shape[1:]), np.float32)
    launched = worker.launch(Step(-2, StepKind.LAND, 1, packed, payload=payload))
    assert launched.results  # else nothing would be waited for
    worker.fetch(launched)
    assert all(array.is_ready() for array in jax.tree.leaves(worker.stages[0].state))


def pages_of(worker) -> jax.Array:
    return worker.stages[0].state.pages


def move(worker, payload: np.ndarray, blocks: tuple[int, ...]) -> None:
    packed, fields = worker.shapes.layout(StepKind.LAND, len(blocks)).blank()
    fields["destination"][:] = blocks
    assert worker.fetch(worker.launch(Step(-2, StepKind.LAND, len(blocks), packed, payload=payload))) is None


def exports(worker, *asked: tuple[int, ...]) -> list[np.ndarray]:
    found = []
    for blocks in asked:
        packed, fields = worker.shapes.layout(StepKind.EXPORT, len(blocks)).blank()
        fields["source"][:] = blocks
        found.append(worker.fetch(worker.launch(Step(-2, StepKind.EXPORT, len(blocks), packed))))
    return found
