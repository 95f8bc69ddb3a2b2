"""A gateway and several workers under virtual time: the network between them, faults, and clients who come and go.

Everything follows from the seed. `serve` asks and waits until all has ended, and longer than any quarantine or restart.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from moonshard.kv.blocks import PLAIN, BlockGroups
from moonshard.kv.prefix import block_names
from moonshard.serving.control.batching.scheduler import SchedulerConfig
from moonshard.serving.control.dispatch.dispatcher import DispatchRules
from moonshard.serving.control.dispatch.prefill_place import PrefillRule
from moonshard.serving.control.request import Request, Sampling
from tests.serving.control.loop.decode_worker import DecodeWorker
from tests.serving.control.loop.events import Events
from tests.serving.control.loop.gateway import Gateway
from tests.serving.control.loop.messages import FromWorker, ToWorker, Welcome
from tests.serving.control.loop.prefill_worker import PrefillWorker
from tests.serving.control.loop.worker import Times, Worker, WorkerConfig
from tests.serving.fake_device import VOCAB_SIZE

BLOCK_SIZE = 8
LEASE_S = 3600.0  # nothing may need it to end: no message is lost here
LIMIT_S = 60.0
ROOT = bytes(16)
BY_COST = DispatchRules(failover_wait_s=2.0, ttft_slo_s=0.25, prefill=PrefillRule())
BY_LENGTH = replace(BY_COST, prefill=PrefillRule(kind="static", max_left_tokens=8, min_known_share=0.9))


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """Times at which workers die, by worker; each comes back after a while."""

    deaths: tuple[tuple[float, str], ...] = ()
    restart_s: float = 1.0
    notice_s: float = 0.05  # until the gateway has noticed
    writes: float = 0.0  # share that fails
    leaving: float = 0.0  # share of clients


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    num_requests: int
    per_s: float
    bursts: tuple[tuple[int, int], ...] = ()  # requests that come all at once: the first one's number and how many


WORKER = WorkerConfig(
    num_partitions=2,
    num_blocks=64,
    num_cells=6,
    scheduler=SchedulerConfig(
        slots_per_partition=4,
        chunk_tokens=64,
        q_tile=4,
        max_context_tokens=160,
        max_queued_requests=24,
        queue_timeout_s=1.0,
    ),
    lease_s=LEASE_S,
    quarantine_s=0.5,
    block_size=BLOCK_SIZE,
)


class Deployment:
    def __init__(
        self,
        seed: int,
        *,
        num_prefill: int = 2,
        num_decode: int = 3,
        faults: Faults,
        rules: DispatchRules = BY_COST,
        groups: tuple[BlockGroups, BlockGroups] = (PLAIN, PLAIN),  # of prefill and of decode workers
        chunk_tokens: int = WORKER.scheduler.chunk_tokens,
    ):
        scheduler = replace(WORKER.scheduler, chunk_tokens=chunk_tokens)
        self.configs = [replace(WORKER, groups=own, scheduler=scheduler) for own in groups]
        self.events = Events()
        self.draw = random.Random(seed)
        self.faults = faults
        self.times = Times()
        names = [f"p{n}" for n in range(num_prefill)] + [f"d{n}" for n in range(num_decode)]
        self.workers: dict[str, Worker] = {}
        self.peers: dict[str, DecodeWorker] = {}  # by session
        self.gateway = Gateway(
            self.events,
            random.Random(seed + 1),
            tuple(names),
            rules,
            lease_s=LEASE_S,
            prefill_ms=lambda num_tokens: 1e3 * (self.times.step_s + self.times.token_s * num_tokens),
        )
        self._epochs = itertools.count(1)
        self._arrived_s: dict[tuple[str, str, int], float] = {}
        for name in names:
            self._start(name)
        for time_s, name in faults.deaths:
            self.events.at(time_s, self._kill, name)

    # ---- workers live and die

    def _start(self, name: str) -> None:
        epoch = next(self._epochs)

        def say(message: FromWorker) -> None:
            self._deliver((name, "gateway", epoch), self._at_gateway, name, epoch, message)

        common = {"events": self.events, "times": self.times, "draw": self.draw, "send": say}
        prefill, decode = self.configs
        if name.startswith("p"):
            worker = PrefillWorker(name, epoch, prefill, peers=self.peers, write_faults=self.faults.writes, **common)
        else:
            worker = DecodeWorker(name, epoch, decode, **common)
            self.peers[worker.session] = worker
        self.workers[name] = worker
        worker.start()

    def _kill(self, name: str) -> None:
        self.events.note("killed", name)
        self.workers[name].kill()
        self.events.after(self.faults.notice_s, self.gateway.lost, name, self.workers[name].epoch)
        self.events.after(self.faults.restart_s, self._start, name)

    # ---- the network: in order between two processes, after some delay

    def _deliver(self, channel: tuple[str, str, int], hear: Callable[..., None], *what: object) -> None:
        delay_s = 0.0002 + 0.0008 * self.draw.random()
        self._arrived_s[channel] = max(self._arrived_s.get(channel, 0.0), self.events.now_s + delay_s)
        self.events.at(self._arrived_s[channel], hear, *what)

    def _at_gateway(self, name: str, epoch: int, message: FromWorker) -> None:
        if isinstance(message, Welcome):
            if self.workers[name].epoch == epoch and self.workers[name].is_alive:
                self.gateway.linked(message, lambda message: self._to_worker(name, epoch, message))
        else:
            self.gateway.hear(epoch, message)

    def _to_worker(self, name: str, epoch: int, message: ToWorker) -> None:
        self._deliver(("gateway", name, epoch), self._at_worker, name, epoch, message)

    def _at_worker(self, name: str, epoch: int, message: ToWorker) -> None:
        worker = self.workers[name]
        if worker.epoch == epoch and worker.is_alive:
            worker.hear(message)

    # ---- clients

    def serve(self, traffic: Traffic) -> None:
        time_s, at_once = 0.1, {first + i for first, num in traffic.bursts for i in range(1, num)}
        for number in range(traffic.num_requests):
            time_s += 0.0 if number in at_once else self.draw.expovariate(traffic.per_s)
            self.events.at(time_s, self._ask, self._request(number))
        gateway = self.gateway
        self.events.run(lambda: len(gateway.asked) == traffic.num_requests and not gateway.num_open, LIMIT_S)
        rest_s = self.events.now_s + WORKER.quarantine_s + self.faults.restart_s + 1.0
        self.events.run(lambda: self.events.now_s >= rest_s, LIMIT_S)

    def _ask(self, request: Request) -> None:
        affinity_key = bytes([request.sampling.seed % 40]) if request.sampling.seed % 2 else None
        asked = self.gateway.ask(request, affinity_key)
        if self.draw.random() < self.faults.leaving:
            self.events.after(0.2 * self.draw.random(), self.gateway.leave, asked)

    def _request(self, number: int) -> Request:
        draw = self.draw
        system = [100 + draw.randrange(4)] * draw.choice([0, 8, 16])  # which others begin with, too
        prompt = (*system, *(draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 48))))
        request = Request(
            id=number.to_bytes(16),
            prompt=prompt,
            sampling=Sampling(seed=number, presence_penalty=draw.choice([0.0, 0.0, 0.5])),
            stop_token_ids=frozenset(range(draw.randint(0, 1))),
            max_tokens=draw.randint(1, 16),
            n=draw.choice([1, 1, 1, 2]),
        )
        return replace(request, block_names=tuple(block_names(ROOT, prompt, BLOCK_SIZE)), prefix_root=ROOT)

    # ---- what must have come of it

    @property
    def ends(self) -> Counter[str]:
        return Counter(asked.kind for asked in self.gateway.asked)

    def happened(self, what: str) -> int:
        return sum(entry[1] == what for entry in self.events.log)

    def check(self) -> None:
        """Each request ended once, with its own tokens or a typed refusal, and all is as at the beginning."""
        for asked in self.gateway.asked:
            assert asked.ended is not None
        self.gateway.check_as_begun({name: worker.member for name, worker in self.workers.items()})
        for worker in self.workers.values():
            worker.check_as_begun()
