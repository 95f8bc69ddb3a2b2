"""Where requests with an affinity key were served last: soft pins, so that a next turn finds what the last one left.

An affinity key stands for what a client calls a session. The client's name for it is opaque, so it is hashed before it
is kept, and no more than so many are. A pin that is not used for a while ends, and all of a home whose process has
ended. Pins are plain tuples of numbers: a hundred thousand of these are nothing to Python's collector, which would look
through as many objects of a class again and again. Whether a pin is followed is decided in `routing.policies`.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Collection

TTL_S = 600.0
MAX_PINS = 100_000
KEY_BYTES = 16


def affinity_key(tenant: str, name: str) -> bytes:
    """The hash that stands for a client's session. Sessions of one name of two tenants have two keys."""
    tenant_bytes = tenant.encode()
    digest = hashlib.sha256(len(tenant_bytes).to_bytes(8, "little") + tenant_bytes + name.encode("utf-8", "replace"))
    return digest.digest()[:KEY_BYTES]


type _Pin = tuple[int, int, float]  # home, which process there, until when (s)


class Pins:
    """The home of each affinity key that was used lately."""

    def __init__(self, ttl_s: float = TTL_S, max_pins: int = MAX_PINS):
        self._ttl_s = ttl_s
        self._max_pins = max_pins
        self._pins: OrderedDict[bytes, _Pin] = OrderedDict()  # the one that ends first comes first
        self._num_ended = Counter[int]()  # processes, by home

    @property
    def num_pins(self) -> int:
        """Not `__len__`, since an empty `Pins` would then be false."""
        return len(self._pins)

    def find(self, key: bytes, now_s: float) -> int | None:
        home, process, until_s = self._pins.get(key, (-1, -1, now_s))
        return None if until_s <= now_s or process != self._num_ended[home] else home

    def put(self, key: bytes, home: int, now_s: float) -> None:
        """Pins a key for the time to live from now on. Where there are too many, those that end first are removed."""
        while self._pins and next(iter(self._pins.values()))[-1] <= now_s:
            self._pins.popitem(last=False)
        self._pins[key] = home, self._num_ended[home], now_s + self._ttl_s
        self._pins.move_to_end(key)
        if len(self._pins) > self._max_pins:
            self._pins.popitem(last=False)

    def end(self, home: int) -> None:
        """The process at this home has ended: all pins to it are removed."""
        self._num_ended[home] += 1

    def forget(self, homes: Collection[int]) -> None:
        """These homes are no more, and others may be given their numbers. Takes a look at every pin."""
        for key in [key for key, (home, *_) in self._pins.items() if home in homes]:
            del self._pins[key]
        for home in homes:
            self._num_ended.pop(home, None)

    def drop(self, key: bytes, home: int) -> None:
        """Removes a pin whose request came to nothing there."""
        if self._pins.get(key, (None,))[0] == home:
            del self._pins[key]
