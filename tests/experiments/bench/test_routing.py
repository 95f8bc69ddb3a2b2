"""The bench's parts of routing: a miniature of each, and how its figures are laid out."""

from dataclasses import replace

import pytest

from moonshard.experiments.bench.costs import routing
from moonshard.experiments.bench.costs.gateway_cost import BARE, BARS_MS, DIRECT, THROUGH, gateway_grid
from moonshard.experiments.bench.costs.routing import POLICIES, RATES, measure_routing, replay_grid, speed_grid
from moonshard.experiments.bench.costs.token_cost import token_grid
from moonshard.experiments.common.running.measurement import Measurement, Plan
from moonshard.experiments.replay.synthetic import NUM_SYSTEM_PROMPTS, SYSTEM_BLOCKS, agent_trace

MINIATURE = replace(Plan(), decisions=20, replay_sessions=10)


def test_a_miniature_fills_both_tables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(routing, "NUM_WORKERS", 10)
    found = measure_routing(MINIATURE, None)
    assert [row[0] for row in speed_grid(found, MINIATURE).rows] == [routing.DECISION, routing.HASHING, routing.EVENT]
    rows = replay_grid(found, MINIATURE).rows
    assert [(row[0], row[1]) for row in rows] == [
        (f"`{name}`", f"{rate:,.0f}") for name in POLICIES for rate in (RATES if name == "cost" else RATES[1:2])
    ]


@pytest.mark.parametrize(
    ("found", "load", "said"), [(0.356, 1.1, "held"), (0.355, 1.1, "missed"), (0.36, 1.2, "missed")]
)
def test_cost_has_to_find_again_and_to_share_out(found: float, load: float, said: str):
    shares = {"found": found, "oracle": 0.3655, "load": load}
    measured = [
        Measurement(level="routing", name=f"cost at 6000 tokens/s, {kind}", unit="share", samples=(value,))
        for kind, value in shares.items()
    ]
    ((*_, verdict),) = replay_grid(measured, Plan()).rows
    assert verdict == said


def test_what_the_gateway_adds_is_a_difference_of_p99s():
    assert list(BARS_MS) == [1, 32, 256]
    p99 = {("TTFT", DIRECT): 50.0, ("TTFT", THROUGH): 54.0, ("ITL", DIRECT): 51.0, ("ITL", THROUGH): 52.5}
    p99 |= {("TTFT", BARE): 70.0, ("ITL", BARE): 70.0}  # no part of what is added
    measured = [
        Measurement(level="gateway", name=f"{what}, 32 streams, {way}", unit="ms", samples=(value,))
        for (what, way), value in p99.items()
    ]
    ((streams, *_, ttft, itl, verdict),) = gateway_grid(measured, Plan()).rows
    assert (streams, ttft, itl, verdict) == ("32", "+4.0", "+1.5", "5 and 1 ms: missed")


def test_of_a_tokens_processor_time_what_the_bare_fronts_take_is_not_ours():
    spent_us = {"gRPC, 8 streams, bare": 50.0, "gRPC, 8 streams, gateway": 80.0, "HTTP, 16 streams, bare": 20.0}
    measured = [
        Measurement(level="gateway", name=f"processor time per token, {what}", unit="us", samples=(us,))
        for what, us in spent_us.items()
    ]
    assert token_grid(measured, Plan()).rows == (("8", "gRPC", "50.0", "80.0", "30.0", "1.60"),)


def test_sessions_that_are_made_up_are_traces_that_share_their_beginnings():
    requests = agent_trace(6, num_turns=4)
    assert len(requests) == 24
    assert requests == agent_trace(6, num_turns=4)
    assert [r.timestamp_ms for r in requests] == sorted(r.timestamp_ms for r in requests)
    for request in requests:
        assert len(request.blocks) == -(-request.input_tokens // 512)
        assert request.blocks[0] < NUM_SYSTEM_PROMPTS * SYSTEM_BLOCKS
