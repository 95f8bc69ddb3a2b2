"""A request's waterfall: the gateway's lane is the whole request, and nothing that a worker did lies outside of it."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from moonshard.experiments.reading.pictures.waterfall import draw_waterfall, slices, timing_of
from moonshard.rpc.types import Timing

MS = st.floats(0, 1e4)


@st.composite
def timings(draw: st.DrawFn) -> Timing:
    """What workers measured lies inside the gateway's phases, as it does where nothing is wrong."""
    queue, prefill, wire = draw(MS), draw(MS), draw(MS)
    land, join, decode, rest = draw(MS), draw(MS), draw(MS), draw(MS)
    is_moved = draw(st.booleans())
    exposed = draw(st.floats(0, 1)) * rest if is_moved else 0.0
    gateway_queue, finish = draw(MS), draw(MS)
    lost, reserve = draw(MS), draw(MS) if is_moved else 0.0
    first, after = lost + reserve + queue + prefill + wire, rest + decode + (land + join if is_moved else 0.0)
    return Timing(
        e2e_ms=gateway_queue + first + after + finish,
        ttft_ms=gateway_queue + first,
        gateway_queue_ms=gateway_queue,
        first_token_ms=first,
        decode_ms=after,
        finish_ms=finish,
        worker_queue_ms=queue,
        worker_prefill_ms=prefill,
        worker_decode_ms=decode,
        wire_ms=wire,
        lost_ms=lost,
        decode_queue_ms=reserve,
        handoff_gap_ms=draw(st.floats(0, 1)) * after if is_moved else 0.0,
        transfer_ms=exposed + draw(st.floats(0, 1)) * prefill if is_moved else 0.0,
        exposed_transfer_ms=exposed,
        land_ms=land if is_moved else 0.0,
        join_ms=join if is_moved else 0.0,
    )


@given(timings())
def test_the_gateways_phases_adjoin_and_end_with_the_request(timing: Timing):
    own = [one for one in slices(timing) if one.lane == "gateway"]
    for before, after in pairwise(own):
        assert after.start_ms == pytest.approx(before.end_ms)
    if own:
        assert own[0].start_ms == 0
        assert own[-1].end_ms == pytest.approx(timing.e2e_ms)


@given(timings())
def test_what_was_measured_elsewhere_lies_inside(timing: Timing):
    for one in slices(timing):
        assert one.start_ms >= -1e-6
        assert one.end_ms <= timing.e2e_ms + 1e-6
    lengths = {(one.lane, one.name): one.length_ms for one in slices(timing)}
    assert lengths.get(("transfer", "KV"), 0.0) == timing.transfer_ms
    assert lengths.get(("lost attempts", "lost"), 0.0) == timing.lost_ms
    assert lengths.get(("decode worker", "reserve"), 0.0) == timing.decode_queue_ms
    assert lengths.get(("decode worker", "decode"), 0.0) == timing.worker_decode_ms
    assert lengths.get(("client", "handoff gap"), 0.0) == timing.handoff_gap_ms


def test_a_servers_row_is_read_in_milliseconds_and_null_as_nothing():
    row = dict.fromkeys(
        ("worker_queue_ms", "worker_prefill_ms", "worker_decode_ms", "wire_ms", "handoff_gap_ms", "transfer_ms")
    )
    row |= {"decode_queue_ms": None, "lost_ns": 500_000}
    row |= {"exposed_transfer_ms": None, "land_ms": 2.5, "join_ms": None, "num_retries": 1, "ttft_ns": None}
    row |= {"e2e_ns": 4_000_000, "gateway_queue_ns": 1_000_000, "first_token_ns": 0, "decode_ns": 0, "finish_ns": 0}
    timing = timing_of(row)
    assert (timing.e2e_ms, timing.gateway_queue_ms, timing.land_ms, timing.wire_ms) == (4.0, 1.0, 2.5, 0)
    assert (timing.num_retries, timing.lost_ms, timing.decode_queue_ms) == (1, 0.5, 0)


@given(timings())
def test_only_lanes_that_had_a_part_are_drawn(timing: Timing):
    local = replace(timing, decode_queue_ms=0.0, transfer_ms=0.0, exposed_transfer_ms=0.0, handoff_gap_ms=0.0)
    axes = Figure().subplots()
    draw_waterfall(axes, local)
    said = [label.get_text() for label in axes.get_yticklabels()]
    assert "transfer" not in said
    assert "prefill worker" not in said
    assert len(axes.patches) == len(slices(local))
