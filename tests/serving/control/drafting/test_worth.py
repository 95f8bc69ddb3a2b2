"""Whether a batch guesses follows from how long its steps took with and without, and from what its rows may expect."""

import pytest

from moonshard.serving.control.drafting.worth import (
    LASTING,
    LEAST_REST,
    MAX_WITHOUT,
    NUM_TIMED,
    NUM_TRIED,
    TRIED_SHARE,
    Worth,
)
from moonshard.serving.control.plan import DecodePlan, DecodeRow, PrefillPlan
from moonshard.serving.control.request import Request, SequenceId, SlotId

ASKED = Request(id=b"r", prompt=(1,), max_tokens=100)


class Clock:
    """Steps of one batch after another, that take as long as they are said to."""

    def __init__(self):
        self.worth, self.now_ns = Worth(), 0

    def run(
        self, times: int, num_rows: int, took_ns: int, *, is_guessing: bool = False, bucket: int | None = None
    ) -> None:
        """`bucket`: None: as many as there are rows."""
        rows = tuple(DecodeRow(SequenceId(b"r", index), ASKED, SlotId(0, index), 1, (0,)) for index in range(num_rows))
        plan = DecodePlan(number=0, rows=rows, is_guessing=is_guessing)
        for _ in range(times):
            self.now_ns += took_ns
            self.worth.note(plan, bucket or num_rows, self.now_ns)

    def measured(self, num_rows: int, without_ns: int, with_ns: int) -> None:
        self.run(1 + NUM_TIMED, num_rows, without_ns)
        self.run(NUM_TIMED, num_rows, with_ns, is_guessing=True)

    def is_on(self, *num_right: float) -> bool:
        self.worth.weigh(num_right, can_verify=True)
        return self.worth.is_on


def test_rows_guess_if_together_they_gain_what_all_lose():
    clock = Clock()
    clock.measured(4, 100, 170)
    assert clock.worth.loss == pytest.approx(0.7)
    assert clock.is_on(2.9, 0.0, 0.0, 0.0)
    assert not clock.is_on(2.7, 0.0, 0.0, 0.0)
    clock.measured(8, 100, 210)
    assert clock.worth.loss == pytest.approx(1.1)
    clock.run(1, 4, 100)
    assert clock.worth.loss == pytest.approx(0.7)  # of four rows it is known still


def test_steps_that_are_no_dearer_need_to_gain_nothing():
    clock = Clock()
    clock.measured(2, 100, 90)
    assert clock.worth.loss == 0.0
    assert clock.is_on(0.0, 0.0)


def test_of_steps_that_found_nothing_to_verify_the_loss_has_its_part():
    """Half of them are hardly dearer, and what a step may expect counts those too."""
    clock = Clock()
    clock.measured(2, 100, 300)
    for _ in range(20):
        clock.run(1, 2, 300, is_guessing=True)
        clock.run(1, 2, 120, is_guessing=True)
    assert clock.worth.loss == pytest.approx((6 * 300 + 8 * 120) / 14 / 100 - 1)  # without the two longest


def test_nothing_that_came_between_two_steps_is_taken_for_the_second():
    clock = Clock()
    clock.measured(2, 100, 150)
    for _ in range(30):
        clock.now_ns += 10_000
        clock.worth.note(PrefillPlan(number=0, chunks=()), 8, clock.now_ns)
        clock.run(1, 2, 100)
        clock.run(2, 2, 150, is_guessing=True)
        clock.run(1, 2, 9_000)  # it began only when the step before had come back
    assert clock.worth.loss == pytest.approx(0.5)


def test_a_batch_that_grew_is_not_compared_with_what_it_was():
    clock = Clock()
    for _ in range(20):
        clock.run(1, 1, 100)
        clock.run(1, 2, 9_000, is_guessing=True)  # a row came, and waited
    assert clock.worth.loss is None


def test_times_of_another_bucket_are_forgotten():
    """Steps of small batches take the largest programs until there are small ones."""
    clock = Clock()
    clock.run(1 + NUM_TIMED, 1, 1000, bucket=64)
    clock.run(NUM_TIMED, 1, 1000, is_guessing=True, bucket=64)
    assert clock.worth.loss == 0.0
    clock.run(1 + NUM_TIMED, 1, 20)
    clock.run(NUM_TIMED, 1, 50, is_guessing=True)
    assert clock.worth.loss == pytest.approx(1.5)


def test_what_was_slow_for_a_while_is_not_taken_for_the_rule_for_ever():
    clock = Clock()
    clock.measured(1, 1000, 900)
    num_steps = 0
    while clock.is_on(2.0):
        clock.run(1, 1, 50, is_guessing=True)
        num_steps += 1
        assert num_steps <= LASTING
    clock.run(1 + NUM_TIMED, 1, 20)
    assert clock.is_on(2.0)
    assert clock.worth.loss == pytest.approx(1.5)


def test_each_size_is_measured_without_guesses_first():
    clock = Clock()
    assert clock.worth.is_on  # a first prompt has its first guesses
    clock.run(1, 2, 100)
    assert not clock.is_on(3.0, 3.0)
    clock.run(NUM_TIMED, 2, 100)
    assert clock.is_on(3.0, 3.0)
    clock.run(1, 7, 100)
    assert not clock.is_on(*[3.0] * 7)


def test_what_cannot_be_measured_is_not_waited_for():
    clock = Clock()
    for _ in range(MAX_WITHOUT):
        assert clock.worth.loss is None
        clock.worth.note(PrefillPlan(number=0, chunks=()), 8, clock.now_ns)
        clock.run(1, 2, 100)
        clock.worth.weigh([0.0, 0.0], can_verify=True)
    assert clock.worth.is_on


def rests(clock: Clock, num_right: float, num: int) -> list[tuple[int, int]]:
    """How many steps of one row go without guesses, and then how many with, again and again."""
    found = list[tuple[int, int]]()
    for _ in range(num):
        counts = [0, 0]
        for is_on in (False, True):
            while clock.is_on(num_right) == is_on:
                clock.run(1, 1, 200 if is_on else 100, is_guessing=is_on)
                counts[is_on] += 1
        found.append((counts[0], counts[1]))
    return found


def test_what_was_not_worth_it_is_tried_again_and_costs_little():
    clock = Clock()
    clock.measured(1, 100, 200)
    for without, tried in rests(clock, 0.25, 5)[1:]:
        assert tried == NUM_TRIED
        assert without == pytest.approx(0.75 * NUM_TRIED / TRIED_SHARE, abs=1)
    assert rests(clock, 1.0 - 1e-6, 2)[1] == (LEAST_REST, NUM_TRIED)


def test_nothing_guesses_where_nothing_can_be_verified():
    clock = Clock()
    clock.measured(1, 100, 50)
    assert clock.is_on(2.0)
    clock.worth.weigh([2.0], can_verify=False)
    assert not clock.worth.is_on
    assert clock.is_on(2.0)
