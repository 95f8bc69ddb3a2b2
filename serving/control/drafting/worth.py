"""Whether guesses are worth their steps, by how long steps take here.

A step that verifies computes several positions of every row, and while a row guesses, each step is launched only once
the step before has come back. How much longer that takes depends on the machine, the model and the number of rows. So
it is measured: from the end of a decode step to the end of the next, where no row of the later is new and nothing came
between them. All rows of a batch pay for those that guess, so what all may expect to gain stands against what all lose,
and all guess or none. Where none does, all try again for a few steps, as seldom as what that costs must be little.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from moonshard.serving.control.plan import DecodePlan, Plan, PrefillPlan
from moonshard.serving.control.request import SequenceId

NUM_TIMED, NEWEST = 4, 16  # steps of a kind that are timed before they count, and of which the median or mean is taken
NUM_OUTLIERS = 2  # the longest of so many that no mean has
MAX_WITHOUT = 3 * NUM_TIMED  # steps without guesses to wait for, since not every one can be timed
LASTING = 512  # steps of guessing batches after which those without are timed anew
NUM_TRIED = 6  # steps in a row that batches guess at to see whether it has become worth it
LEAST_REST = 16  # steps without guesses between two such tries
TRIED_SHARE = 0.02  # of all time, which tries may lose at most


@dataclass(frozen=True, slots=True)
class _Ended:
    rows: frozenset[SequenceId]
    is_guessing: bool
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
    def median_ns(self) -> float:
        return sorted(self.newest_ns)[len(self.newest_ns) // 2]

    @property
    def mean_ns(self) -> float:
        """Some of a guessing batch's steps verify and some do not: only the mean has both."""
        kept = sorted(self.newest_ns)[: max(NUM_TIMED, len(self.newest_ns) - NUM_OUTLIERS)]
        return sum(kept) / len(kept)


@dataclass(slots=True)
class _Size:
    """Batches of about one size."""

    without: _Times = field(default_factory=_Times)
    guessing: _Times = field(default_factory=_Times)
    num_without: int = 0  # steps since they were to be timed, timed or not
    num_guessing: int = 0  # steps since then
    num_rested: int = 0  # steps since the last that was to guess
    num_tried: int = 0  # steps in a row that were to

    def count(self, *, is_guessing: bool) -> None:
        if not is_guessing:
            self.num_without += 1
            self.num_rested += 1
            self.num_tried = 0
            return
        self.num_guessing += 1
        self.num_tried += 1
        if self.num_tried >= NUM_TRIED:
            self.num_rested = 0
        if self.num_guessing >= LASTING:
            self.without.newest_ns.clear()
            self.num_without = self.num_guessing = 0

    @property
    def must_measure(self) -> bool:
        """Whether the next steps are needed without guesses, to compare with."""
        return not self.without.is_known and self.num_without < MAX_WITHOUT

    @property
    def loss(self) -> float | None:
        """By how much of its time a step takes longer where rows guess; None: not known yet."""
        if not (self.without.is_known and self.guessing.is_known):
            return None
        return max(0.0, self.guessing.mean_ns / self.without.median_ns - 1)

    def is_worth(self, num_right: float) -> bool:
        loss = self.loss
        if loss is None or num_right >= loss:
            return True
        return self.num_rested >= max(LEAST_REST, math.ceil(NUM_TRIED * (loss - num_right) / TRIED_SHARE))


class Worth:
    """Of one worker, told of every step as it ends. `is_on`: whether rows are to guess."""

    def __init__(self) -> None:
        self.is_on = True
        self._before: _Ended | None = None  # the step before, where nothing came behind it
        self._sizes: dict[int, _Size] = {}
        self._size: _Size | None = None  # that of the newest step

    def __repr__(self) -> str:
        return f"Worth(is_on={self.is_on}, loss={self.loss})"

    @property
    def loss(self) -> float | None:
        """Right guesses that a step must have for each of its rows, as the batch is now; None: not known yet."""
        return None if self._size is None else self._size.loss

    def weigh(self, num_right: Sequence[float], can_verify: bool) -> None:
        """Decides for the step to come, from the right guesses that each row in the batch may expect."""
        if not can_verify:
            self.is_on = False
        elif num_right and self._size is not None:
            mean = sum(num_right) / len(num_right)
            self.is_on = not self._size.must_measure and self._size.is_worth(mean)

    def note(self, plan: Plan, bucket: int, done_ns: int) -> None:
        """A step has ended, that was padded to so many rows."""
        if isinstance(plan, PrefillPlan):
            self._before = None
        if not isinstance(plan, DecodePlan):
            return
        step = _Ended(frozenset([row.sequence for row in plan.rows]), plan.is_guessing, done_ns)
        self._size = self._sizes.setdefault(1 << (len(plan.rows) - 1).bit_length(), _Size())
        self._size.count(is_guessing=step.is_guessing)
        before, self._before = self._before, step
        if before is not None and before.rows >= step.rows:
            took_ns = done_ns - before.done_ns
            if step.is_guessing:
                self._size.guessing.add(bucket, took_ns)
            elif not before.is_guessing:  # else it was launched late
                self._size.without.add(bucket, took_ns)
