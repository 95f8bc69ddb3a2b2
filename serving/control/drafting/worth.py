"""Whether guesses are worth their steps, by how long steps take here.

A step that verifies computes several positions of every row, and it is launched only once the step before has come
back. How much longer that takes than a step without guesses depends on the machine, the model and the number of rows.
So it is measured: from the end of a decode step to the end of the next, where no row of the later is new and nothing
came between them. All rows of a batch pay for those that guess, so these must gain as much as all lose.
"""

from collections import deque
from dataclasses import dataclass, field

from moonshard.serving.control.plan import DecodePlan, Plan, PrefillPlan
from moonshard.serving.control.request import SequenceId

LEAST_ACCEPTED = 0.5  # tokens that a row's step must gain in the mean, where nothing was measured yet
NUM_TIMED, NEWEST = 4, 16  # steps of a kind that are timed before their median counts, and of which it is taken
MAX_WITHOUT = 3 * NUM_TIMED  # steps without guesses to wait for, since not every one can be timed
LASTING = 512  # steps with guesses after which those without are timed anew
WEIGHT = 0.2  # of the newest step in the mean share of rows that try


@dataclass(frozen=True, slots=True)
class _Ended:
    rows: frozenset[SequenceId]
    has_guesses: bool
    done_ns: int


@dataclass(slots=True)
class _Times:
    """How long steps of one kind took, all padded to one bucket."""

    bucket: int = 0
    newest_ns: deque[int] = field(default_factory=lambda: deque[int](maxlen=NEWEST))

    def add(self, bucket: int, took_ns: int) -> None:
        if bucket != self.bucket:
            self.bucket = bucket
            self.newest_ns.clear()
        self.newest_ns.append(took_ns)

    @property
    def is_known(self) -> bool:
        return len(self.newest_ns) >= NUM_TIMED

    @property
    def median_ns(self) -> int:
        return sorted(self.newest_ns)[len(self.newest_ns) // 2]


@dataclass(slots=True)
class _Size:
    """Batches of about one size."""

    without: _Times = field(default_factory=_Times)
    guessing: _Times = field(default_factory=_Times)
    num_without: int = 0  # steps since they were to be timed, timed or not
    num_guessing: int = 0  # steps since then

    def time_anew(self) -> None:
        self.without.newest_ns.clear()
        self.num_without = self.num_guessing = 0


class Worth:
    """Of one worker, told of every step as it ends."""

    def __init__(self) -> None:
        self.num_steps = 0  # that decode
        self._num_rows = 1  # of the newest of them
        self._before: _Ended | None = None  # the step before, where nothing came behind it
        self._sizes: dict[int, _Size] = {}
        self._size = _Size()  # that of the newest step
        self._num_trying = 0  # rows that were ready to guess, of the step to come
        self._share = 1.0  # of a batch's rows, those that try

    def __repr__(self) -> str:
        return f"Worth(least_accepted={self.least_accepted():.2f}, share={self._share:.2f})"

    def note_try(self) -> None:
        """A row of the step to come is ready to guess, whatever it finds."""
        self._num_trying += 1

    def note(self, plan: Plan, bucket: int, done_ns: int) -> None:
        """A step has ended, that was padded to so many rows."""
        if isinstance(plan, PrefillPlan):
            self._before = None
        if not isinstance(plan, DecodePlan):
            return
        step = _Ended(frozenset([row.sequence for row in plan.rows]), plan.has_guesses, done_ns)
        num_trying, self._num_trying = self._num_trying, 0
        self._count(step, num_trying)
        self._time(step, bucket, has_tried=num_trying > 0)
        self._before = step

    def _count(self, step: _Ended, num_trying: int) -> None:
        self.num_steps += 1
        self._num_rows = len(step.rows)
        self._size = self._sizes.setdefault(1 << (self._num_rows - 1).bit_length(), _Size())
        self._size.num_without += not step.has_guesses
        self._size.num_guessing += step.has_guesses
        if self._size.num_guessing >= LASTING:
            self._size.time_anew()
        if num_trying:
            self._share += WEIGHT * (min(1.0, num_trying / self._num_rows) - self._share)

    def _time(self, step: _Ended, bucket: int, *, has_tried: bool) -> None:
        before = self._before
        if before is None or not before.rows >= step.rows:
            return
        took_ns = step.done_ns - before.done_ns
        if step.has_guesses:
            self._size.guessing.add(bucket, took_ns)
        elif not has_tried and not before.has_guesses:  # else it was launched late, for all that it does not verify
            self._size.without.add(bucket, took_ns)

    @property
    def must_measure(self) -> bool:
        """Whether the next steps are needed without guesses, to compare with."""
        return bool(self.num_steps) and not self._size.without.is_known and self._size.num_without < MAX_WITHOUT

    def least_accepted(self) -> float:
        """Guesses that must be right at a step of a row that tries, in the mean, as the batch is now."""
        without, guessing = self._size.without, self._size.guessing
        if not (without.is_known and guessing.is_known):
            return LEAST_ACCEPTED
        loss = max(0.0, guessing.median_ns / without.median_ns - 1)
        return loss / max(self._share, 1 / self._num_rows)
