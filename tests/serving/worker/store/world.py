"""Requests, steps, tiers and faults as a schedule has them, around the objects that serve.

The device is one that checks contents (`fake_device`), with the scheduler that serves; threads run when the schedule
says so, or never; time is the loop's own. What a device reads behind a step it reads at once, as the real one does.
"""

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moonshard.kv.blocks import BlockPool
from moonshard.kv.prefix import Spaces, block_names
from moonshard.serving.control.batching.counters import Counters
from moonshard.serving.control.batching.scheduler import Scheduler, SchedulerConfig
from moonshard.serving.control.request import Request, SequenceId
from moonshard.serving.control.sampling_parameters import Sampling
from moonshard.serving.control.tiers.fetches import FetchTimes
from moonshard.serving.control.tiers.writes import WriteQueue
from moonshard.serving.worker.store.fetching import FetchedFirst, Wanted
from moonshard.serving.worker.store.writing import WriteThrough
from moonshard.sharding.layout import BlockShape
from tests.serving.fake_device import VOCAB_SIZE, FakeDevice, true_output, true_tokens
from tests.serving.worker.store.members import FollowingProcess, Process, places_of

BLOCK_SIZE, ROOT, NOTHING = 4, b"root", -9
FEW, MANY = 3, 100  # blocks that a queue holds
BLOCK = BlockShape(name="kv", dtype="int32", itemsize_bytes=4, block_size=BLOCK_SIZE, num_layers=1, num_features=1)


