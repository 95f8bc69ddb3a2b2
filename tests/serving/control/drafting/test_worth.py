"""What a step with guesses must gain follows from how long the steps of a batch took, with and without."""

import pytest

from moonshard.serving.control.drafting.worth import LASTING, LEAST_ACCEPTED, MAX_WITHOUT, NUM_TIMED, Worth
from moonshard.serving.control.plan import DecodePlan, DecodeRow, PrefillPlan
from moonshard.serving.control.request import Request, SequenceId, SlotId

ASKED = Request(id=b"r", prompt=(1,), max_tokens=100)


class Clock:
    """Steps of one batch after another, that take as long as they are said to."""

    def __init__(self):
        self.worth, self.now_ns = Worth(), 0

    def run(
        self,
        times: int,
        num_rows: int,
        took_ns: int,
        *,
        has_guesses: bool = False,
        num_trying: int | None = None,
        bucket: int | None = None,
    ):
        """`num_trying`: rows that try; all, where they guess. `bucket`: None: as many as there are rows."""
        draft = (5,) if has_guesses else ()
        rows = tuple(
            DecodeRow(SequenceId(b"r", index), ASKED, SlotId(0, index), 1, (0,), 1 + len(draft), draft)
            for index in range(num_rows)
        )
        for _ in range(times):
            for _ in range((num_rows if has_guesses else 0) if num_trying is None else num_trying):
                self.worth.note_try()
            self.now_ns += took_ns
            self.worth.note(DecodePlan(number=0, rows=rows), bucket or num_rows, self.now_ns)

    def measured(self, num_rows: int, without_ns: int, with_ns: int) -> None:
        self.run(1 + NUM_TIMED, num_rows, without_ns)
        self.run(NUM_TIMED, num_rows, with_ns, has_guesses=True)


def test_a_step_must_gain_what_it_takes_longer():
    clock = Clock()
    clock.measured(4, 100, 170)
    assert clock.worth.least_accepted() == pytest.approx(0.7)
    clock.measured(8, 100, 210)
    assert clock.worth.least_accepted() == pytest.approx(1.1)
    clock.run(1, 4, 100)
    assert clock.worth.least_accepted() == pytest.approx(0.7)  # of four rows it is known still


def test_few_that_try_must_gain_what_all_lose():
    clock = Clock()
    clock.measured(8, 100, 150)
    clock.run(60, 8, 150, has_guesses=True, num_trying=2)
    assert clock.worth.least_accepted() == pytest.approx(0.5 * 8 / 2, rel=0.01)


def test_steps_that_are_no_dearer_need_to_gain_nothing():
    clock = Clock()
    clock.measured(2, 100, 90)
    assert clock.worth.least_accepted() == 0.0


def test_nothing_that_came_between_two_steps_is_taken_for_the_second():
    clock = Clock()
    clock.measured(2, 100, 150)
    for _ in range(30):
        clock.now_ns += 10_000
        clock.worth.note(PrefillPlan(number=0, chunks=()), 8, clock.now_ns)
        clock.run(1, 2, 100)
        clock.run(2, 2, 150, has_guesses=True)
        clock.run(1, 2, 9_000)  # it began only when the step before had come back
    assert clock.worth.least_accepted() == pytest.approx(0.5)


def test_a_batch_that_grew_is_not_compared_with_what_it_was():
    clock = Clock()
    for _ in range(20):
        clock.run(1, 1, 100)
        clock.run(1, 2, 9_000, has_guesses=True)  # a row came, and waited
    assert clock.worth.least_accepted() == LEAST_ACCEPTED


def test_a_step_that_tried_and_found_nothing_is_none_without_guesses():
    """It was launched late as well."""
    clock = Clock()
    clock.measured(2, 100, 125)
    clock.run(50, 2, 130, num_trying=2)
    assert clock.worth.least_accepted() == pytest.approx(0.25)


def test_times_of_another_bucket_are_forgotten():
    """Steps of small batches take the largest programs until there are small ones."""
    clock = Clock()
    clock.run(1 + NUM_TIMED, 1, 1000, bucket=64)
    clock.run(NUM_TIMED, 1, 1000, has_guesses=True, bucket=64)
    assert clock.worth.least_accepted() == 0.0
    clock.run(1 + NUM_TIMED, 1, 20)
    clock.run(NUM_TIMED, 1, 50, has_guesses=True)
    assert clock.worth.least_accepted() == pytest.approx(1.5)


def test_what_was_slow_for_a_while_is_not_taken_for_the_rule_for_ever():
    clock = Clock()
    clock.measured(1, 1000, 900)
    assert not clock.worth.must_measure
    num_steps = 0
    while not clock.worth.must_measure:
        clock.run(1, 1, 50, has_guesses=True)
        num_steps += 1
        assert num_steps <= LASTING
    clock.run(1 + NUM_TIMED, 1, 20)
    assert not clock.worth.must_measure
    assert clock.worth.least_accepted() == pytest.approx(1.5)


def test_each_size_is_measured_without_guesses_first():
    clock = Clock()
    clock.run(1, 2, 100)
    assert clock.worth.must_measure
    clock.run(NUM_TIMED, 2, 100)
    assert not clock.worth.must_measure
    clock.run(1, 7, 100)
    assert clock.worth.must_measure


def test_what_cannot_be_measured_is_not_waited_for():
    clock = Clock()
    for step in range(MAX_WITHOUT):
        assert step == 0 or clock.worth.must_measure
        clock.worth.note(PrefillPlan(number=0, chunks=()), 8, clock.now_ns)
        clock.run(1, 2, 100)
    assert not clock.worth.must_measure
    assert clock.worth.least_accepted() == LEAST_ACCEPTED
