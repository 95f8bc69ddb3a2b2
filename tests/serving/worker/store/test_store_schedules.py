"""Requests, steps, tiers and faults in any order: no block is ever anything but what its name says, and none is lost.

The device is one that checks contents (`fake_device`), with the scheduler that serves; threads run when the schedule
says so, or never; time is the loop's own. What a device reads behind a step it reads at once, as the real one does.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from moonshard.kv.blocks import BlockPool
from moonshard.kv.prefix import block_names
from moonshard.kv.store.stack import TierStack
from moonshard.serving.control.batching.counters import Counters
from moonshard.serving.control.batching.scheduler import Scheduler, SchedulerConfig
from moonshard.serving.control.request import Request, SequenceId
from moonshard.serving.control.sampling_parameters import Sampling
from moonshard.serving.control.tiers.fetches import FetchTimes
from moonshard.serving.control.tiers.writes import WriteQueue
from moonshard.serving.worker.store import fetching
from moonshard.serving.worker.store.fetching import FetchedFirst, Wanted
from moonshard.serving.worker.store.threads import Asked
from moonshard.serving.worker.store.writing import WriteThrough
from tests.kv.store.kept_tier import KeptTier
from tests.serving.fake_device import VOCAB_SIZE, FakeDevice, true_output, true_tokens
from tests.serving.worker.store.virtual_loop import run_virtually

BLOCK_SIZE, ROOT, NOTHING = 4, b"root", -9
MAX_PENDING = 5
NUM_MOVES = 500


class ScriptedThreads:
    """Runs what it was given when it is told to. What is given up before is never run."""

    def __init__(self) -> None:
        self.pending: list[tuple[Future[Any], Callable[[], Any]]] = []
        self.is_closed = False

    @property
    def is_full(self) -> bool:
        return len(self.pending) >= MAX_PENDING

    def ask(self, work: Callable[..., Any], *arguments: object) -> Asked[Any]:
        return Asked(self._add(work, *arguments))

    look_up = ask

    async def write(self, work: Callable[..., Any], *arguments: object) -> Any:
        return await asyncio.wrap_future(self._add(work, *arguments))

    def write_behind(self, work: Callable[[], None]) -> None:
        self._add(work)

    def _add(self, work: Callable[..., Any], *arguments: object) -> Future[Any]:
        running = Future[Any]()
        self.pending.append((running, lambda: work(*arguments)))
        return running

    def run(self, index: int) -> None:
        running, work = self.pending.pop(index)
        if running.set_running_or_notify_cancel():
            running.set_result(work())


@dataclass
class ScriptedEngine:
    """Launches and completes when it is told to; exports and lands are ordered among its steps."""

    scheduler: Scheduler
    device: FakeDevice
    in_flight: deque[Callable[[], None]] = field(default_factory=deque)
    tokens: dict[SequenceId, list[int]] = field(default_factory=dict)
    ended: set[bytes] = field(default_factory=set)
    is_awake: bool = False

    def counters(self) -> Counters:
        return self.scheduler.counters()

    def wake(self) -> None:
        self.is_awake = True

    def fail(self, error: BaseException) -> None:
        raise error

    def launch(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is not None:
            results = self.device.run(plan)
            self.in_flight.append(lambda: self._deliver(plan.number, results))
        return plan is not None

    def _deliver(self, number: int, results: Any) -> None:
        delivered = self.scheduler.complete(number, results)
        for output in delivered.outputs:
            self.tokens.setdefault(output.sequence, []).extend(output.token_ids)
        self.ended.update(delivered.ended)

    def export(self, partition: int, blocks: Sequence[int], on_done: Callable[[np.ndarray], None]) -> None:
        pages = [self.device.pages.get((partition, block), [None] * BLOCK_SIZE) for block in blocks]
        read = np.array([[NOTHING if token is None else token for token in page] for page in pages], np.int32)
        self.in_flight.append(lambda: on_done(read.reshape(len(blocks), 1, BLOCK_SIZE, 1)))

    def land(self, partition: int, blocks: Sequence[int], payload: np.ndarray, on_done: Callable[[], None]) -> None:
        for block, page in zip(blocks, payload.reshape(len(blocks), BLOCK_SIZE).tolist(), strict=True):
            self.device.pages[partition, block] = page
        self.in_flight.append(on_done)


class World:
    def __init__(self, seed: int, num_partitions: int | None = None, num_blocks: int | None = None) -> None:
        """None: as the seed draws it."""
        self.rng = rng = random.Random(seed)
        self.num_partitions = num_partitions or rng.choice([1, 3])
        self.pool = BlockPool(self.num_partitions, num_blocks or rng.randint(8, 12), BLOCK_SIZE)
        config = SchedulerConfig(
            slots_per_partition=rng.randint(1, 3),
            chunk_tokens=rng.choice([4, 8, 16]),
            max_context_tokens=32,
            max_queued_requests=1000,
            queue_timeout_s=1e6,
            has_next_token_kv=rng.random() < 0.3,
        )
        self.scheduler = Scheduler(config, self.pool)
        self.engine = ScriptedEngine(self.scheduler, FakeDevice(self.pool))
        self.threads = ScriptedThreads()
        self.tiers = [KeptTier(4 * BLOCK_SIZE, name, is_shared=False) for name in ("host", "ssd")]
        self.stack = TierStack(self.tiers)
        parts: dict[str, Any] = {"engine": self.engine, "scheduler": self.scheduler, "stack": self.stack}
        self.queue = WriteQueue(rng.choice([3, 100]), self.num_partitions)
        self.writing = WriteThrough(
            **parts,
            num_partitions=self.num_partitions,
            queue=self.queue,
            threads=self.threads,  # pyright: ignore[reportArgumentType]
            on_kept=lambda kept: None,
        )
        self.times = times = FetchTimes(BLOCK_SIZE)
        if rng.random() < 0.7:
            times.computed(BLOCK_SIZE, rng.choice([0.002, 0.02, 0.2]))  # so that waits are as short
        self.fetching = FetchedFirst(
            **parts,
            pool=self.pool,
            times=times,
            threads=self.threads,  # pyright: ignore[reportArgumentType]
            as_pages=lambda rows: rows.view(np.int32).reshape(len(rows), 1, BLOCK_SIZE, 1),
            on_found=lambda chain, tiers: None,
            on_fetched=self._on_fetched,
            on_came=self._on_came,
        )
        self.requests: dict[bytes, Request] = {}
        self.live: set[bytes] = set()
        self.cancelled: set[bytes] = set()
        self.conversations = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(4, 17))] for _ in range(6)]
        self.right: dict[bytes, list[int]] = {}  # what a block of that name holds
        self.checked: set[bytes] = set()  # in whichever tier: what a tier has it never changes
        self.num_from_tiers = 0

    def _on_came(self, request_id: bytes, tokens: dict[str, int]) -> None:
        self.num_from_tiers += sum(tokens.values())

    def _on_fetched(self, fetched: Any) -> None:
        self.writing.came_up(fetched.names)
        self.threads.write_behind(lambda: self.stack.promote(fetched))

    # ---- moves

    def ask(self) -> None:
        """A turn of a conversation, which its answer prolongs."""
        conversation = self.rng.choice(self.conversations)
        if len(conversation) > 26:
            del conversation[self.rng.randint(9, 17) :]
        conversation += [self.rng.randrange(VOCAB_SIZE) for _ in range(self.rng.randint(0, 3))]
        request = self.a_request(conversation, max_tokens=self.rng.randint(1, 31 - len(conversation)))
        if self.rng.random() < 0.7:
            conversation += true_output(request, 0)[0]
        self.begin(request, self.rng.randrange(self.num_partitions))

    def a_request(self, prompt: Sequence[int], max_tokens: int = 1) -> Request:
        request = Request(
            id=len(self.requests).to_bytes(16, "big"),
            prompt=tuple(prompt),
            sampling=Sampling(seed=self.rng.randrange(3)),
            max_tokens=max_tokens,
            prefix_root=ROOT,
            block_names=tuple(block_names(ROOT, prompt, BLOCK_SIZE)),
        )
        self.requests[request.id] = request
        self.live.add(request.id)
        whole = true_tokens(request, 0, len(request.prompt) + request.max_tokens)
        for index, name in enumerate(block_names(ROOT, whole, BLOCK_SIZE)):
            self.right[name] = whole[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        return request

    def begin(self, request: Request, partition: int = 0) -> None:
        def begin(tokens: dict[str, int]) -> None:
            assert request.id not in self.cancelled
            self.num_from_tiers += sum(tokens.values())
            self.scheduler.add(request, 0.0, None, partition)
            self.engine.wake()
            if self.rng.random() < 0.5:
                self.engine.launch()

        wanted = Wanted(partition=partition, names=request.block_names)
        self.fetching.begin(request.id, wanted, self, begin)  # pyright: ignore[reportArgumentType]

    def cancel(self) -> None:
        if self.live - self.engine.ended:
            request_id = self.rng.choice(sorted(self.live - self.engine.ended))
            self.live.remove(request_id)
            self.cancelled.add(request_id)
            self.fetching.drop(request_id, self)  # pyright: ignore[reportArgumentType]
            self.scheduler.cancel(request_id)

    def launch(self) -> None:
        if len(self.engine.in_flight) < 4:
            self.engine.launch()

    def complete(self) -> None:
        if self.engine.in_flight:
            self.engine.in_flight.popleft()()
            self.writing.step_ended()

    def run_a_thread(self) -> None:
        if self.threads.pending:
            self.threads.run(self.rng.randrange(len(self.threads.pending)))

    def tick(self) -> None:
        self.writing.tick()

    def lose(self) -> None:
        """A tier forgets a block, or it does not come any more."""
        tier = self.rng.choice(self.tiers)
        if tier.kept:
            name = self.rng.choice(sorted(tier.kept))
            if self.rng.random() < 0.5:
                del tier.kept[name]
            else:
                tier.broken.add(name)

    async def move(self) -> None:
        moves = [(self.ask, 1.5), (self.cancel, 0.3), (self.launch, 6), (self.complete, 6), (self.run_a_thread, 10)]
        moves += [(self.tick, 2), (self.lose, 0.2)]
        names, weights = zip(*moves, strict=True)
        self.rng.choices(names, weights)[0]()
        await asyncio.sleep(self.rng.choice([0, 0, 0, 0.001, 0.01, 0.2]))
        self.check()

    # ---- what holds

    def check(self) -> None:
        for tier in self.tiers:
            for name in tier.kept.keys() - self.checked:
                assert np.frombuffer(tier.kept[name], np.int32).tolist() == self.right[name]
            self.checked.update(tier.kept)
        for partition in range(self.num_partitions):
            assert self.pool.counts(partition).total == self.pool.blocks_per_partition

    async def finish(self) -> None:
        for _ in range(2000):
            self.tick()
            self.engine.launch()
            self.complete()
            self.run_a_thread()
            await asyncio.sleep(0.01)
            self.check()
            if self.live <= self.engine.ended and not (self.threads.pending or self.engine.in_flight or self.queue):
                return
        raise AssertionError("it never ends")


async def schedule(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching.time, "perf_counter", asyncio.get_running_loop().time)
    for _ in range(NUM_MOVES):
        await world.move()
    await world.finish()
    for request_id in world.live:
        assert world.engine.tokens[SequenceId(request_id, 0)] == true_output(world.requests[request_id], 0)[0]
    for partition in range(world.num_partitions):
        assert world.pool.num_free(partition) == world.pool.blocks_per_partition
    assert world.fetching.num_waiting == 0


async def until_fetching(world: World) -> None:
    """The one request that waits knows what tiers have, and its fetch waits for a thread."""
    await asyncio.sleep(0)
    world.threads.run(0)
    await asyncio.sleep(0.001)
    assert len(world.threads.pending) == 1


def compute(world: World, prompt: Sequence[int]) -> None:
    """A request of this prompt comes, is served and goes, without a word to the tiers."""
    request = world.a_request(prompt)
    world.scheduler.add(request, 0.0, None, 0)
    while request.id not in world.engine.ended:
        world.engine.launch()
        world.complete()


def in_tier(world: World, request: Request) -> None:
    for name in request.block_names:
        world.tiers[1].kept[name] = np.array(world.right[name], np.int32).tobytes()


PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0, 1, 1, 1, 1, 2]  # four blocks and a token


def test_what_was_computed_meanwhile_is_not_landed_again():
    async def scenario(world: World) -> None:
        request = world.a_request(PROMPT)
        in_tier(world, request)
        world.begin(request)
        await until_fetching(world)
        compute(world, [*PROMPT[:8], 3])
        world.threads.run(0)
        await world.finish()
        assert world.num_from_tiers == 2 * BLOCK_SIZE

    run_virtually(scenario(World(0, num_partitions=1, num_blocks=16)))


def test_what_is_behind_blocks_that_are_lost_while_tiers_are_asked_is_not_fetched():
    async def scenario(world: World) -> None:
        compute(world, [*PROMPT[:8], 3])
        request = world.a_request(PROMPT)
        in_tier(world, request)
        world.begin(request)
        await asyncio.sleep(0)
        for number in range(3):
            compute(world, [number] * 27)  # takes all blocks but one
        world.threads.run(0)  # which tells where the last two are
        await world.finish()
        assert world.num_from_tiers == 0

    run_virtually(scenario(World(0, num_partitions=1, num_blocks=8)))


def test_what_the_device_has_stays_while_the_rest_is_fetched():
    async def scenario(world: World) -> None:
        compute(world, [*PROMPT[:8], 3])
        request = world.a_request(PROMPT)
        in_tier(world, request)
        world.begin(request)
        await until_fetching(world)
        compute(world, [9] * 15)  # takes all others
        world.threads.run(0)
        await world.finish()
        assert world.num_from_tiers == 2 * BLOCK_SIZE

    run_virtually(scenario(World(0, num_partitions=1, num_blocks=8)))


def hurried(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is virtual, and computing so slow that every fetch is worth it."""
    monkeypatch.setattr(fetching.time, "perf_counter", asyncio.get_running_loop().time)
    for _ in range(100):
        world.times.computed(BLOCK_SIZE, 0.5)


