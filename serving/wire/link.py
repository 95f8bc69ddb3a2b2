"""What a worker's parts know of a link to a gateway: how to answer on it, and what a message on it is about.

Apart from `link_service`, which owns the stream, so that the worker and its handoffs know nothing of gRPC.
"""

from typing import Protocol

from moonshard.rpc import link_pb2
from moonshard.rpc.link import REQUEST_ID_BYTES
from moonshard.rpc.status import InvalidArgument

ABOUT_REQUESTS = frozenset({"run", "reserve", "cancel", "landed", "start", "credits", "drained"})


class Link(Protocol):
    """The worker's end of a stream to a gateway. Compared by identity."""

    def send(self, message: link_pb2.WorkerMessage) -> None:
        """Never blocks; dropped where the stream has ended."""
        ...


def request_id_of(message: link_pb2.GatewayMessage) -> bytes:
    """Of the request, or of the handoff, which has its request's id; empty where it is about none.

    Raises:
        InvalidArgument: it is about one whose id has another size, so that nobody could be answered.
    """
    name = message.WhichOneof("message")
    request_id = _id_in(name, message)
    if name in ABOUT_REQUESTS and len(request_id) != REQUEST_ID_BYTES:
        raise InvalidArgument(f"an id has {REQUEST_ID_BYTES} bytes, not {len(request_id)}", field="request_id")
    return request_id


def _id_in(name: str | None, message: link_pb2.GatewayMessage) -> bytes:
    match name:
        case "run":
            return message.run.request_id
        case "reserve":
            return message.reserve.run.request_id
        case "cancel":
            return message.cancel.request_id
        case "landed":
            return message.landed.handoff
        case "start":
            return message.start.handoff
        case "credits":
            return message.credits.handoff
        case "drained":
            return message.drained.handoff
        case _:
            return b""
