"""The control plane alone, under virtual time: what must be true of thousands of requests, whatever fails meanwhile."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from moonshard.kv.blocks import BlockGroup, BlockGroups
from moonshard.serving.control.batching.partition import Partition
from moonshard.serving.control.dispatch.dispatcher import DispatchRules
from moonshard.serving.control.dispatch.retries import LegFailure
from moonshard.serving.control.handoff.decode import DecodeSide
from moonshard.serving.control.handoff.messages import Cause
from moonshard.serving.control.handoff.prefill import PrefillSide
from moonshard.serving.control.handoff.reservations import Reservations
from moonshard.serving.control.routing.router import Reservation, Router
from tests.serving.control.loop.deployment import BLOCK_SIZE, BY_COST, BY_LENGTH, Deployment, Faults, Traffic

DEATHS = (
    (1.0, "d0"),
    (2.0, "p1"),
    (3.0, "d1"),
    (3.2, "p0"),  # with its fellow: decode workers prefill
    (3.3, "p1"),
    (5.0, "d0"),
    (5.02, "d1"),
    (5.04, "d2"),  # and nobody decodes
)
NONE = Faults()
ALL = Faults(deaths=DEATHS, writes=0.02, leaving=0.05)


def served(
    seed: int, traffic: Traffic, faults: Faults = NONE, rules: DispatchRules = BY_COST, **workers: Any
) -> Deployment:
    deployment = Deployment(seed, faults=faults, rules=rules, **workers)
    try:
        deployment.serve(traffic)
        deployment.check()
    except Exception as fault:
        fault.add_note(f"seed {seed}, after {deployment.events.now_s:g} s")
        raise
    return deployment


def a_thousand(seed: int) -> Deployment:
    return served(seed, Traffic(num_requests=1000, per_s=120.0, bursts=((300, 150), (700, 100))), ALL, BY_LENGTH)


def causes(deployments: list[Deployment]) -> set[str]:
    return {entry[3] for deployment in deployments for entry in deployment.events.log if entry[1] == "failed"}


def test_a_thousand_requests_end_once_each_through_handoffs_failover_and_overload():
    deployment = a_thousand(1)
    assert deployment.ends.total() == 1000
    assert deployment.ends["Finished"] > 700
    for kind in ("NoRoom", "NoWorker", "TooLate", "Cancelled"):
        assert deployment.ends[kind] > 0, kind
    assert causes([deployment]) >= {
        LegFailure.WORKER_GONE.name,
        *(cause.name for cause in (Cause.OVERLOADED, Cause.DECODE_GONE, Cause.PREFILL_GONE, Cause.WRITE_FAILED)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 22))
def test_twenty_thousand_requests_end_once_each(seed: int):
    assert a_thousand(seed).ends.total() == 1000


def test_where_nothing_fails_and_there_is_room_every_request_finishes():
    deployment = served(3, Traffic(num_requests=200, per_s=60.0))
    assert deployment.ends == Counter(Finished=200)
    assert not causes([deployment])


def test_a_prefill_worker_that_has_too_much_to_do_refuses_with_a_word_of_its_own():
    deployment = served(4, Traffic(num_requests=200, per_s=60.0, bursts=((0, 150),)), num_prefill=1, num_decode=6)
    assert deployment.ends["QueueFull"] + deployment.ends["QueueTimeout"] > 0
    assert deployment.ends["Finished"] > 50


def test_prompts_with_a_window_are_handed_over_and_decoded_whatever_fails():
    """The two kinds of workers write a window's blocks over after different numbers of them."""
    windows = [BlockGroup.sliding(12, step, BLOCK_SIZE) for step in (16, 24)]
    groups = [BlockGroups((BlockGroup(), window)) for window in windows]
    traffic = Traffic(num_requests=300, per_s=60.0, bursts=((100, 60),))
    deployment = served(7, traffic, ALL, groups=(groups[0], groups[1]), chunk_tokens=16)
    assert deployment.ends["Finished"] > 150
    assert deployment.ends.total() == 300
    lengths = [len(asked.request.prompt) for asked in deployment.gateway.asked]
    most = max(window.max_blocks or 0 for window in windows)
    assert sum(length // BLOCK_SIZE > most for length in lengths) > 10


def test_the_same_seed_gives_the_same_events_and_another_gives_others():
    traffic = Traffic(num_requests=150, per_s=100.0, bursts=((50, 60),))
    logs = [served(seed, traffic, ALL).events.log for seed in (5, 5, 6)]
    assert logs[0] == logs[1]
    assert logs[0] != logs[2]


def nothing(*_: object, **__: object) -> None:
    pass


def lose_reserved_blocks(patch: pytest.MonkeyPatch) -> None:
    def give_up(self: DecodeSide, *what: object) -> None:
        release, self._pool.release = self._pool.release, nothing
        try:
            really(self, *what)
        finally:
            self._pool.release = release

    really: Callable[..., None] = DecodeSide._give_up
    patch.setattr(DecodeSide, "_give_up", give_up)


def never_end_a_quarantine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefillSide, "expire", lambda self, now_s: ())


def keep_tokens_of_what_failed(patch: pytest.MonkeyPatch) -> None:
    def release(self: Router, reservation: Reservation) -> None:
        if num_released[0] % 10:
            really(self, reservation)
        num_released[0] += 1

    num_released, really = [1], Router.release
    patch.setattr(Router, "release", release)


def keep_those_who_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reservations, "_give_up", lambda self, handoff, owner, now_s: [])


def keep_what_has_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeSide, "left", nothing)


def forget_what_is_in_flight(patch: pytest.MonkeyPatch) -> None:
    def settle(self: Partition, occupancy: object) -> None:
        num_in_flight, occupancy.num_in_flight = occupancy.num_in_flight, 0  # type: ignore[attr-defined]
        try:
            really(self, occupancy)
        finally:
            occupancy.num_in_flight = num_in_flight  # type: ignore[attr-defined]

    really: Callable[..., None] = Partition.settle
    patch.setattr(Partition, "settle", settle)


@pytest.mark.parametrize(
    "broken",
    [
        lose_reserved_blocks,
        never_end_a_quarantine,
        keep_tokens_of_what_failed,
        keep_those_who_wait,
        keep_what_has_left,
        forget_what_is_in_flight,
    ],
)
def test_a_rule_that_is_broken_is_found(broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    broken(monkeypatch)
    traffic = Traffic(num_requests=150, per_s=100.0, bursts=((50, 60),))
    with pytest.raises(Exception) as found:  # noqa: PT011
        served(5, traffic, Faults(writes=0.1, leaving=0.2))
    assert found.value.__notes__