async def asked(world: World, request: Request) -> None:
    """The request comes, and tiers have told what they have of it."""
    world.begin(request)
    await asyncio.sleep(0)
    world.threads.run(0)
    await asyncio.sleep(0.1)


def serve(world: World, request: Request) -> None:
    while request.id not in world.engine.ended:
        world.engine.launch()
        world.complete()


def test_a_request_fetches_once_there_is_room_and_enters_before_who_came_later(monkeypatch: pytest.MonkeyPatch):
    async def scenario(world: World) -> None:
        hurried(world, monkeypatch)
        before, request, behind = world.a_request([9] * 19), world.a_request(PROMPT), world.a_request([8] * 19)
        in_tier(world, request)
        world.scheduler.add(before, 0.0, None, 0)
        world.engine.launch()
        await asked(world, request)
        world.scheduler.add(behind, 0.0, None, 0)
        assert not world.threads.pending  # there is no room for it
        serve(world, before)
        world.engine.launch()
        await asyncio.sleep(0)
        assert len(world.threads.pending) == 1  # its blocks
        assert not world.scheduler.has_unlaunched
        world.threads.run(0)
        await asyncio.sleep(0.001)
        assert world.num_from_tiers == 4 * BLOCK_SIZE
        serve(world, request)
        assert behind.id not in world.engine.ended
        await world.finish()

    run_virtually(scenario(World(0, num_partitions=1, num_blocks=8)))


