"""One life of a `Link`: from a worker's Welcome to the stream's end, as the gateway's requests see it.

It does no I/O: `link` keeps the stream up. A step's message is divided here: each request waits on an inbox of its own,
so that one slow client holds up no other. An inbox is bounded by its request (`n` times `max_tokens`). What concerns a
handoff is passed on whole: it is not one session's affair.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from moonshard.rpc import link_pb2
from moonshard.rpc.status import RequestError, error_from_code
from moonshard.serving.gateway.workers.inbox import Arrival, Inbox

NUM_AT_A_TIME = 16  # outputs of a step


@dataclass(kw_only=True, slots=True, eq=False)
class WorkerSession:
    """A session, compared by identity: a worker that comes back has another one, even with the same epoch."""

    address: str
    welcome: link_pb2.Welcome
    on_handoff: Callable[["WorkerSession", link_pb2.WorkerMessage], None]
    on_prefixes: Callable[["WorkerSession", link_pb2.WorkerMessage], None] = lambda _session, _message: None
    load: link_pb2.WorkerLoad = field(default_factory=link_pb2.WorkerLoad)
    outgoing: asyncio.Queue[link_pb2.GatewayMessage] = field(default_factory=asyncio.Queue)
    inboxes: dict[bytes, Inbox] = field(default_factory=dict)
    num_received: int = 0  # messages
    num_sent: int = 0  # Run and Reserve messages, as the worker counts them
    is_lost: bool = False

    @property
    def epoch(self) -> int:
        """The epoch of the worker's process."""
        return int.from_bytes(self.welcome.epoch, "big")

    @property
    def role(self) -> str:
        """both, prefill or decode."""
        return self.welcome.role

    def open(self, request_id: bytes) -> Inbox:
        """The inbox of a request from now on. Whoever calls this calls `close` exactly once."""
        inbox = Inbox()
        self.inboxes[request_id] = inbox
        return inbox

    def run(self, run: link_pb2.Run) -> Inbox:
        """Send a request. Whoever calls this calls `close` exactly once, however the request ends."""
        inbox = self.open(run.request_id)
        self.send(link_pb2.GatewayMessage(run=run))
        return inbox

    def send(self, message: link_pb2.GatewayMessage) -> None:
        """Dropped where the session is lost: the worker has given up all that came over it."""
        if not self.is_lost:
            self.num_sent += message.WhichOneof("message") in ("run", "reserve")
            self.outgoing.put_nowait(message)

    def close(self, request_id: bytes, *, cancel: bool) -> None:
        """Forget a request; `cancel` tells the worker to stop it. What still arrives for it is dropped."""
        if self.inboxes.pop(request_id, None) is not None and cancel:
            self.send(link_pb2.GatewayMessage(cancel=link_pb2.Cancel(request_id=request_id)))

    def fail_all(self, error: RequestError) -> None:
        for inbox in self.inboxes.values():
            inbox.put_nowait(error)

    def receive(self, message: link_pb2.WorkerMessage) -> None:
        """All of a message but a step's outputs, which `deliver` takes."""
        self.num_received += 1
        match message.WhichOneof("message"):
            case "step":
                self.load = message.step.load
            case "load":
                self.load = message.load
            case "failed":
                self._fail(message)
            case "prefix_snapshot" | "prefix_events":
                self.on_prefixes(self, message)
            case "target" | "credits" | "chunk" | "first_tokens" | "drained":
                self.on_handoff(self, message)

    async def deliver(self, step: link_pb2.StepOutput) -> None:
        """Gives a step's outputs to their inboxes, some at a time: each reader then has a message to send, and
        everybody else would wait for all of them.

        With hundreds at a time a new request waited a second to be let in: gRPC accepts one each time around the loop.
        """
        arrived_ns = time.perf_counter_ns()
        for index, output in enumerate(step.outputs, start=1):
            if (inbox := self.inboxes.get(output.request_id)) is not None:
                inbox.put_nowait(Arrival(arrived_ns, output))
            if index % NUM_AT_A_TIME == 0:
                await asyncio.sleep(0)

    def _fail(self, message: link_pb2.WorkerMessage) -> None:
        """Passes a failure on: to the handoffs if it is a handoff's, or a refusal of a request without an inbox here,
        which is a prefill leg.
        """
        failed = message.failed
        inbox = self.inboxes.get(failed.request_id)
        if inbox is None or failed.cause != link_pb2.HANDOFF_CAUSE_UNSPECIFIED:
            self.on_handoff(self, message)
        else:
            inbox.put_nowait(error_from_code(failed.code, failed.message, failed.field, failed.retry_after_s))
