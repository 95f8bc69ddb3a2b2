"""Keys that nobody knows go to the same home from every gateway, evenly, and few move when homes come or go."""

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.serving.control.routing import policies
from moonshard.serving.control.routing.rendezvous import Rendezvous
from moonshard.serving.control.routing.router import Ask, Home, Router

NUM_KEYS = 4_000
KEYS = [b"key %d" % number for number in range(NUM_KEYS)]
WORKERS = st.lists(st.integers(0, 500).map("10.0.0.{}:1".format), min_size=2, max_size=20, unique=True)
BLOCK = 64


def winners(workers: list[str], keys: list[bytes]) -> list[str]:
    """The worker of each key, for a gateway that heard of the workers in this order."""
    rendezvous = Rendezvous()
    for number, worker in enumerate(workers):
        rendezvous.place(number, worker, 0)
    numbers = np.arange(len(workers))
    return [workers[int(rendezvous.weights(numbers, key).argmax())] for key in keys]


@given(WORKERS, st.randoms(use_true_random=False))
def test_the_order_in_which_workers_came_changes_nothing(workers: list[str], random):
    shuffled = random.sample(workers, len(workers))
    assert winners(workers, KEYS[:50]) == winners(shuffled, KEYS[:50])


@given(WORKERS)
def test_of_a_worker_that_goes_only_its_own_keys_move(workers: list[str]):
    *left, gone = workers
    before, after = winners(workers, KEYS[:300]), winners(left, KEYS[:300])
    assert all(old in (new, gone) for old, new in zip(before, after, strict=True))
    moved = [new for old, new in zip(before, after, strict=True) if old == gone]
    assert gone not in moved


@pytest.mark.parametrize("num_workers", [2, 3, 8, 50])
def test_keys_are_shared_out_evenly(num_workers: int):
    workers = [f"10.0.0.{number}:50061" for number in range(num_workers)]
    share = NUM_KEYS / num_workers
    counts = Counter(winners(workers, KEYS))
    assert all(abs(counts[worker] - share) < 5 * share**0.5 for worker in workers)


def test_two_partitions_of_a_worker_are_two_homes():
    rendezvous = Rendezvous()
    rendezvous.place(0, "a", 0)
    rendezvous.place(40, "a", 1)  # beyond what there was room for
    found = Counter(int(rendezvous.weights(np.array([0, 40]), key).argmax()) for key in KEYS)
    assert min(found.values()) > 0.4 * NUM_KEYS


def send(router: Router, among: list[Home], key: bytes, *, policy: policies.Policy = policies.cost) -> str:
    """The worker that the first request of a session goes to, which ends at once."""
    ask = Ask(num_tokens=BLOCK, num_prompt=BLOCK, is_prefill=True, names=(key,), affinity_key=key)
    found = router.reserve(among, ask, policy=policy, now_s=1.0)
    assert found is not None
    router.sent(found, now_s=1.0)
    router.release(found)
    return found.home.worker


HOMES = [Home(worker, 0) for worker in "abcde"]


@pytest.mark.parametrize("policy", [policies.cost, policies.affinity])
def test_a_session_of_one_gateway_goes_where_it_was_when_it_comes_through_another(policy: policies.Policy):
    one, other = Router(), Router()
    for home in reversed(HOMES):
        other.home_number(home)
    placed = {key: send(one, HOMES, key, policy=policy) for key in KEYS[:40]}
    num_same = sum(
        send(other, HOMES[::-1], key, policy=policy) == placed[key] for key in Random(1).sample(KEYS[:40], 40)
    )
    assert num_same >= (40 if policy is policies.affinity else 32)  # with bounds, a few that came last go on


def test_sessions_are_shared_out_more_evenly_than_by_weights_alone():
    router, many = Router(), [Home(f"worker {number}", 0) for number in range(20)]
    most = policies.MAX_PIN_LOAD * 200 / len(many) + policies.FEW_EXTRA + 1
    assert max(Counter(winners([home.worker for home in many], KEYS[:200])).values()) > most
    assert max(Counter(send(router, many, key) for key in KEYS[:200]).values()) <= most


def test_what_is_known_counts_more_than_what_every_gateway_would_do():
    router = Router()
    (favourite,) = [home for home in HOMES if home.worker == send(Router(), HOMES, b"s")]
    other = next(home for home in HOMES if home != favourite)
    router.index.add(router.home_number(other), b"s")
    assert send(router, HOMES, b"s") == other.worker


def test_a_home_with_too_much_to_do_is_passed_over():
    favourite = send(Router(), HOMES, b"s")
    router = Router()
    for home in HOMES:
        router.report(home, 100 * BLOCK if home.worker == favourite else 0)
    assert send(router, HOMES, b"s") != favourite
    assert send(router, [home for home in HOMES if home.worker == favourite], b"s") == favourite  # there is no other
