"""How long each operation ran, from the profile that XLA writes while a program runs.

An operation's time is its own: what runs inside it on the same thread, as a loop's body does, is taken off. Operations
run on several threads at once, so their sum may be more than the step's time; what a product's helpers on other threads
do is in its own time on the wall.
Source: XLA's traces (XSpace), as `jax.profiler.ProfileData` reads them: an event for each operation that a CPU ran.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One run of an operation on one thread."""

    program: int  # XLA's number of the compiled program
    name: str
    start_ns: float
    duration_ns: float


@dataclass(slots=True)
class Spent:
    """All runs of an operation together."""

    ns: float = 0.0
    count: int = 0


def operation_times(run: Callable[[], object]) -> dict[tuple[int, str], Spent]:
    """Of each operation, by program and name."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # the interpreter's own events would slow the launches
    with TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        with warnings.catch_warnings():  # of how jaxlib makes the types of its reader
            warnings.filterwarnings("ignore", "builtin type", DeprecationWarning)
            threads = list(_threads(jax.profiler.ProfileData.from_file(str(path))))
    found: dict[tuple[int, str], Spent] = defaultdict(Spent)
    for events in threads:
        for event, own_ns in own_times(events):
            spent = found[event.program, event.name]
            spent.ns += own_ns
            spent.count += 1
    return dict(found)


def own_times(events: Iterable[Event]) -> Iterator[tuple[Event, float]]:
    """Each event of one thread with its duration less those of the events inside it."""
    open_events: list[tuple[Event, float]] = []  # with what is inside so far
    for event in sorted(events, key=lambda one: (one.start_ns, -one.duration_ns)):
        while open_events and _end_ns(open_events[-1][0]) <= event.start_ns:
            done, inside_ns = open_events.pop()
            yield done, done.duration_ns - inside_ns
        if open_events:
            around, inside_ns = open_events[-1]
            open_events[-1] = (around, inside_ns + event.duration_ns)
        open_events.append((event, 0.0))
    for done, inside_ns in reversed(open_events):
        yield done, done.duration_ns - inside_ns


def _end_ns(event: Event) -> float:
    return event.start_ns + event.duration_ns


def _threads(profile: Any) -> Iterator[list[Event]]:
    for plane in profile.planes:
        for line in plane.lines:
            found = [event for each in line.events if (event := _operation(each)) is not None]
            if found:
                yield found


def _operation(event: Any) -> Event | None:
    stats = dict(event.stats)
    if "hlo_op" not in stats:
        return None
    return Event(
        program=int(stats["program_id"]),
        name=str(stats["hlo_op"]),
        start_ns=event.start_ns,
        duration_ns=event.duration_ns,
    )
