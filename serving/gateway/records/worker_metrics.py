"""What the workers report of themselves, as metrics: read from the last message of each at the moment of a scrape.

Counters are the worker's own, since its start: a restart shows as a counter reset, which Prometheus expects. Those of a
worker that is gone stay; its gauges are 0, since nothing runs there. `moonshard_worker_info` has what joins them to a
role; vLLM's names are given for workers that decode, which is what its boards and autoscalers mean by an engine.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonshard.rpc.link_pb2 import KvStore, KvTier, KvTransfer, WorkerLoad
from moonshard.serving.control.drafting.fit import DraftFit
from moonshard.serving.control.members.fleet import PREFILL_ROLES
from moonshard.serving.gateway.records.metrics import LABELS, GatewayMetrics
from moonshard.serving.gateway.workers.link import WorkerLink
from moonshard.serving.gateway.workers.pool import LinkPool

_COUNTERS: dict[str, tuple[str, Callable[[WorkerLoad], int]]] = {
    "compilations": (
        "Programs compiled since the worker began, but for those made behind it.",
        lambda load: load.num_compilations,
    ),
    "compilations_while_serving": (
        "Programs compiled since the worker was ready, on a serving thread: 0, or requests waited for it.",
        lambda load: load.num_compilations_while_serving,
    ),
    "preemptions": ("Choices that lost their KV blocks to others and began again.", lambda load: load.num_preemptions),
    "prefill_steps": ("Steps launched to compute prompts.", lambda load: load.num_prefill_steps),
    "decode_steps": (
        "Steps launched to draw a token of each choice, or several where guesses are verified.",
        lambda load: load.num_decode_steps,
    ),
    "prefill_tokens": ("Tokens computed in prefill steps.", lambda load: load.prefill_tokens),
    "decode_tokens": ("Tokens computed in decode steps.", lambda load: load.decode_tokens),
    "wasted_tokens": ("Tokens computed for choices that had already ended.", lambda load: load.wasted_tokens),
    "overlapped_steps": (
        "Decode steps launched before the tokens of the step before had reached the host.",
        lambda load: load.overlapped_steps,
    ),
    "lost_spans": ("Spans of the worker that could not be exported.", lambda load: load.num_lost_spans),
    "lost_rows": ("Steps of the worker that are in no file of its recording.", lambda load: load.num_lost_rows),
}
_GAUGES: dict[str, tuple[str, Callable[[WorkerLoad], int]]] = {
    "running_requests": ("Choices in the batch.", lambda load: load.num_running),
    "waiting_requests": ("Choices that wait for a place in the batch.", lambda load: load.num_waiting),
    "queued_tokens": (
        "Tokens of accepted prompts still to be computed.",
        lambda load: sum(load.queued_tokens),
    ),
    "active_tokens": ("Tokens that the choices in the batch hold.", lambda load: sum(load.active_tokens)),
    "peak_memory_bytes": ("The most host memory that the process has held.", lambda load: load.peak_memory_bytes),
    "draining": ("1 while the worker takes no new requests.", lambda load: load.draining),
}
_GUESSED: dict[str, tuple[str, Callable[[WorkerLoad], int]]] = {
    "num_drafts": ("Times that tokens were guessed for a choice, and verified.", lambda load: load.num_drafts),
    "num_draft_tokens": ("Tokens that were guessed.", lambda load: load.draft_tokens),
    "num_accepted_tokens": ("Guessed tokens that were what the model drew.", lambda load: load.accepted_tokens),
}
# Of the KV plane, by workers that have one.
_TRANSFER_COUNTERS: dict[str, tuple[str, Callable[[KvTransfer], float]]] = {
    "kv_published_bytes": ("Bytes of KV that prefill workers wrote to decode workers.", lambda kv: kv.published_bytes),
    "kv_transfers": ("Single writes, one run of addresses each, that publishing KV took.", lambda kv: kv.num_transfers),
    "kv_publish_seconds": ("Time spent in publishing KV, summed also where it overlaps.", lambda kv: kv.publish_s),
    "kv_landed_bytes": ("Bytes of KV that were checked and taken into the cache.", lambda kv: kv.landed_bytes),
    "kv_landed_blocks": ("Blocks of KV that were checked and taken into the cache.", lambda kv: kv.num_landed_blocks),
    "kv_checksum_mismatches": (
        "Pieces of KV that were not what their checksums said, and were not used.",
        lambda kv: kv.num_checksum_mismatches,
    ),
}
_SLAB_STATES: dict[str, Callable[[KvTransfer], int]] = {
    "free": lambda kv: kv.free_slab_slots,
    "used": lambda kv: kv.used_slab_slots,
    "leased": lambda kv: kv.leased_slab_slots,
    "quarantined": lambda kv: kv.quarantined_slab_slots,
}
# Of the tiers below a device's pages, by workers that have some: of each worker, and of each of its tiers.
_STORE_COUNTERS: dict[str, tuple[str, Callable[[KvStore], int]]] = {
    "tier_late_fetches": (
        "Times that requests began without what tiers were to give, as it did not come in time.",
        lambda store: store.num_late_fetches,
    ),
    "tier_dropped_blocks": (
        "Blocks of KV that no tier was given, as too many waited to be written.",
        lambda store: store.num_dropped_blocks,
    ),
    "tier_lost_blocks": (
        "Blocks of KV that no tier was given, as the device needed their pages first.",
        lambda store: store.num_lost_blocks,
    ),
}
_TIER_COUNTERS: dict[str, tuple[str, Callable[[KvTier], int]]] = {
    "tier_hits": ("Blocks of KV that a tier gave as they had been written.", lambda tier: tier.num_hits),
    "tier_kept_blocks": ("Blocks of KV that a tier took.", lambda tier: tier.num_kept),
    "tier_not_kept_blocks": (
        "Times that a tier did not take a block of KV: it had no room, or its disk or network failed.",
        lambda tier: tier.num_not_kept,
    ),
    "tier_evicted_blocks": ("Blocks of KV that a tier gave up to make room for others.", lambda tier: tier.num_evicted),
    "tier_read_bytes": ("Bytes of KV that were read from a tier.", lambda tier: tier.read_bytes),
    "tier_written_bytes": ("Bytes of KV that were written to a tier.", lambda tier: tier.written_bytes),
}


class WorkerCollector(Collector):
    """One sample per worker (label `worker`, its address), and vLLM's names for what has one."""

    def __init__(self, pool: LinkPool, model_name: str) -> None:
        self._pool = pool
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        links = self._pool.links
        for name, (text, value) in _COUNTERS.items():
            yield self._counter(name, text, ((link, value(link.last_load)) for link in links))
        for name, (text, value) in _GAUGES.items():
            yield self._gauge(name, text, ((link, value(_load_now(link))) for link in links))
        up = ((link, link.session is not None) for link in links)
        yield self._gauge("worker_up", "1 while there is a link to the worker.", up)
        restarts = ((link, link.num_restarts) for link in links)
        yield self._counter("worker_restarts", "Times that another process answered at the address.", restarts)
        reserved = ((link, self._pool.in_flight_tokens(link.address)) for link in links)
        yield self._gauge("reserved_tokens", "Tokens that requests sent there may still come to.", reserved)
        yield self._info()
        yield self._kernels()
        yield from self._blocks()
        yield from self._start_times()
        yield from self._transfers()
        yield from self._tiers()
        yield from self._draft_models()
        yield from self._vllm()

    def _counter(self, name: str, text: str, samples: Iterable[tuple[WorkerLink, float]]) -> Metric:
        return _by_worker(CounterMetricFamily(f"moonshard_{name}", text, labels=("worker",)), samples)

    def _gauge(self, name: str, text: str, samples: Iterable[tuple[WorkerLink, float]]) -> Metric:
        return _by_worker(GaugeMetricFamily(f"moonshard_{name}", text, labels=("worker",)), samples)

    def _info(self) -> Metric:
        info = GaugeMetricFamily(
            "moonshard_worker_info", "Always 1 for a worker that was ever there.", labels=("worker", "role")
        )
        for link in self._pool.links:
            if link.role:
                info.add_metric((link.address, link.role), 1)
        return info

    def _kernels(self) -> Metric:
        kernels = GaugeMetricFamily(
            "moonshard_worker_kernels",
            "Always 1; what a worker's steps run: kernels for CPUs by their instruction set, pallas, or xla.",
            labels=("worker", "kernels"),
        )
        for link in self._pool.links:
            if link.session is not None:
                kernels.add_metric((link.address, link.session.welcome.kernels), 1)
        return kernels

    def _transfers(self) -> Iterator[Metric]:
        """Metrics of the KV plane, for workers that send or receive handoffs."""
        moving = [link for link in self._pool.links if link.last_load.HasField("kv_transfer")]
        for name, (text, value) in _TRANSFER_COUNTERS.items():
            yield self._counter(name, text, ((link, value(link.last_load.kv_transfer)) for link in moving))
        failures = CounterMetricFamily(
            "moonshard_kv_transfer_failures",
            "Pieces of KV that could not be written to a decode worker.",
            labels=("worker", "cause"),
        )
        slots = GaugeMetricFamily(
            "moonshard_slab_slots", "Places for one block in the memory that peers reach.", labels=("worker", "state")
        )
        for link in moving:
            for cause, num in sorted(link.last_load.kv_transfer.num_failures.items()):
                failures.add_metric((link.address, cause), num)
            for state, value in _SLAB_STATES.items():
                slots.add_metric((link.address, state), value(_load_now(link).kv_transfer))
        yield from (failures, slots)
        handoffs = ((link, _load_now(link).kv_transfer.num_handoffs) for link in moving)
        yield self._gauge("handoffs", "Prompts on their way from one worker to another, reserved or sent.", handoffs)

    def _tiers(self) -> Iterator[Metric]:
        """Metrics of what lies below the devices' pages, for workers that have it."""
        storing = [link for link in self._pool.links if link.last_load.HasField("kv_store")]
        for name, (text, count) in _STORE_COUNTERS.items():
            yield self._counter(name, text, ((link, count(link.last_load.kv_store)) for link in storing))
        queued = ((link, _load_now(link).kv_store.num_queued_blocks) for link in storing)
        yield self._gauge("tier_queued_blocks", "Blocks of KV that wait to be written to the tiers.", queued)
        aside = ((link, _load_now(link).kv_store.num_aside_blocks) for link in storing)
        yield self._gauge("tier_lacking_blocks", "Blocks of KV that tiers lack and are to be given again.", aside)
        labels = ("worker", "tier")
        counters = {
            count: CounterMetricFamily(f"moonshard_{name}", text, labels=labels)
            for name, (text, count) in _TIER_COUNTERS.items()
        }
        misses = CounterMetricFamily(
            "moonshard_tier_misses",
            "Blocks of KV that a tier was asked for and did not give.",
            labels=(*labels, "cause"),
        )
        held = GaugeMetricFamily("moonshard_tier_held_bytes", "Bytes of KV that a tier holds.", labels=labels)
        text = "1 while a tier answers, 0 while it is left alone since it does not, or is not what it should be."
        up = GaugeMetricFamily("moonshard_tier_up", text, labels=labels)
        for link in storing:
            for tier in link.last_load.kv_store.tiers:
                for count, counter in counters.items():
                    counter.add_metric((link.address, tier.name), count(tier))
                for cause, num in sorted(tier.num_misses.items()):
                    misses.add_metric((link.address, tier.name, cause), num)
            for tier in _load_now(link).kv_store.tiers:
                if tier.HasField("held_bytes"):
                    held.add_metric((link.address, tier.name), tier.held_bytes)
                if tier.HasField("is_up"):
                    up.add_metric((link.address, tier.name), tier.is_up)
        yield from (*counters.values(), misses, held, up)

    def _draft_models(self) -> Iterator[Metric]:
        """Of workers whose draft model's guesses were tried."""
        drafting = [(link, fit) for link in self._pool.links if (fit := _fit_of(link.last_load)).num_drafts]
        text = "Tokens that a step gave where a draft model guessed; 1 is what a step gives without guesses."
        yield self._gauge("draft_accept_length", text, ((link, fit.accept_length) for link, fit in drafting))
        text = "1 where a draft model's guesses are hardly ever right: it may be another model's, or its taps may be."
        yield self._gauge("draft_misfit", text, ((link, fit.is_misfit) for link, fit in drafting))

    def _blocks(self) -> Iterator[Metric]:
        labels = ("worker", "partition")
        free = GaugeMetricFamily("moonshard_free_blocks", "KV blocks that nothing holds.", labels=labels)
        used = GaugeMetricFamily("moonshard_used_blocks", "KV blocks that requests hold.", labels=labels)
        known = GaugeMetricFamily("moonshard_known_blocks", "KV blocks that prompts can find again.", labels=labels)
        for link in self._pool.links:
            for partition, num_free in enumerate(_load_now(link).free_blocks):
                free.add_metric((link.address, str(partition)), num_free)
                used.add_metric((link.address, str(partition)), link.num_blocks - num_free)
                num_known = self._pool.num_known_blocks(link.address, partition)
                known.add_metric((link.address, str(partition)), num_known)
        yield from (free, used, known)

    def _start_times(self) -> Iterator[Metric]:
        seconds = GaugeMetricFamily(
            "moonshard_worker_start_seconds",
            "How long a worker took to load, and to have its programs.",
            labels=("worker", "phase"),
        )
        for link in self._pool.links:
            if link.session is not None:
                seconds.add_metric((link.address, "load"), link.session.welcome.load_s)
                seconds.add_metric((link.address, "compile"), link.session.welcome.compile_s)
        yield seconds

    def _vllm(self) -> Iterator[Metric]:
        running = GaugeMetricFamily("vllm:num_requests_running", "Choices in the batch.", labels=LABELS)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Choices that wait for a place in it.", labels=LABELS)
        by_reason = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Choices that wait; capacity, the one reason there is: for a slot or for KV blocks.",
            labels=(*LABELS, "reason"),
        )
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", labels=LABELS)
        preemptions = CounterMetricFamily(
            "vllm:num_preemptions", "Choices that lost their KV blocks to others and began again.", labels=LABELS
        )
        cache = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Always 1; the labels are the shape of the KV cache.",
            labels=(*LABELS, "block_size", "num_gpu_blocks"),
        )
        guessed = {
            count: CounterMetricFamily(f"vllm:spec_decode_{name}", text, labels=LABELS)
            for name, (text, count) in _GUESSED.items()
        }
        by_place = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Guessed tokens that were what the model drew, by their place among a row's guesses.",
            labels=(*LABELS, "position"),
        )
        for link in self._pool.links:
            if link.role in PREFILL_ROLES:
                continue
            labels, load = (self._model_name, str(self._pool.index_of(link.address))), _load_now(link)
            running.add_metric(labels, load.num_running)
            waiting.add_metric(labels, load.num_waiting)
            by_reason.add_metric((*labels, "capacity"), load.num_waiting)
            usage.add_metric(labels, _kv_usage(link))
            preemptions.add_metric(labels, link.last_load.num_preemptions)
            for count, metric in guessed.items():
                metric.add_metric(labels, count(link.last_load))
            for place, num_accepted in enumerate(link.last_load.accepted_per_position):
                by_place.add_metric((*labels, str(place)), num_accepted)
            if link.session is not None:
                welcome = link.session.welcome
                shape = (str(welcome.block_size), str(welcome.num_blocks * welcome.num_partitions))
                cache.add_metric((*labels, *shape), 1)
        yield from (running, waiting, by_reason, usage, preemptions, cache, *guessed.values(), by_place)


