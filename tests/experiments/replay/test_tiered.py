"""The replay with tiers against what can be worked out by hand, and what must hold whatever is replayed."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshard.experiments.common.trace_file import BLOCK_TOKENS, TracedRequest
from moonshard.experiments.replay.replay import ReplayConfig, replay
from moonshard.experiments.replay.synthetic import coding_agent_trace
from moonshard.experiments.replay.tiered import TieredConfig, TieredReplayed, replay_tiered
from moonshard.experiments.replay.tiers import tier_of
from moonshard.serving.control.routing.names import PolicyName

RATE = 1000.0  # tokens/s: a block takes 0.512 s
BLOCK_S = BLOCK_TOKENS / RATE
A_TOKEN_S = 1 / RATE


def asks(at_s: float, blocks: range | list[int]) -> TracedRequest:
    return TracedRequest(1e3 * at_s, len(blocks) * BLOCK_TOKENS, 1, tuple(blocks))


def run(
    requests: list[TracedRequest],
    *tiers: str,
    device: int | None = 4,
    workers: int = 1,
    policy: PolicyName = "cost",
) -> TieredReplayed:
    routing = ReplayConfig(num_workers=workers, policy=policy, tokens_per_s=RATE, blocks_per_worker=device)
    return replay_tiered(
        requests, TieredConfig(routing=routing, tiers=tuple(tier_of(text) for text in tiers), block_bytes=100)
    )


A, B, C = range(4), range(100, 104), range(200, 204)


def test_what_the_device_lost_is_fetched_from_the_tier_below():
    found = run([asks(0, A), asks(10, B), asks(20, A)], "host:100:10:5")
    (host,) = found.tiers
    assert found.device_hit_rate == 0
    assert found.hit_rate == host.hit_rate == found.oracle_hit_rate == pytest.approx(4 / 12)
    assert (host.bytes_up, host.bytes_down, host.num_evicted) == (400, 800, 0)
    assert found.later_ttft.p50_s == pytest.approx(0.045 + A_TOKEN_S)
    assert found.ttft.p99_s == pytest.approx(4 * BLOCK_S)


def test_each_block_comes_from_the_nearest_tier_that_has_it_and_is_kept_in_those_before():
    trace = [asks(0, A), asks(10, B), asks(20, A), asks(30, C), asks(40, A)]
    found = run(trace, "host:4:1:0", "ssd:100:1:0")
    host, ssd = found.tiers
    assert (host.hit_rate, ssd.hit_rate) == pytest.approx((0, 8 / 20))
    assert host.bytes_down == 100 * (4 + 4 + 4 + 4 + 4)  # A, B, A again, C, A again
    assert ssd.bytes_down == 100 * 12
    alone = run(trace, "host:8:1:0", "ssd:100:1:0")
    assert [tier.hit_rate for tier in alone.tiers] == pytest.approx([8 / 20, 0])


def test_a_tier_of_its_own_is_of_no_use_to_another_worker_and_a_shared_one_is():
    trace = [asks(0, A), asks(10, A)]
    own = run(trace, "ssd:100", workers=2, policy="round_robin")
    shared = run(trace, "store:100", workers=2, policy="round_robin")
    assert own.hit_rate == 0
    assert shared.hit_rate == shared.tiers[0].hit_rate == pytest.approx(4 / 8)
    assert shared.tiers[0].bytes_down == 400


def test_the_router_sends_a_prompt_where_its_blocks_can_be_fetched():
    """Both devices have forgotten A. The worker that has it in its tier has as much to do as the other."""
    trace = [
        asks(0, A),
        asks(0.1, B),
        *(asks(100 + 10 * number, range(1000 * number, 1000 * number + 4)) for number in range(1, 9)),
    ]
    trace += [asks(300 + 10 * number, prompt) for number, prompt in enumerate([A, B, A, B])]
    found = run(trace, "ssd:100", workers=2)
    assert found.hit_rate == found.oracle_hit_rate > 0


def test_a_tier_slower_than_computing_delays_nobody_by_more_than_that_and_is_left_alone_then():
    slow = 10_000.0 * BLOCK_S  # ms: ten times as long
    found = run([asks(0, A), asks(100, B), asks(200, A), asks(204, B)], f"ssd:100:{slow}:0")
    assert found.hit_rate == 0
    assert found.ttft.p99_s == pytest.approx(8 * BLOCK_S)  # the third, which waited as long as it would have computed
    assert found.tiers[0].bytes_up == 400  # and nobody after it did


def test_what_is_fetched_is_not_computed_and_others_are_computed_meanwhile():
    """C comes while A is being fetched, and is computed before it."""
    trace = [asks(0, A), asks(10, B), asks(20, A), asks(20.01, C)]
    found = run(trace, "host:100:100:0")
    waits = [4 * BLOCK_S, 4 * BLOCK_S, 0.01 + 4 * BLOCK_S + A_TOKEN_S, 4 * BLOCK_S]
    assert found.ttft.p99_s == pytest.approx(max(waits))
    assert found.later_ttft.p50_s == pytest.approx(waits[2])


def test_later_turns_go_on_where_an_earlier_prompt_ended():
    system = [0, 1]
    trace = [asks(0, [*system, 10]), asks(10, [*system, 20]), asks(20, [*system, 10, 11]), asks(30, [*system, 30])]
    found = run(trace, "host:100", device=None)
    assert found.later_ttft.p50_s == found.later_ttft.p99_s == pytest.approx(BLOCK_S)
    assert found.ttft.p99_s == pytest.approx(3 * BLOCK_S)


def test_only_full_blocks_are_found_again():
    trace = [TracedRequest(at, 3 * BLOCK_TOKENS // 2, 1, (1, 2)) for at in (0.0, 5000.0)]
    found = run(trace, "host:100")
    assert found.hit_rate == found.oracle_hit_rate == pytest.approx(1 / 2)
    assert found.tiers[0].bytes_down == 100


def test_a_trace_without_full_blocks_is_refused():
    with pytest.raises(ValueError, match="no requests of a full block"):
        run([TracedRequest(0.0, 10, 1, (1,))], "host:100")


prompts = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 3.0, 40.0]), st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=25
)


def trace_of(prompts: list[tuple[float, int, int]]) -> list[TracedRequest]:
    """Four chains whose first block is the same."""
    found, at_s = list[TracedRequest](), 0.0
    for gap_s, number, length in prompts:
        at_s += gap_s
        found.append(asks(at_s, [0, *range(10 * number + 1, 10 * number + length)]))
    return found


@settings(max_examples=25)
@given(prompts, st.sampled_from(["lru", "s3_fifo", "hit_density"]), st.integers(1, 3))
def test_parts_are_the_whole_and_never_more_than_the_oracle(prompts: list, retention: str, workers: int):
    found = run(
        trace_of(prompts), f"host:5:{retention}", f"ssd:9:{retention}", f"store:12:{retention}", workers=workers
    )
    assert found.hit_rate == pytest.approx(found.device_hit_rate + sum(tier.hit_rate for tier in found.tiers))
    assert found.hit_rate <= found.oracle_hit_rate + 1e-9
    assert found.num_requests == len(prompts)
    assert all(tier.bytes_up >= 100 * tier.hit_rate for tier in found.tiers)
    assert 0 < found.ttft.p50_s <= found.ttft.p95_s <= found.ttft.p99_s


@settings(max_examples=25)
@given(prompts)
def test_one_worker_with_room_below_finds_all_that_can_be_found(prompts: list):
    found = run(trace_of([(40.0, number, length) for _, number, length in prompts]), "host:1000", device=6)
    assert found.hit_rate == pytest.approx(found.oracle_hit_rate)


@settings(max_examples=25)
@given(prompts, st.integers(1, 12))
def test_tiers_that_are_never_worth_it_change_nothing(prompts: list, device: int):
    """What is computed by then is all that the device has: the first fetch, of which nothing is known, is in vain."""
    trace = trace_of([(40.0, number, length) for _, number, length in prompts])
    routing = ReplayConfig(num_workers=1, tokens_per_s=RATE, blocks_per_worker=device)
    assert run(trace, "ssd:1000:1e9", device=device).hit_rate == pytest.approx(replay(trace, routing).hit_rate)


def test_tiers_find_more_of_agents_than_their_devices_alone():
    trace = coding_agent_trace(20, over_s=3600.0, seed=0)
    alone = run(trace, "host:1:1e9", device=60, workers=2)
    tiered = run(trace, "host:100", "ssd:300", device=60, workers=2)
    assert tiered.hit_rate > alone.hit_rate + 0.1
    assert tiered.later_ttft.p95_s < alone.later_ttft.p95_s


def test_the_same_trace_gives_the_same_figures():
    trace = coding_agent_trace(6, over_s=900.0, seed=1)
    first, again = (run(trace, "host:50", "ssd:100", device=60, workers=3) for _ in range(2))
    assert replace(first, decisions_per_s=0.0) == replace(again, decisions_per_s=0.0)
