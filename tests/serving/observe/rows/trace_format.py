"""The rules of Chrome's trace events, as Perfetto and Chrome read them: what breaks one is dropped there, or misplaced.

Source: "Trace Event Format", complete, nestable async and metadata events; Perfetto's JSON importer for what belongs
together and for the order of events of one moment.
"""

import math
from collections import defaultdict
from typing import Any

type Event = dict[str, Any]

_METADATA = {"process_name": str, "thread_name": str, "process_sort_index": int}


def check_format(drawn: dict[str, Any]) -> list[Event]:
    """Its events."""
    assert drawn.keys() == {"traceEvents", "displayTimeUnit"}
    assert drawn["displayTimeUnit"] in ("ms", "ns")
    events = drawn["traceEvents"]
    for event in events:
        _check_event(event)
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    assert named == {event["pid"] for event in events}
    _check_async([event for event in events if event["ph"] in "be"])
    _check_complete([event for event in events if event["ph"] == "X"])
    return events


def _check_event(event: Event) -> None:
    assert event["ph"] in ("M", "X", "b", "e")
    assert isinstance(event["name"], str)
    assert event["name"]
    assert isinstance(event["pid"], int)
    assert event["pid"] > 0
    assert isinstance(event["tid"], int)
    if event["ph"] == "M":
        (value,) = event["args"].values()
        assert isinstance(value, _METADATA[event["name"]])
        return
    assert isinstance(event["cat"], str)
    for number in (event["ts"], event.get("dur", 0)):
        assert math.isfinite(number)
        assert number >= 0
    assert ("dur" in event) == (event["ph"] == "X")
    assert isinstance(event.get("args", {}), dict)


def _track_of(event: Event) -> tuple[object, ...]:
    """Whose slices are stacked: an `id` is everybody's, a local one its process's."""
    if "id" in event:
        return event["cat"], event["id"]
    assert isinstance(event["id2"]["local"], str)
    return event["cat"], event["pid"], event["id2"]["local"]


def _check_async(events: list[Event]) -> None:
    """Each begin has its end, and what begins last ends first."""
    stacks = defaultdict(list)
    for event in sorted(events, key=lambda event: event["ts"]):  # which keeps the order of events of one moment
        stack = stacks[_track_of(event)]
        if event["ph"] == "b":
            assert not stack or stack[-1]["pid"] == event["pid"]
            stack.append(event)
        else:
            assert (stack[-1]["name"], stack[-1]["pid"]) == (event["name"], event["pid"])
            stack.pop()
    assert not any(stacks.values())


def _check_complete(events: list[Event]) -> None:
    """On one thread one follows the other; to the nanosecond, which is what readers keep."""
    end_ns = defaultdict(int)
    for event in sorted(events, key=lambda event: event["ts"]):
        thread, begin_ns = (event["pid"], event["tid"]), round(event["ts"] * 1e3)
        assert end_ns[thread] <= begin_ns
        end_ns[thread] = begin_ns + round(event["dur"] * 1e3)