@dataclass(slots=True)
class StepObserver:
    """Tokens computed between two messages of a worker: one step's, since each step sends one."""

    metrics: GatewayMetrics
    seen: dict[int, int] = field(default_factory=dict)  # by worker
    observed: dict[int, Histogram] = field(default_factory=dict)  # likewise: looked up once

    def removed(self, worker_index: int) -> None:
        """The index may be another worker's from now on, whose counters have nothing to do with this one's."""
        self.seen.pop(worker_index, None)

    def __call__(self, worker_index: int, load: WorkerLoad) -> None:
        num_tokens = load.prefill_tokens + load.decode_tokens
        num_new = num_tokens - self.seen.get(worker_index, 0)
        self.seen[worker_index] = num_tokens
        if num_new > 0:  # nothing new: a heartbeat; fewer: the worker was restarted
            if (observed := self.observed.get(worker_index)) is None:
                observed = self.metrics.step_tokens.labels(self.metrics.model_name, str(worker_index))
                self.observed[worker_index] = observed
            observed.observe(num_new)


def _by_worker[Family: (CounterMetricFamily, GaugeMetricFamily)](
    family: Family, samples: Iterable[tuple[WorkerLink, float]]
) -> Family:
    for link, value in samples:
        family.add_metric((link.address,), value)
    return family


def _load_now(link: WorkerLink) -> WorkerLoad:
    """The worker's last report; empty while the worker is gone, since it no longer holds."""
    return WorkerLoad() if link.session is None else link.last_load


def _fit_of(load: WorkerLoad) -> DraftFit:
    return DraftFit(num_drafts=load.num_model_drafts, num_accepted=load.model_accepted_tokens)


def _kv_usage(link: WorkerLink) -> float:
    free_blocks = _load_now(link).free_blocks
    num_blocks = link.num_blocks * len(free_blocks)
    return 1 - sum(free_blocks) / num_blocks if num_blocks else 0.0
