"""Who is silent, or does not go on, for the whole time is noticed in that time and a look; nobody else ever is."""

from hypothesis import given
from hypothesis import strategies as st

from moonshard.serving.gang.watch import LOOKS_PER_TIMEOUT, Watched

TIMEOUT_S = 2.0


@given(st.lists(st.sampled_from(["heard", "told", "done", "look"]), max_size=200))
def test_a_member_is_at_fault_exactly_after_so_many_looks_without_a_word_or_without_a_step(moves: list[str]):
    watched, since_heard, since_step, num_open, is_first = Watched("it"), 0, 0, 0, True
    for move in moves:
        if move == "heard":
            watched.heard()
            since_heard = -1
        elif move == "told":
            watched.num_told += 1
            num_open += 1
        elif move == "done" and num_open:
            watched.done()
            num_open -= 1
            since_step = -1
        elif move == "look":
            since_heard = 0 if is_first else since_heard + 1
            since_step = since_step + 1 if num_open else 0
            since_heard, since_step, is_first = max(since_heard, 0), max(since_step, 0), False
            fault = watched.look(TIMEOUT_S)
            is_silent, is_stuck = since_heard >= LOOKS_PER_TIMEOUT, since_step >= LOOKS_PER_TIMEOUT
            assert (fault is not None) == (is_silent or is_stuck)
            if fault is not None:
                assert fault.startswith("nothing came from it" if is_silent else "it finished no step")


def test_a_member_that_beats_and_finishes_no_step_is_at_fault():
    watched = Watched("it")
    watched.num_told = 1
    for _ in range(LOOKS_PER_TIMEOUT - 1):
        watched.heard()
        assert watched.look(TIMEOUT_S) is None
    watched.heard()
    told = "it finished no step for 2 s (worker.gang_timeout_s; it must be longer than the longest step)"
    assert watched.look(TIMEOUT_S) == told


def test_one_that_has_nothing_to_do_is_well():
    watched = Watched("it")
    for _ in range(5 * LOOKS_PER_TIMEOUT):
        watched.heard()
        assert watched.look(TIMEOUT_S) is None