@dataclass
class ScriptedEngine:
    """Launches and completes when it is told to; exports and lands are ordered among its steps."""

    scheduler: Scheduler
    device: FakeDevice
    process_of: Callable[[int], Process]  # by partition
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

    def export(self, partition: int, blocks: Sequence[int], on_done: Callable[[np.ndarray], None], ticket: int) -> None:
        pages = [self.device.pages.get((partition, block), [None] * BLOCK_SIZE) for block in blocks]
        read = np.array([[NOTHING if token is None else token for token in page] for page in pages], np.int32)
        found, process = read.reshape(len(blocks), 1, BLOCK_SIZE, 1), self.process_of(partition)
        for part in (found[:1], found[1:]):  # as where one step does not take all
            if len(part):
                process.exported(ticket, partition, part)
        here = found if process is self.process_of(0) else found[:, :0]
        self.in_flight.append(lambda: on_done(here))

    def land(
        self, partition: int, blocks: Sequence[int], payload: np.ndarray, on_done: Callable[[], None], ticket: int
    ) -> None:
        process = self.process_of(partition)
        parts = [process.landed(ticket, partition, part) for part in (payload[:1], payload[1:]) if len(part)]
        payload = np.concatenate(parts)
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
        self.spaces = Spaces(self.num_partitions, self.num_partitions if seed % 2 else 1)
        self.engine = ScriptedEngine(self.scheduler, FakeDevice(self.pool), self.process_of)
        followers = (
            FollowingProcess(BLOCK, member, self.spaces.partitions_of(member), self.engine.fail)
            for member in range(1, self.spaces.num_processes)
        )
        self.processes: list[Process] = [Process(BLOCK), *followers]
        self.threads = self.processes[0].threads
        self.tiers = [tier for process in self.processes for tier in process.tiers]
        self.stack = self.processes[0].stack
        engine: Any = self.engine
        each = places_of(self.processes, engine, BLOCK, itertools.count())
        places = [each[self.spaces.process_of(partition)] for partition in range(self.num_partitions)]
        parts: dict[str, Any] = {"engine": self.engine, "scheduler": self.scheduler}
        max_queued = rng.choice([FEW, MANY])
        self.queues, self.writers = list[WriteQueue](), list[WriteThrough]()
        for index, place in enumerate(each):
            partitions = self.spaces.partitions_of(index)
            self.queues.append(WriteQueue(max_queued, partitions, self.stack.names))
            self.writers.append(
                WriteThrough(
                    **parts,
                    place=place,
                    partitions=partitions,
                    queue=self.queues[-1],
                    on_kept=lambda kept: None,
                    clock=lambda: asyncio.get_running_loop().time(),
                )
            )
        self._may_lose = max_queued == FEW
        self.writing, self.queue = self.writers[0], self.queues[0]
        self.times = times = FetchTimes(BLOCK_SIZE)
        if rng.random() < 0.7:
            times.computed(BLOCK_SIZE, rng.choice([0.002, 0.02, 0.2]))  # so that waits are as short
        self.fetching = FetchedFirst(
            **parts,
            pool=self.pool,
            places=places,
            times=[times] * self.num_partitions,
            on_found=lambda partition, chain, tiers: None,
            on_fetched=self._on_fetched,
            on_came=self._on_came,
        )
        self.requests: dict[bytes, Request] = {}
        self.live: set[bytes] = set()
        self.cancelled: set[bytes] = set()
        self.conversations = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(4, 17))] for _ in range(6)]
        self.right: dict[bytes, list[int]] = {}  # what a block of that name holds
        self.checked: set[bytes] = set()  # in whichever tier: what a tier has it never changes
        self.not_written: set[bytes] = set()  # since some tier had it, or has lost it
        self.num_from_tiers = 0

    def _on_came(self, request_id: bytes, tokens: dict[str, int]) -> None:
        self.num_from_tiers += sum(tokens.values())

    def process_of(self, partition: int) -> Process:
        return self.processes[self.spaces.process_of(partition)]

    def writer_of(self, partition: int) -> WriteThrough:
        return self.writers[self.spaces.process_of(partition)]

    def _on_fetched(self, partition: int, names: Sequence[bytes]) -> None:
        self.writer_of(partition).came_up(names)
        self.not_written.update(names)

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
            self.writer_of(partition).renew(partition, request.block_names)
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
            for writing in self.writers:
                writing.step_ended()

    def run_a_thread(self) -> None:
        threads = self.rng.choice(self.processes).threads
        if threads.pending:
            threads.run(self.rng.randrange(len(threads.pending)))

    def arrive(self) -> None:
        """Something that a follower says, or has read."""
        coming = self.rng.choice(self.processes).coming
        if coming:
            coming.popleft()()

    def tick(self) -> None:
        for writing in self.writers:
            writing.tick()

    def lose(self) -> None:
        """A tier forgets a block, or it does not come any more."""
        tier = self.rng.choice(self.tiers)
        if tier.kept:
            name = self.rng.choice(sorted(tier.kept))
            if self.rng.random() < 0.5:
                del tier.kept[name]
            else:
                tier.broken.add(name)
            self.not_written.add(name)

    def switch(self) -> None:
        """A tier off, or on again."""
        tier = self.rng.choice(self.tiers)
        tier.is_off = not tier.is_off

    async def move(self) -> None:
        moves = [(self.ask, 1.5), (self.cancel, 0.3), (self.launch, 6), (self.complete, 6), (self.run_a_thread, 10)]
        moves += [(self.arrive, 10), (self.tick, 2), (self.lose, 0.2), (self.switch, 0.1)]
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
        for tier in self.tiers:
            tier.is_off = False
        for _ in range(2000):
            self.tick()
            num_events = self.scheduler.cache.num_events
            self.engine.launch()
            self.complete()
            for _ in self.processes:
                self.run_a_thread()
                self.arrive()
            await asyncio.sleep(0.01 if any(map(len, self.queues)) else 0.1)
            self.check()
            has_news = self.scheduler.cache.num_events > num_events
            is_busy = (
                any(each.threads.pending or each.coming for each in self.processes)
                or self.engine.in_flight
                or any(len(queue) or queue.num_aside for queue in self.queues)
                or has_news
            )
            if self.live <= self.engine.ended and not is_busy:
                assert not any(process.num_held for process in self.processes)
                return self.check_written()
        raise AssertionError("it never ends")

    def check_written(self) -> None:
        """Whatever tiers failed meanwhile, what the device has they have, but where a queue may have been full."""
        for partition in range(self.num_partitions):
            for tier in () if self._may_lose else self.process_of(partition).tiers:
                on_device = set(self.scheduler.cache.snapshot(partition))
                assert on_device <= tier.kept.keys() | self.not_written
