"""A run over the lines of a file: what is done already, what cannot be asked, and the rest asked and kept.

Ctrl-C ends it early with the rows so far. A result that cannot be kept is a row all the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonshard.experiments.common.signals import Interrupted, run_interruptibly
from moonshard.experiments.verification.asking import Asking, ask_all, broken_result
from moonshard.experiments.verification.measures import Row
from moonshard.experiments.verification.results import Done, Result
from moonshard.experiments.verification.samples import BrokenLine, Sample

Keep = Callable[[Result], None]
Progress = Callable[[int, int], None]  # how many are answered, of how many


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    rows: Sequence[Row]  # by index
    num_kept: int  # that an earlier run has asked
    num_left: int  # not answered
    exit_code: int | None  # of the signal that ended it; None: it is complete


def run(lines: Sequence[Sample | BrokenLine], asking: Asking, done: Done, keep: Keep, progress: Progress) -> Run:
    """Runs on the main thread, whose signals it handles."""
    samples = [line for line in lines if isinstance(line, Sample)]
    kept = [Row(result=result, reference=each.reference) for each in samples if (result := done.of(each)) is not None]
    left = [each for each in samples if done.of(each) is None]
    fresh = list[Row]()
    exit_code = None

    def take(sample: Sample, result: Result) -> None:
        fresh.append(Row(result=result, reference=sample.reference))
        keep(result)
        progress(len(fresh), len(left))

    broken = [broken_result(line, asking) for line in lines if isinstance(line, BrokenLine)]
    for result in broken:
        keep(result)
    try:
        run_interruptibly(ask_all(left, asking, take))
    except Interrupted as interrupted:
        exit_code = interrupted.exit_code
    rows = [*kept, *fresh, *(Row(result=result) for result in broken)]
    return Run(
        rows=sorted(rows, key=lambda row: row.result.data_index),
        num_kept=len(kept),
        num_left=len(left) - len(fresh),
        exit_code=exit_code,
    )
