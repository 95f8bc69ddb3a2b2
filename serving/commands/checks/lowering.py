"""`moonshard budget --lower`: tells how each stage was lowered and compiled, and whether XLA agrees with the budget."""

import os
import sys
from dataclasses import astuple

from moonshard.serving.engine.compiled.lowering_process import LoweringFailed, LoweringJob, StageReport, lower_apart
from moonshard.sharding.shape import MeshShape

GIB = 2**30
LARGEST_DIFFERENCE = 0.01  # between XLA's bytes and the budget's, relative, where they agree


def lower_and_tell(job: LoweringJob) -> tuple[int, list[StageReport]]:
    """The exit code, 1 where lowering failed or a figure differs; and what became of each stage."""
    _tell(f"the largest {job.role} step on {_devices(job.mesh)}, weights in bf16:")
    reports: list[StageReport] = []
    num_stages = job.mesh.pipe
    try:
        for count, report in enumerate(lower_apart(job, os.environ)):
            index = count % num_stages  # each comes once when it is lowered, and again when it is compiled
            reports[index : index + 1] = [report]
            _tell(f"  stage {index + 1} of {num_stages}: {_progress(report)}")
    except LoweringFailed as error:
        sys.stderr.write(f"moonshard: {error}\n")
        return 1, reports
    if reports[-1].compiled is None:
        _tell(f"  lowered; compiling was given up after {job.compile_limit_s / 60:g} minutes")
    return 0 if all(_difference(report) <= LARGEST_DIFFERENCE for report in reports) else 1, reports


def _devices(mesh: MeshShape) -> str:
    return f"{mesh.num_devices} virtual CPU devices ({mesh})" if mesh.num_devices > 1 else "1 virtual CPU device"


def _progress(report: StageReport) -> str:
    counted, compiled = report.counted, report.compiled
    if compiled is None:
        size = f"{report.num_layers} layers, {report.num_blocks:,} blocks to a partition"
        return f"{size}, lowered in {report.lower_s:.1f} s"
    held = compiled.held
    relation = "agree within" if _difference(report) <= LARGEST_DIFFERENCE else "DIFFER by more than"
    verdict = f"{relation} {LARGEST_DIFFERENCE:.0%} ({_difference(report):.4%})"
    return (
        f"compiled in {compiled.compile_s:.1f} s\n"
        f"    arguments {held.arguments / GIB:.3f} GiB a device, the budget's {counted.arguments / GIB:.3f}; "
        f"outputs {held.outputs / GIB:.3f}, the budget's {counted.outputs / GIB:.3f}: {verdict}\n"
        f"    temporaries {compiled.temporaries / GIB:.3f} GiB, not compared: on CPU XLA widens bf16"
    )


def _difference(report: StageReport) -> float:
    """That of arguments or of outputs, whichever is larger, relative to the budget's; 0 where nothing is compiled."""
    if report.compiled is None:
        return 0.0
    pairs = zip(astuple(report.compiled.held), astuple(report.counted), strict=True)
    return max(abs(held / counted - 1) for held, counted in pairs)


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()  # minutes may pass until the next
