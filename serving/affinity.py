"""Where a session was served last: soft pins, so that its next turn finds what the last one left.

A session's name is opaque and comes from the client, so it is hashed before it is kept, and no more than so many are.
A pin that is not used for a while ends. Pure: time is an argument. Left out: whether a pin is followed
(`serving.policies`), and which header named the session.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

TTL_S = 600.0
MAX_PINS = 100_000
KEY_BYTES = 16


def session_key(tenant: str, name: str) -> bytes:
    """What stands for a session. Two tenants' sessions of one name are two."""
    tenant_bytes = tenant.encode()
    digest = hashlib.sha256(len(tenant_bytes).to_bytes(8, "little") + tenant_bytes + name.encode("utf-8", "replace"))
    return digest.digest()[:KEY_BYTES]


@dataclass(frozen=True, slots=True)
class _Pin:
    home: int
    until_s: float


class Pins:
    """A home for each session that was used lately."""

    def __init__(self, ttl_s: float = TTL_S, max_pins: int = MAX_PINS):
        self._ttl_s = ttl_s
        self._max_pins = max_pins
        self._pins: OrderedDict[bytes, _Pin] = OrderedDict()  # the one that ends first comes first

    def __len__(self) -> int:
        return len(self._pins)

    def find(self, key: bytes, now_s: float) -> int | None:
        pin = self._pins.get(key)
        return None if pin is None or pin.until_s <= now_s else pin.home

    def put(self, key: bytes, home: int, now_s: float) -> None:
        """The pin lasts for the time to live from now on; those that end first make room for it."""
        while self._pins and next(iter(self._pins.values())).until_s <= now_s:
            self._pins.popitem(last=False)
        self._pins[key] = _Pin(home, now_s + self._ttl_s)
        self._pins.move_to_end(key)
        if len(self._pins) > self._max_pins:
            self._pins.popitem(last=False)
