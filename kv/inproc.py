"""The transport inside one process: two ends and a memory copy between them, for tests and for workers that share one.

Copies happen inside `publish`, so its future is done when it returns. It has no delays and loses nothing; tests script
both in a subclass.
"""

import time
from concurrent.futures import Future

from moonshard.kv.slab import Bytes, Slab
from moonshard.kv.transfer import (
    Copies,
    FailureCause,
    PublishResult,
    TransferFailed,
    TransferMeter,
    TransportCounters,
    registered_bytes,
)


class InprocNetwork:
    """The ends that reach one another, by session."""

    def __init__(self):
        self._ends: dict[str, InprocTransport] = {}
        self._num_sessions = 0

    def join(self, end: "InprocTransport") -> str:
        """A session no end had before."""
        self._num_sessions += 1
        session = f"inproc:{self._num_sessions}"
        self._ends[session] = end
        return session

    def leave(self, session: str) -> None:
        self._ends.pop(session, None)

    def find(self, session: str) -> "InprocTransport | None":
        return self._ends.get(session)


class InprocTransport:
    """One end. See `kv.transfer.Transport`."""

    def __init__(self, network: InprocNetwork):
        self._network = network
        self._slabs: list[Slab] = []
        self._meter = TransferMeter()
        self._is_closed = False
        self.session = network.join(self)

    @property
    def counters(self) -> TransportCounters:
        return self._meter.read()

    def register(self, slab: Slab) -> None:
        if self._is_closed:
            raise TransferFailed(FailureCause.CLOSED, "register after close", may_still_land=False)
        self._slabs.append(slab)

    def publish(self, target_session: str, copies: Copies) -> Future[PublishResult]:
        future: Future[PublishResult] = Future()
        start_s = time.perf_counter()
        try:
            for destination, source in self._views(target_session, copies):
                self.copy(destination, source)
        except TransferFailed as failure:
            self._meter.add_failure(failure.cause, time.perf_counter() - start_s)
            future.set_exception(failure)
            return future
        result = PublishResult(
            num_bytes=int(copies.num_bytes.sum()),
            num_transfers=len(copies.num_bytes),
            duration_s=time.perf_counter() - start_s,
        )
        self._meter.add(result)
        future.set_result(result)
        return future

    def copy(self, destination: Bytes, source: Bytes) -> None:
        """One copy."""
        destination[:] = source

    def close(self) -> None:
        self._is_closed = True
        self._network.leave(self.session)

    def _views(self, target_session: str, copies: Copies) -> list[tuple[Bytes, Bytes]]:
        """(destination, source) of every copy; all are checked before any is made."""
        if self._is_closed:
            raise TransferFailed(FailureCause.CLOSED, "publish after close", may_still_land=False)
        target = self._network.find(target_session)
        if target is None:
            raise TransferFailed(FailureCause.REFUSED, f"no {target_session}", may_still_land=False)
        return [
            (registered_bytes(target._slabs, remote, num_bytes), registered_bytes(self._slabs, local, num_bytes))
            for local, remote, num_bytes in copies.rows()
        ]