def test_what_tiers_tell_late_is_of_use_to_a_request_that_has_to_wait(monkeypatch: pytest.MonkeyPatch):
    async def scenario(world: World) -> None:
        hurried(world, monkeypatch)
        before, request = world.a_request([9] * 19), world.a_request(PROMPT)
        in_tier(world, request)
        world.scheduler.add(before, 0.0, None, 0)
        world.engine.launch()
        world.begin(request)
        await asyncio.sleep(1.0)
        assert world.fetching.num_waiting == 0  # it is begun by now
        world.threads.run(0)
        await asyncio.sleep(0.001)
        serve(world, before)
        world.engine.launch()
        await asyncio.sleep(0)
        world.threads.run(0)
        await world.finish()
        assert world.num_from_tiers == 4 * BLOCK_SIZE

    run_virtually(scenario(World(0, num_partitions=1, num_blocks=8)))


def test_a_request_that_ends_while_it_is_brought_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    async def scenario(world: World) -> None:
        hurried(world, monkeypatch)
        before, request = world.a_request([9] * 19), world.a_request(PROMPT)
        in_tier(world, request)
        world.scheduler.add(before, 0.0, None, 0)
        world.engine.launch()
        await asked(world, request)
        serve(world, before)
        world.engine.launch()
        await asyncio.sleep(0)
        world.live.remove(request.id)
        world.scheduler.cancel(request.id)
        world.threads.run(0)
        await world.finish()
        assert world.pool.num_free(0) == 8

    run_virtually(scenario(World(0, num_partitions=1, num_blocks=8)))


