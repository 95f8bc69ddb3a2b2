"""How long steps take on a device: what each added to the time that the device had been busy.

Needs no device, so that whoever records steps can use it before there is one.
"""


class BusyTime:
    """Of one device. Told of every step, in the order in which they end."""

    def __init__(self) -> None:
        self._last_done_ns = 0

    def added_ns(self, launched_ns: int, done_ns: int) -> int:
        """From its launch to its end, or from the end of the step before where that was later."""
        added_ns = done_ns - max(launched_ns, self._last_done_ns)
        self._last_done_ns = done_ns
        return added_ns
