"""What comes from a tier below the device's pages is what was computed: the same tokens, after a restart, on any mesh,
and whatever goes wrong with the tier.
"""

import asyncio
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from moonshard.kv.prefix import block_names
from moonshard.kv.store.stack import TierStack
from moonshard.rpc import link_pb2
from moonshard.serving.control.sampling_parameters import Sampling
from moonshard.serving.worker.store import fetching
from moonshard.serving.worker.worker import Worker
from moonshard.sharding.rules import DecodeRules
from moonshard.sharding.shape import MeshShape
from tests.agreement import assert_drawn_from, reference
from tests.engine_room import long_text
from tests.kv.store.kept_tier import KeptTier
from tests.serving.pd.pd_pair import ALONE, Answer, Meshes, Pair, loaded, run, running
from tests.sizes import BLOCK_SIZE

pytestmark = pytest.mark.xdist_group("jax")
GREEDY = Sampling(temperature=0.0)
BY_TOKENS = DecodeRules(kv_tokens=("tensor",))
ROOT = b"the root of these names"
MESHES = {  # what writes, what reads
    "alone to data 2 expert 2": (ALONE, Meshes(prefill=MeshShape(data=2, expert=2))),
    "expert 2 to pipe 2": (Meshes(prefill=MeshShape(expert=2)), Meshes(prefill=MeshShape(pipe=2))),
    "pipe 2 to tensor 2": (Meshes(prefill=MeshShape(pipe=2)), Meshes(prefill=MeshShape(tensor=2))),
    "expert 4 to tensor 2 pipe 2": (
        Meshes(prefill=MeshShape(expert=4)),
        Meshes(prefill=MeshShape(tensor=2, pipe=2)),
    ),
}
FEW = ("alone to data 2 expert 2",)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may be so loaded that even a dictionary takes longer than is waited for otherwise."""
    monkeypatch.setattr(fetching, "FIND_WAIT_S", 3.0)


def a_tier() -> KeptTier:
    return KeptTier(block_bytes=loaded("prefill").block_bytes)


def stack_of(tier: KeptTier) -> TierStack:
    return TierStack([tier])


def named(prompt: Sequence[int], max_tokens: int = 20, **fields) -> link_pb2.Run:
    return run(
        prompt, max_tokens, prefix_root=ROOT, block_names=b"".join(block_names(ROOT, prompt, BLOCK_SIZE)), **fields
    )


async def ask(pair: Pair, each: link_pb2.Run) -> Answer:
    answer = await pair.ask(each)
    assert answer.cause is None
    assert_drawn_from(reference(), each.prompt_tokens, answer.tokens[0], GREEDY)
    return answer


async def written(worker: Worker) -> None:
    """All that the worker knows has gone down."""
    async with asyncio.timeout(120):
        await worker.wait_idle()


async def write(tier: KeptTier, prompts: Sequence[Sequence[int]], meshes: Meshes = ALONE) -> list[Answer]:
    """A first life of the workers: the answers to prompts that nobody knew."""
    async with running(meshes=meshes, tiers=(stack_of(tier), None)) as pair:
        answers = [await ask(pair, named(prompt)) for prompt in prompts]
        await written(pair.prefill)
    return answers


@pytest.mark.parametrize("length", [15, 16, 17, 64, 65, 300])
async def test_after_a_restart_the_full_blocks_of_a_prompt_come_from_the_tier(length: int):
    tier, prompt, num_full = a_tier(), long_text(length), length // BLOCK_SIZE
    (cold,) = await write(tier, [prompt])
    assert cold.num_cached == 0
    assert len(tier.kept) == num_full
    async with running(tiers=(stack_of(tier), None)) as pair:
        again = await ask(pair, named(prompt))
        assert again.tokens == cold.tokens
        assert again.num_cached == (num_full * BLOCK_SIZE if length % BLOCK_SIZE else length - 1)
        assert sum(again.by_tier.values()) == num_full * BLOCK_SIZE
        from_device = await ask(pair, named(prompt))
        assert from_device.tokens == cold.tokens
        assert from_device.by_tier == {}
        assert tier.num_fetched == num_full


@pytest.mark.parametrize(
    ("writer", "reader"),
    [pytest.param(*meshes, id=name, marks=[] if name in FEW else pytest.mark.slow) for name, meshes in MESHES.items()],
)
async def test_what_one_mesh_wrote_another_reads_bit_for_bit(writer: Meshes, reader: Meshes):
    tier, prompt = a_tier(), long_text(100)
    (cold,) = await write(tier, [prompt], writer)
    names = block_names(ROOT, prompt, BLOCK_SIZE)
    async with running(meshes=reader, tiers=(stack_of(tier), None)) as pair:
        partition = reader.prefill.num_partitions - 1
        answer = await pair.ask(named(prompt), prefill_partition=partition)
        assert_drawn_from(reference(), prompt, answer.tokens[0], GREEDY)
        assert (answer.num_cached, answer.by_tier) == (96, {"store": 96})
        assert await exported(pair.prefill, partition, names) == [tier.kept[name] for name in names]
        assert len(answer.tokens[0]) == len(cold.tokens[0])


async def exported(worker: Worker, partition: int, names: Sequence[bytes]) -> list[bytes]:
    """The bytes of blocks that the worker's cache knows."""
    done = asyncio.get_running_loop().create_future()
    blocks = worker._scheduler.cache.match(partition, names)
    assert len(blocks) == len(names)
    worker.engine.export(partition, blocks, done.set_result)
    return [np.ascontiguousarray(block).tobytes() for block in await done]


