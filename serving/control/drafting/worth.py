"""Whether guesses are worth their steps, by how long steps take here.

A step that verifies computes several positions of every row, and it is launched only once the step before has come
back. How much longer that takes than a step without guesses depends on the machine, the model and the number of rows.
So it is measured: from the end of a decode step to the end of the next, where both have the same rows and nothing came
between them. All rows of a batch pay for those that guess, so these must gain as much as all lose.
"""

from collections import Counter, deque
from dataclasses import dataclass

from moonshard.serving.control.plan import DecodePlan, Plan, PrefillPlan
from moonshard.serving.control.request import SequenceId

LEAST_ACCEPTED = 0.5  # tokens that a row's step must gain in the mean, where nothing was measured yet
NUM_TIMED, NEWEST = 4, 16  # steps of a kind that are timed before their median counts, and of which it is taken
MOST_WITHOUT = 3 * NUM_TIMED  # steps that wait to be timed without guesses: some cannot be
WEIGHT = 0.2  # of the newest step in the mean number of rows that guess


@dataclass(frozen=True, slots=True)
class _Ended:
    rows: frozenset[SequenceId]
    has_guesses: bool
    done_ns: int


class Worth:
    """Of one worker, told of every step as it ends."""

    def __init__(self) -> None:
        self.num_steps = 0  # that decode
        self._num_rows = 1  # of the newest of them
        self._before: _Ended | None = None  # the step before, where nothing came behind it
        self._times_ns: dict[tuple[int, bool], deque[int]] = {}  # by size, and whether any row guessed
        self._num_without: Counter[int] = Counter()  # steps without guesses by size, timed or not
        self._num_trying = 0  # rows that were ready to guess, of the step to come
        self._share = 1.0  # of a batch's rows, those that try

    def __repr__(self) -> str:
        return f"Worth(least_accepted={self.least_accepted():.2f}, share={self._share:.2f})"

    def tries(self) -> None:
        """A row of the step to come is ready to guess, whatever it finds."""
        self._num_trying += 1

    def note(self, plan: Plan, done_ns: int) -> None:
        """A step has ended."""
        if isinstance(plan, PrefillPlan):
            self._before = None
        if not isinstance(plan, DecodePlan):
            return
        step, before = _Ended(frozenset([row.sequence for row in plan.rows]), plan.has_guesses, done_ns), self._before
        self.num_steps += 1
        self._before, self._num_rows = step, len(step.rows)
        size = _size(self._num_rows)
        self._num_without[size] += not step.has_guesses
        num_trying, self._num_trying = self._num_trying, 0
        if num_trying:
            self._share += WEIGHT * (min(1.0, num_trying / self._num_rows) - self._share)
        if before is None or not before.rows >= step.rows:
            return
        if step.has_guesses or not before.has_guesses:  # one that follows guesses began late, and is of neither kind
            times = self._times_ns.setdefault((size, step.has_guesses), deque(maxlen=NEWEST))
            times.append(done_ns - before.done_ns)

    @property
    def must_measure(self) -> bool:
        """Whether the next steps are needed without guesses, to compare with."""
        if not self.num_steps or self._time_ns(is_guessing=False) is not None:
            return False
        return self._num_without[_size(self._num_rows)] < MOST_WITHOUT

    def least_accepted(self) -> float:
        """Guesses that must be right at a step of a row that tries, in the mean, as the batch is now."""
        with_guesses, without = self._time_ns(is_guessing=True), self._time_ns(is_guessing=False)
        if with_guesses is None or without is None:
            return LEAST_ACCEPTED
        return max(0.0, with_guesses / without - 1) / max(self._share, 1 / self._num_rows)

    def _time_ns(self, *, is_guessing: bool) -> float | None:
        times = self._times_ns.get((_size(self._num_rows), is_guessing), ())
        return sorted(times)[len(times) // 2] if len(times) >= NUM_TIMED else None


def _size(num_rows: int) -> int:
    """Steps are padded to sizes of about this kind."""
    return 1 << (num_rows - 1).bit_length()