def test_a_request_whose_blocks_do_not_come_in_time_is_computed(monkeypatch: pytest.MonkeyPatch):
    async def scenario(world: World) -> None:
        hurried(world, monkeypatch)
        before, request = world.a_request([9] * 19), world.a_request(PROMPT)
        in_tier(world, request)
        world.scheduler.add(before, 0.0, None, 0)
        world.engine.launch()
        await asked(world, request)
        serve(world, before)
        world.engine.launch()
        await asyncio.sleep(10.0)  # and no thread takes it
        assert world.fetching.num_late == 1
        serve(world, request)
        await world.finish()
        assert world.num_from_tiers == 0

    run_virtually(scenario(World(0, num_partitions=1, num_blocks=8)))


def test_who_has_waited_in_vain_for_what_another_fetches_does_not_wait_as_long_again(monkeypatch: pytest.MonkeyPatch):
    async def scenario(world: World) -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(fetching.time, "perf_counter", loop.time)
        for _ in range(100):
            world.times.computed(BLOCK_SIZE, 0.5)
        first, second = world.a_request(PROMPT), world.a_request(PROMPT)
        in_tier(world, first)
        began_s = loop.time()
        world.begin(first)
        await until_fetching(world)  # and no thread takes it
        world.begin(second)
        while world.fetching.num_waiting:
            await asyncio.sleep(0.01)
            for index, (running, _) in reversed(list(enumerate(world.threads.pending))):
                if index or running.cancelled():  # the second one's look-up
                    world.threads.run(index)
        both_s = world.times.compute_s(2 * len(PROMPT))  # the first one is computed before the second by now
        assert both_s is not None
        assert loop.time() - began_s < 1.2 * both_s
        await world.finish()

    run_virtually(scenario(World(0, num_partitions=1, num_blocks=16)))


def run_schedule(seed: int, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(seed)
    with monkeypatch.context() as patch:
        run_virtually(schedule(world, patch))
    return world


def test_every_block_is_what_its_name_says_and_every_request_ends(monkeypatch: pytest.MonkeyPatch):
    worlds = [run_schedule(seed, monkeypatch) for seed in range(40)]
    assert sum(world.num_from_tiers for world in worlds) > 500  # that it happens at all
    assert sum(world.fetching.num_late for world in worlds) > 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(100, 10_100, 1000))
def test_in_ten_thousand_schedules(monkeypatch: pytest.MonkeyPatch, first: int):
    for seed in range(first, first + 1000):
        run_schedule(seed, monkeypatch)