async def test_whatever_ran_beside_it_a_kept_block_is_what_the_device_has():
    rng, tier = random.Random(3), a_tier()
    prompts = [long_text(rng.randint(20, 300), seed=n) for n in range(8)]
    async with running(tiers=(None, stack_of(tier))) as pair:
        runs = [named(prompt, rng.randint(20, 80)) for prompt in prompts]
        await asyncio.gather(*map(pair.ask_decode_alone, runs))
        await written(pair.decode)
        known = pair.decode._scheduler.cache.snapshot(0)
        assert len(known) > 50
        assert set(known) <= set(tier.kept)
        for name in known:
            assert await exported(pair.decode, 0, [name]) == [tier.kept[name]]


async def test_generated_tokens_go_down_too_and_the_next_turn_finds_them():
    tier, prompt = a_tier(), long_text(40)
    async with running(tiers=(None, stack_of(tier))) as pair:
        answer = await pair.ask_decode_alone(named(prompt, 60))
        await written(pair.decode)
    turn = [*prompt, *answer.tokens[0], *long_text(30, seed=1)]
    async with running(tiers=(None, stack_of(tier))) as pair:
        again = await pair.ask_decode_alone(named(turn))
        assert_drawn_from(reference(), turn, again.tokens[0], GREEDY)
        assert again.num_cached == (40 + 60 - 1) // BLOCK_SIZE * BLOCK_SIZE


async def test_a_block_that_does_not_come_ends_what_is_used_of_the_tier():
    tier, prompt = a_tier(), long_text(100)
    await write(tier, [prompt])
    names = block_names(ROOT, prompt, BLOCK_SIZE)
    tier.broken.add(names[3])
    async with running(tiers=(stack_of(tier), None)) as pair:
        answer = await ask(pair, named(prompt))
        assert (answer.num_cached, answer.by_tier) == (48, {"store": 48})
        await written(pair.prefill)


async def test_requests_that_begin_alike_fetch_their_blocks_once():
    tier, prompt = a_tier(), long_text(100)
    (cold,) = await write(tier, [prompt])
    async with running(tiers=(stack_of(tier), None)) as pair:
        answers = await asyncio.gather(*(ask(pair, named(prompt)) for _ in range(6)))
        assert all(answer.tokens == cold.tokens for answer in answers)
        assert all(answer.num_cached == 96 for answer in answers)
        assert tier.num_fetched == 6


@pytest.mark.parametrize("of", ["find", "fetch"])
async def test_a_tier_that_hangs_delays_no_request_for_long_and_none_is_lost(of: str):
    tier, prompts = a_tier(), [long_text(100, seed=n) for n in range(8)]
    await write(tier, prompts)
    may_go = tier.find_may_go if of == "find" else tier.fetch_may_go
    async with running(tiers=(stack_of(tier), None)) as pair:
        may_go.clear()
        try:
            answers = await asyncio.wait_for(asyncio.gather(*(ask(pair, named(each)) for each in prompts)), 60)
            assert all(answer.by_tier == {} for answer in answers)
        finally:
            may_go.set()
        await written(pair.prefill)


async def refused(pair: Pair, asked: link_pb2.Run) -> None:
    """A message about it does not hold together: nothing of the request is served any more."""
    to_prefill, pair.to_prefill = pair.to_prefill, lambda message, link: None  # the gateway's cancel is lost
    malformed = link_pb2.Credits(handoff=asked.request_id, target_epoch=b"short")
    to_prefill(link_pb2.GatewayMessage(credits=malformed), pair.link(pair.prefill))


async def left(pair: Pair, asked: link_pb2.Run) -> None:
    pair.cancel(asked)


async def lost(pair: Pair, asked: link_pb2.Run) -> None:
    pair.prefill.close_link(pair.link(pair.prefill))
    pair.decode.close_link(pair.link(pair.decode))


@pytest.mark.parametrize("ends", [left, lost, refused])
async def test_a_request_that_ends_while_its_blocks_come_leaves_nothing_behind(ends: Callable):
    tier, prompt = a_tier(), long_text(100)
    await write(tier, [prompt])
    async with running(tiers=(stack_of(tier), None)) as pair:
        tier.is_fetching.clear()
        tier.fetch_may_go.clear()
        try:
            asked = named(prompt)
            pair.begin(asked)
            assert await asyncio.to_thread(tier.is_fetching.wait, 30)
            await ends(pair, asked)
        finally:
            tier.fetch_may_go.set()
        await written(pair.prefill)
        assert pair.prefill.engine.counters().totals.num_prefill_steps == 0
