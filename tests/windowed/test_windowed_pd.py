"""Handoffs of a model with a window: of its group only what decode still sees is moved, and the tokens stay the same.

The two workers compute prompts in chunks of different sizes, so that the same columns have different places in the
blocks that each of them holds for the window.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from moonshard.kv.inproc import InprocNetwork, InprocTransport
from moonshard.kv.slab import Slab
from moonshard.serving.config.keys import WorkerRole
from moonshard.serving.control.sampling_parameters import Sampling
from moonshard.serving.engine.compiled.compilations import CompilationCounter
from moonshard.serving.transfer.plane import KvPlane
from moonshard.serving.worker.spans import WorkerSpans
from moonshard.serving.worker.worker import Worker
from tests.serving.pd.pd_pair import LEASE_S, Pair, run, until_as_it_began
from tests.windowed.folder import WINDOW, a_prompt
from tests.windowed.room import BLOCK_SIZE, assert_drawn_from, config, loaded

pytestmark = pytest.mark.xdist_group("jax")
LENGTHS = [1, 15, 16, 39, 40, 41, 64, 65, 150, 500]
CHUNKS = [
    (32, 128),
    pytest.param((128, 32), marks=pytest.mark.slow),
    pytest.param((64, 64), marks=pytest.mark.slow),
]  # of the prefill worker and the decode worker
SEEDED = {"temperature": 1.0, "seed": 7}
NUM_SLAB_CELLS = 8  # fewer than a long prompt has blocks


@asynccontextmanager
async def a_pair(
    folder: Path,
    chunk_tokens: tuple[int, int] = (32, 128),
    *,
    num_slab_cells: int = NUM_SLAB_CELLS,
    **decode_kv: object,
) -> AsyncIterator[Pair]:
    """A pair that serves; afterwards every pool and slab must be as it began."""
    network = InprocNetwork()
    for_prefill, for_decode = chunk_tokens
    prefill = _worker(folder, "prefill", for_prefill, network, num_slab_cells)
    decode = _worker(folder, "decode", for_decode, network, num_slab_cells, **decode_kv)
    for worker in (prefill, decode):
        worker.start()
    try:
        yield Pair(prefill, decode)
        async with asyncio.timeout(30):
            for worker in (prefill, decode):
                await until_as_it_began(worker)
    finally:
        for worker in (prefill, decode):
            await worker.close()
            worker.engine.failed.cancel()


def _worker(
    folder: Path, role: WorkerRole, chunk_tokens: int, network: InprocNetwork, num_slab_cells: int, **kv: object
) -> Worker:
    model = loaded(folder, chunk_tokens, role, **kv)
    plane = KvPlane(
        InprocTransport(network),
        Slab(num_slab_cells, model.block_bytes),
        name="inproc",
        layout=model.layout,
        fingerprint=model.fingerprint,
        num_partitions=1,
    )
    asked = config(folder, chunk_tokens, quarantine_s=0.2, lease_s=LEASE_S, **kv)
    return Worker(asked, role, model, CompilationCounter(), plane, spans=WorkerSpans())


def num_moved(length: int) -> int:
    """All columns of the full group, and those of the window that the token behind the prompt sees."""
    seen = {position // BLOCK_SIZE for position in range(max(0, length - WINDOW + 1), length)}
    return -(-length // BLOCK_SIZE) + len(seen)


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("chunk_tokens", CHUNKS, ids=str)
async def test_handed_over_requests_give_the_reference_tokens(folder, reference, chunk_tokens, sampling):
    async with a_pair(folder, chunk_tokens) as pair:
        runs = [run(a_prompt(length, seed=length), 100, sampling=sampling) for length in LENGTHS]
        answers = await asyncio.gather(*(pair.ask(each) for each in runs))
        for each, answer in zip(runs, answers, strict=True):
            assert answer.cause is None
            assert len(answer.tokens[0]) == 100
            drawn = Sampling(**{"temperature": 0.0, **sampling})
            assert_drawn_from(reference, each.prompt_tokens, answer.tokens[0], drawn)


@pytest.mark.parametrize("chunk_tokens", CHUNKS, ids=str)
async def test_of_the_window_only_what_decode_still_sees_is_moved(folder, chunk_tokens):
    async with a_pair(folder, chunk_tokens) as pair:
        moved = 0
        for length in LENGTHS:
            await pair.ask(run(a_prompt(length, seed=length), 2))
            kv = pair.decode.inspect().load.kv_transfer
            assert kv.num_landed_blocks - moved == num_moved(length)
            assert pair.prefill.inspect().load.kv_transfer.published_bytes == kv.landed_bytes
            moved = kv.num_landed_blocks
        num_columns = sum(-(-length // BLOCK_SIZE) for length in LENGTHS)
        assert num_columns < moved < 1.5 * num_columns


async def test_choices_share_one_handoff(folder, reference):
    async with a_pair(folder) as pair:
        for length in (30, 48, 150):
            each = run(a_prompt(length, seed=length), 60, sampling=SEEDED, n=3)
            before = pair.decode.inspect().load.kv_transfer.num_landed_blocks
            answer = await pair.ask(each)
            assert len({tuple(tokens) for tokens in answer.tokens.values()}) == 3
            for choice in range(3):
                assert len(answer.tokens[choice]) == 60
                drawn = Sampling(**SEEDED)
                assert_drawn_from(reference, each.prompt_tokens, answer.tokens[choice], drawn, choice)
            assert pair.decode.inspect().load.kv_transfer.num_landed_blocks - before == num_moved(length)


@pytest.mark.parametrize("chunk_tokens", [(32, 128), (128, 32)], ids=str)
async def test_a_landed_request_that_is_preempted_is_prefilled_again_in_the_other_chunks(
    folder, reference, chunk_tokens
):
    async with a_pair(folder, chunk_tokens, num_blocks=52) as pair:
        runs = [run(a_prompt(70 + n, seed=n), 200, sampling=SEEDED) for n in range(6)]
        answers = await asyncio.gather(*(pair.ask(each) for each in runs))
        assert pair.decode.engine.counters().totals.num_preemptions > 0
        for each, answer in zip(runs, answers, strict=True):
            assert answer.cause is None
            assert len(answer.tokens[0]) == 200
            assert_drawn_from(reference, each.prompt_tokens, answer.tokens[0], Sampling(**SEEDED))


async def test_handoffs_and_prefills_where_they_are_decoded_get_the_same_tokens_side_by_side(folder, reference):
    async with a_pair(folder) as pair:
        prompts = [a_prompt(length, seed=length) for length in (64, 150, 300, 500)]
        answers = await asyncio.gather(
            *(pair.ask(run(prompt, 100)) for prompt in prompts),
            *(pair.ask_decode_alone(run(prompt, 100)) for prompt in prompts),
        )
        for prompt, answer in zip(prompts * 2, answers, strict=True):
            assert answer.tokens[0] == reference.greedy(prompt, 100)


async def test_one_cell_on_each_side_is_enough(folder, reference):
    async with a_pair(folder, num_slab_cells=1) as pair:
        each = run(a_prompt(500, seed=500), 100)
        answer = await pair.ask(each)
        assert_drawn_from(reference, each.prompt_tokens, answer.tokens[0], Sampling(temperature=0.0))


@pytest.mark.parametrize("chunk_tokens", [(32, 128), (128, 32)], ids=str)
async def test_a_cancel_at_any_moment_leaves_nothing(folder, reference, chunk_tokens):
    async with a_pair(folder, chunk_tokens) as pair:
        for num_rounds in range(30):
            each = run(a_prompt(100 + num_rounds, seed=num_rounds), 50)
            answer = pair.begin(each)
            for _ in range(num_rounds * 5):
                await asyncio.sleep(0)
            pair.cancel(each)
            await answer.is_over.wait()
        for worker in (pair.prefill, pair.decode):
            await until_as_it_began(worker)
        each = run(a_prompt(150, seed=150), 100)
        answer = await pair.ask(each)
        assert_drawn_from(reference, each.prompt_tokens, answer.tokens[0], Sampling(temperature=0.0))
