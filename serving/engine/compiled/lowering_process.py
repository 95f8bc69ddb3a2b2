"""Lowering in a process of its own: told how many devices it has before jax starts, and ended if compiling takes long.

The process is given a `LoweringJob` as its argument and writes a line of JSON for every stage that is lowered, then one
for every stage that is compiled. It ends itself by an alarm, since nothing else stops XLA amid a compilation. Nothing
is kept in the cache of compilations or taken from it, so that the seconds are those of compiling.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import msgspec

from moonshard.models.registry import model_of
from moonshard.serving.config.keys import Config, DecodeConfig, ModelConfig, PrefillConfig
from moonshard.serving.engine.compiled.lowering import StepBytes, StepRole, lower_stages
from moonshard.sharding.shape import MeshShape

COMPILE_LIMIT_S = 600.0
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


class LoweringFailed(RuntimeError):
    """The process ended in some other way than by finishing or by its alarm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweringJob:
    """Which step to lower: the largest of a role."""

    config_json: dict[str, Any]  # the model's
    mesh: MeshShape
    role: StepRole
    chunk_tokens: int
    max_slots: int  # rounded down to a multiple of the partitions, but at least one to each
    compile_limit_s: float = COMPILE_LIMIT_S  # of all stages together

    def config(self) -> Config:
        partitions = self.mesh.num_partitions
        max_slots = partitions * max(1, self.max_slots // partitions)
        return Config(
            model=ModelConfig(path=Path(), name="lowered"),  # neither is looked at
            prefill=PrefillConfig(mesh=self.mesh, max_slots=max_slots, chunk_tokens=self.chunk_tokens),
            decode=DecodeConfig(mesh=self.mesh, max_slots=max_slots),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledBytes:
    """Bytes of one device, as XLA plans them."""

    held: StepBytes
    in_place: int  # of the outputs, those that take the place of arguments
    temporaries: int
    compile_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StageReport:
    """What became of one stage so far."""

    num_layers: int
    num_blocks: int  # of a partition's pages
    counted: StepBytes  # by the budget
    lower_s: float
    compiled: CompiledBytes | None = None


def lower_apart(job: LoweringJob, environ: Mapping[str, str]) -> Iterator[StageReport]:
    """Every stage once it is lowered, then every stage again once it is compiled; fewer, if that takes too long.

    Raises:
        LoweringFailed: the process failed. On stderr it has said why, unless it was killed.
    """
    command = [
        sys.executable,
        "-m",
        "moonshard.serving.engine.compiled.lowering_process",
        msgspec.json.encode(job).decode(),
    ]
    env = _with_virtual_devices(job.mesh.num_devices, environ)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None  # it is a pipe
        try:
            for line in process.stdout:
                yield msgspec.json.decode(line, type=StageReport)
        except BaseException:
            process.kill()
            raise
    if process.returncode not in (0, -signal.SIGALRM):
        raise LoweringFailed(f"lowering ended with exit code {process.returncode}")


def _with_virtual_devices(num_devices: int, environ: Mapping[str, str]) -> dict[str, str]:
    flags = [flag for flag in environ.get("XLA_FLAGS", "").split() if not flag.startswith(DEVICE_COUNT_FLAG)]
    return {
        **environ,
        "XLA_FLAGS": " ".join(flags),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }


def main(argument: str) -> None:
    job = msgspec.json.decode(argument, type=LoweringJob)
    lowered, started = [], time.perf_counter()
    for stage in lower_stages(job.config(), model_of(job.config_json), job.role):
        ended = time.perf_counter()
        report = StageReport(
            num_layers=stage.num_layers, num_blocks=stage.num_blocks, counted=stage.counted, lower_s=ended - started
        )
        _tell(report)
        lowered.append((stage.program, report))
        started = ended
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, job.compile_limit_s)
    for program, report in lowered:
        _tell(replace(report, compiled=_compile(program)))


def _compile(program: jax.stages.Lowered) -> CompiledBytes:
    started = time.perf_counter()
    analysis = program.compile().memory_analysis()
    assert analysis is not None  # XLA has one on CPU
    return CompiledBytes(
        held=StepBytes(arguments=analysis.argument_size_in_bytes, outputs=analysis.output_size_in_bytes),
        in_place=analysis.alias_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        compile_s=time.perf_counter() - started,
    )


def _tell(report: StageReport) -> None:
    os.write(sys.stdout.fileno(), msgspec.json.encode(report) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
