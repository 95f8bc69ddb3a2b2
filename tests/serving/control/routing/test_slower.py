"""A block in a slower tier counts at what fetching it costs: neither as known nor as unknown."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.kv.prefix import block_names
from moonshard.serving.control.dispatch.attempt import Attempt, AttemptLeg
from moonshard.serving.control.routing.policies import policy_of
from moonshard.serving.control.routing.router import Ask, Home, Router

BLOCK_SIZE, NUM_BLOCKS = 16, 10
NAMES = block_names(b"root", range(BLOCK_SIZE * NUM_BLOCKS), BLOCK_SIZE)
NUM_PROMPT = BLOCK_SIZE * NUM_BLOCKS + 1
WORKERS = ("a", "b", "c")
num_blocks = st.integers(0, NUM_BLOCKS)
shares = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])


def ask() -> Ask:
    return Ask(num_tokens=NUM_PROMPT + 50, num_prompt=NUM_PROMPT, names=NAMES, block_size=BLOCK_SIZE)


def home(worker: str) -> Home:
    return Home(worker, 0)


def knows(router: Router, where: Home, num_names: int) -> None:
    for name in NAMES[:num_names]:
        router.index.add(router.home_number(where), name)


def a_router(has: Mapping[str, tuple[int, int, int, float, float] | int]) -> Router:
    """Per worker: blocks at hand, in its own tiers and in the shared one, and what fetching from these costs; or only
    those at hand, of a worker without tiers.
    """
    router = Router(queue_weight=0.2)
    for worker, said in has.items():
        at_hand, *rest = (said,) if isinstance(said, int) else said
        knows(router, home(worker), int(at_hand))
        if rest:
            own, shared, own_share, shared_share = rest
            knows(router, Home(worker, 1), int(own))
            knows(router, Home(worker, 2), int(shared))
            router.fetches([home(worker)], Home(worker, 1), Home(worker, 2), own_share, shared_share)
    return router


def left_at(router: Router, worker: str) -> int:
    reservation = router.reserve([home(worker)], ask())
    assert reservation is not None
    router.release(reservation)
    return reservation.num_left_tokens


@given(st.tuples(*[st.tuples(num_blocks, num_blocks, num_blocks, shares, shares)] * len(WORKERS)))
def test_what_is_left_is_what_computing_and_fetching_take_together(has: tuple):
    by_worker: dict[str, Any] = dict(zip(WORKERS, has, strict=True))
    router = a_router(by_worker)
    in_shared = max(each[2] for each in has)
    for worker, (at_hand, own, _, own_share, shared_share) in by_worker.items():
        saved = max(0.0, (own - at_hand) * (1 - own_share), (in_shared - at_hand) * (1 - shared_share))
        expected = NUM_PROMPT - int((at_hand + saved) * BLOCK_SIZE)
        assert left_at(router, worker) == pytest.approx(expected, abs=1)


def test_a_worker_without_tiers_fetches_nothing_of_what_others_share():
    router = a_router({"a": (0, 0, 10, 0.1, 0.1), "b": 0})
    assert left_at(router, "b") == NUM_PROMPT
    assert left_at(router, "a") < NUM_PROMPT / 2


@pytest.mark.parametrize(
    ("has", "chosen"),
    [
        ({"a": (0, 10, 0, 0.1, 1.0), "b": 0}, "a"),  # can fetch it
        ({"a": (0, 10, 0, 0.1, 1.0), "b": 10}, "b"),  # has it at hand
        ({"a": (0, 10, 0, 0.9, 1.0), "b": 5}, "b"),  # half at hand is better than all far away
        ({"a": (0, 10, 0, 0.2, 1.0), "b": 5}, "a"),
        ({"a": (0, 0, 0, 1.0, 0.5), "b": (0, 0, 10, 1.0, 0.1)}, "b"),  # all can fetch it, and it is the faster
    ],
)
def test_a_request_goes_where_computing_and_fetching_take_least(has: dict, chosen: str):
    router = a_router(has)
    reservation = router.reserve([home(worker) for worker in has], ask(), policy=policy_of("cost"))
    assert reservation is not None
    assert reservation.home.worker == chosen


def test_what_can_be_fetched_is_not_said_to_be_known():
    reservation = a_router({"a": (2, 10, 0, 0.0, 1.0)}).reserve([home("a")], ask())
    assert reservation is not None
    assert reservation.num_prompt == NUM_PROMPT
    assert reservation.num_known_tokens == 2 * BLOCK_SIZE
    assert reservation.num_left_tokens == 1


def test_what_can_be_fetched_is_moved_all_the_same_and_the_prompt_is_as_long_as_it_is():
    reservation = a_router({"a": (2, 10, 0, 0.5, 1.0)}).reserve([home("a")], ask())
    assert reservation is not None
    leg = AttemptLeg(reservation, epoch=1)
    attempt = Attempt(decode=leg, prefill=None, is_local_prefill=False, is_resumed=False, begun_s=0.0)
    assert attempt.num_prompt == NUM_PROMPT
    assert attempt.num_moved_tokens == NUM_PROMPT - 2 * BLOCK_SIZE
    assert attempt.num_left_tokens == NUM_PROMPT - (2 + 4) * BLOCK_SIZE


def test_of_a_lost_worker_nothing_can_be_fetched_any_more():
    router = a_router({"a": (0, 10, 0, 0.0, 1.0)})
    router.index.purge(router.home_number(Home("a", 1)))
    assert left_at(router, "a") == NUM_PROMPT
    assert np.isfinite(left_at(router, "a"))
