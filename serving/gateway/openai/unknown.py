"""What becomes of fields that a body has and that nothing here knows.

Clients add fields faster than servers learn them, so such a field is no reason to refuse a request: the answer names it
(`gateway.unknown_fields = "warn"`), or the request is refused (`"refuse"`). A field that is known and not served is not
among these: it is refused by name, always.
"""

import re
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

from moonshard.rpc.status import InvalidArgument
from moonshard.serving.gateway.records.metrics import GatewayMetrics

HEADER = "x-moonshard-unknown-fields"
MAX_NAMES = 8
MAX_NAME_CHARS = 64
_INDEX = re.compile(r"\[\d+\]")


@dataclass(frozen=True, slots=True)
class UnknownFields:
    """What becomes of them."""

    policy: Literal["warn", "refuse"]
    metrics: GatewayMetrics

    def tell(self, paths: Iterable[str], headers: MutableMapping[str, str]) -> None:
        """Names them in the answer's headers. InvalidArgument for the first one, where they are refused."""
        names: dict[str, None] = {}
        for path in paths:
            if self.policy == "refuse":
                raise InvalidArgument(f"{path}: this field is unknown", field=path)
            names[_header_name(path)] = None
            if len(names) == MAX_NAMES:
                break
        if names:
            self.metrics.unknown_fields.inc()
            headers[HEADER] = ", ".join(names)


def _header_name(path: str) -> str:
    """A client's own words, as a header can hold them."""
    return quote(_INDEX.sub("[]", path[-MAX_NAME_CHARS:]), safe="[]")[:MAX_NAME_CHARS]
