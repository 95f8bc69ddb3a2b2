"""A worker: one engine behind gateway links, prefill and decode together.

It knows which link each request came over, and nothing of gRPC streams or processes.
"""

import resource
import secrets
from typing import Protocol

from moonshard.rpc import link_pb2
from moonshard.rpc.link import PROTOCOL_VERSION
from moonshard.rpc.status import RequestError, Unavailable
from moonshard.serving import wire
from moonshard.serving.compilations import CompilationCounter
from moonshard.serving.config import Config
from moonshard.serving.encoder import StepEncoder
from moonshard.serving.engine import Engine, StepReport
from moonshard.serving.loading import LoadedModel
from moonshard.serving.scheduler import Scheduler
from moonshard.serving.waiting import QueueTimeout, Rejected


class Link(Protocol):
    """The worker's end of a stream to a gateway."""

    def send(self, message: link_pb2.WorkerMessage) -> None: ...


class Worker:
    """What is behind the link: the engine, and which link each request came over."""

    def __init__(self, config: Config, model: LoadedModel, compilations: CompilationCounter):
        self._config = config
        self._model = model
        self._compilations = compilations
        self._pool = model.block_pool()
        self._scheduler = Scheduler(model.scheduler_config(config), self._pool)
        self._open: set[Link] = set()
        self._links: dict[bytes, Link] = {}  # by request
        self.epoch = secrets.token_bytes(16)
        self.is_draining = False
        self.engine = Engine(
            scheduler=self._scheduler,
            executor=model.programs,
            encoder=StepEncoder(model.shapes, model.pool),
            on_step=self._on_step,
            on_expired=self._on_expired,
        )

    def welcome(self) -> link_pb2.Welcome:
        model = self._model
        return link_pb2.Welcome(
            protocol_version=PROTOCOL_VERSION,
            epoch=self.epoch,
            fingerprint=model.fingerprint,
            role="both",
            dtype=model.dtype,
            vocab_size=model.vocab_size,
            max_context_tokens=model.shapes.max_context_tokens,
            block_size=model.block_size,
            num_partitions=model.pool.num_partitions,
            num_blocks=model.pool.blocks_per_partition,
            max_slots=model.pool.num_slots,
            load_s=model.load_s,
            compile_s=model.compile_s,
        )

    def open_link(self, link: Link) -> None:
        """Welcome a gateway. `close_link` undoes it."""
        self._open.add(link)
        link.send(link_pb2.WorkerMessage(welcome=self.welcome()))
        link.send(link_pb2.WorkerMessage(load=self.load()))

    def begin_drain(self) -> None:
        """Take no new requests, and tell the gateways at once, so that they send them elsewhere."""
        self.is_draining = True
        for link in self._open:
            link.send(link_pb2.WorkerMessage(load=self.load()))

    def run(self, run: link_pb2.Run, link: Link) -> None:
        """Accepts a request, or answers it with its error."""
        try:
            if self.is_draining:
                raise Unavailable("this worker is shutting down", retry_after_s=1.0)
            request = wire.request_from(run, self._model.vocab_size)
            self.engine.submit(request)
        except Rejected as error:
            link.send(wire.failed(run.request_id, wire.rejection(error)))
        except RequestError as error:
            link.send(wire.failed(run.request_id, error))
        else:
            self._links[request.id] = link

    def cancel(self, request_id: bytes, link: Link) -> None:
        """Ends a request that came over this link; any other is left alone."""
        if self._links.get(request_id) is link:
            del self._links[request_id]
            self.engine.cancel(request_id)

    def close_link(self, link: Link) -> None:
        self._open.discard(link)
        for request_id in [id for id, owner in self._links.items() if owner is link]:
            self.cancel(request_id, link)

    def load(self) -> link_pb2.WorkerLoad:
        partitions = range(self._pool.num_partitions)
        return wire.load_message(
            self.engine.counters(),
            free_blocks=[self._pool.num_free(partition) for partition in partitions],
            num_compilations=self._compilations.num_compilations,
            num_compilations_while_serving=self._compilations.num_while_serving,
            overlapped_steps=self.engine.num_overlapped_steps,
            peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            draining=self.is_draining,
        )

    def inspect(self) -> link_pb2.Inspection:
        return link_pb2.Inspection(
            epoch=self.epoch,
            partitions=[self._partition_state(partition) for partition in range(self._pool.num_partitions)],
            load=self.load(),
        )

    def _partition_state(self, partition: int) -> link_pb2.PartitionState:
        counts = self._pool.counts(partition)
        return link_pb2.PartitionState(
            free_blocks=counts.free,
            used_blocks=counts.used,
            leased_blocks=counts.leased,
            quarantined_blocks=counts.quarantined,
            total_blocks=counts.total,
            free_slots=self._scheduler.num_free_slots(partition),
            total_slots=self._model.pool.slots_per_partition,
        )

    def _on_step(self, report: StepReport) -> None:
        """One message per link and step, whatever the number of its requests."""
        by_link: dict[Link, list[link_pb2.SequenceOutput]] = {}
        for item in report.emitted:
            link = self._links[item.output.sequence.request_id]
            by_link.setdefault(link, []).append(wire.sequence_output(item))
        for request_id in report.ended:
            del self._links[request_id]
        load = self.load()
        for link, outputs in by_link.items():
            link.send(link_pb2.WorkerMessage(step=link_pb2.StepOutput(step=report.number, outputs=outputs, load=load)))

    def _on_expired(self, request_id: bytes, error: QueueTimeout) -> None:
        link = self._links.pop(request_id, None)
        if link is not None:
            link.send(wire.failed(request_id, wire.rejection(error)))
