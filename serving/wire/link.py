"""A link to a gateway as the parts of a worker know it: how to answer on it, and which request a message on it is
about.

The stream itself is `worker.link_service`'s, so that the worker's other parts know nothing of gRPC.
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
    """The id of the request, or of the handoff, which is its request's, that a message is about; empty where it is
    about none.

    Raises:
        InvalidArgument: the id has another size than ids have, so that nobody could be answered.
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
