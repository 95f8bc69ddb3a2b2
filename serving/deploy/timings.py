"""Where the time of a start goes: named phases of one process, counted from the moment at which the kernel began it.

Phases may lie within one another and, where threads work side by side, beside one another: each says when it began and
how long it took, and none is added up with others. Without jax and without imports that take time: it is there before
anything else is.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROUNDING_S = 2e-4  # of what is told: times are told in tenths of a millisecond


@dataclass(frozen=True, slots=True)
class StartPhase:
    """A span of a start. Times in seconds, from the beginning of the process."""

    name: str
    detail: str  # which program, or how much; may be empty
    begun_s: float
    took_s: float


class Timings:
    """The phases of this process so far. Any thread."""

    def __init__(self) -> None:
        self._origin_s = time.perf_counter() - since_process_began_s()
        self._phases: list[StartPhase] = []
        self._lock = threading.Lock()

    @property
    def phases(self) -> tuple[StartPhase, ...]:
        """The phases in the order in which they began."""
        with self._lock:
            return tuple(sorted(self._phases, key=lambda phase: phase.begun_s))

    @property
    def now_s(self) -> float:
        """Seconds since the process began."""
        return time.perf_counter() - self._origin_s

    @contextlib.contextmanager
    def phase(self, name: str, detail: str = "") -> Iterator[None]:
        begun_s = self.now_s
        try:
            yield
        finally:
            self.note(name, begun_s, detail)

    def note(self, name: str, begun_s: float, detail: str = "") -> None:
        """A phase that began at `begun_s` and ends now."""
        phase = StartPhase(name, detail, begun_s, self.now_s - begun_s)
        with self._lock:
            self._phases.append(phase)

    def divide(self, begun_s: float, **took_s: float) -> None:
        """Parts of a span that alternated within it, each as one phase, one behind the other from `begun_s` on."""
        for name, took in took_s.items():
            with self._lock:
                self._phases.append(StartPhase(name, "", begun_s, took))
            begun_s += took

    def told(self) -> list[list[object]]:
        """The phases for the status pipe: each as [name, detail, begun_ms, took_ms]."""
        return [[p.name, p.detail, round(p.begun_s * 1e3, 1), round(p.took_s * 1e3, 1)] for p in self.phases]


def nested(phases: Iterable[StartPhase]) -> Iterator[tuple[StartPhase, int]]:
    """The phases in the order in which they began, each with the number of phases that it lies within."""
    around_s: list[float] = []  # when those end that the last one lies within, itself included
    for phase in sorted(phases, key=lambda phase: (phase.begun_s, -phase.took_s)):
        end_s = phase.begun_s + phase.took_s
        while around_s and end_s > around_s[-1] + ROUNDING_S:
            around_s.pop()
        yield phase, len(around_s)
        around_s.append(end_s)


def phases_told(fields: Mapping[str, object]) -> list[StartPhase]:
    """What `Timings.told` gave, out of the fields of a status event; what has another form is left out."""
    told = fields.get("timings")
    found: list[StartPhase] = []
    for entry in told if isinstance(told, Sequence) else ():
        match entry:
            case [str(name), str(detail), int() | float() as begun_ms, int() | float() as took_ms]:
                found.append(StartPhase(name, detail, begun_ms / 1e3, took_ms / 1e3))
    return found


def since_process_began_s() -> float:
    """Seconds since the process began, by the kernel's account, to a hundredth (proc(5): field 22 of `stat`, in ticks
    since boot). Linux only; else 0.
    """
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
