"""The answers that a gateway keeps in its memory, for requests that go on from them: each tenant's own.

Of each tenant so many and so many bytes; beyond that the least recently used is dropped. An answer is kept with the
conversation that led to it, whose messages are those of the answers before it, so that dropping one breaks no other.
Another tenant's answer does not exist here, nor does another gateway's.
"""

import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from moonshard.rpc.status import NotFound
from moonshard.serving.config.tenants import Tenant
from moonshard.serving.gateway.openai.messages import Message
from moonshard.serving.gateway.quoted import quoted

MESSAGE_BYTES = 512  # of a message besides its text


@dataclass(frozen=True, slots=True)
class Stored:
    response: bytes  # as JSON
    messages: Sequence[Message]  # of the conversation, with the answer

    @property
    def num_bytes(self) -> int:
        """What it takes where it shares nothing with others."""
        return len(self.response) + sum(map(_num_bytes, self.messages))


@final
class StoredResponses:
    """By tenant and id. `max_stored` and `max_bytes` are each tenant's; belongs to one event loop."""

    def __init__(self, max_stored: int, max_bytes: int) -> None:
        self.max_stored = max_stored
        self._max_bytes = max_bytes
        self._tenants: dict[str, _OfTenant] = {}

    def keep(self, tenant: Tenant, response_id: str, stored: Stored) -> None:
        of_tenant = self._tenants.setdefault(tenant.name, _OfTenant())
        of_tenant.add(response_id, stored)
        while len(of_tenant.by_id) > self.max_stored or of_tenant.num_bytes > self._max_bytes:
            of_tenant.drop(next(iter(of_tenant.by_id)))

    def get(self, tenant: Tenant, response_id: str, *, field: str) -> Stored:
        """NotFound naming `field` for one that was never kept, was dropped, or is another tenant's."""
        of_tenant = self._tenants.get(tenant.name)
        if of_tenant is None or response_id not in of_tenant.by_id:
            raise NotFound(f"{field}: there is no response {quoted(response_id)}", field=field)
        of_tenant.by_id.move_to_end(response_id)
        return of_tenant.by_id[response_id][0]

    def delete(self, tenant: Tenant, response_id: str, *, field: str) -> None:
        """NotFound as `get`."""
        self.get(tenant, response_id, field=field)
        self._tenants[tenant.name].drop(response_id)


class _OfTenant:
    """The least recently used first, each with its bytes."""

    def __init__(self) -> None:
        self.by_id: OrderedDict[str, tuple[Stored, int]] = OrderedDict()
        self.num_bytes = 0

    def add(self, response_id: str, stored: Stored) -> None:
        num_bytes = stored.num_bytes
        self.by_id[response_id] = stored, num_bytes
        self.num_bytes += num_bytes

    def drop(self, response_id: str) -> None:
        _, num_bytes = self.by_id.pop(response_id)
        self.num_bytes -= num_bytes


def _num_bytes(message: Message) -> int:
    calls = ((call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ())
    texts = (message.content, message.reasoning_content, *(text for call in calls for text in call))
    return MESSAGE_BYTES + sum(map(sys.getsizeof, texts))
