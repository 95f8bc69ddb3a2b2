"""Loads a model in each format at once, and times the steps of all in turns."""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import jax

from moonshard.experiments.bench.floors.work import expected_experts
from moonshard.experiments.bench.formats.record import Arm, FormatsJob, FormatTimes
from moonshard.experiments.bench.steps.bare_steps import BareSteps, run_steps
from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.registry import latent_model_of
from moonshard.serving.config.keys import Config
from moonshard.serving.engine.loading import load_model

DECODE_STEPS = 16  # in a repeat


def time_formats(config: Config, job: FormatsJob) -> tuple[FormatTimes, ...]:
    arms = [_LoadedArm(_with_small_pool(config, job), job, arm) for arm in job.arms]
    for _ in range(job.repeats + 1):  # the first compiles and warms up
        for arm in arms:
            arm.run()
    return tuple(arm.times() for arm in arms)


def _with_small_pool(config: Config, job: FormatsJob) -> Config:
    """Of as many blocks as the longest sequence takes in each slot, as `BareSteps` shares them out."""
    longest_tokens = max(*job.prompt_tokens, job.context_tokens) + DECODE_STEPS
    num_columns = -(-longest_tokens // config.kv.block_size)
    num_slots = max(job.batches)
    decode = replace(config.decode, max_slots=num_slots)
    return replace(config, kv=replace(config.kv, num_blocks=num_slots * num_columns), decode=decode)


class _LoadedArm:
    """A model in one format, and what its steps took so far."""

    def __init__(self, config: Config, job: FormatsJob, arm: Arm):
        self._arm, self._job = arm, job
        held = replace(config.model, path=Path(arm.folder), weights=arm.holding)
        self._model = load_model(replace(config, model=held), "both", lambda message: None, prepares="none")
        self._steps = BareSteps(self._model, job.seed)
        self._decode_ms: dict[int, list[float]] = {batch: [] for batch in job.batches}
        self._prefill_ms: dict[int, list[float]] = {tokens: [] for tokens in job.prompt_tokens}

    def run(self) -> None:
        """Each step once, the decode steps some times."""
        for num_tokens, samples in self._prefill_ms.items():
            samples.append(sum(self._gaps_ms(self._steps.prefill(0, num_tokens))))
        for batch, samples in self._decode_ms.items():
            steps = self._steps.decode(range(batch), self._job.context_tokens, DECODE_STEPS)
            samples.append(median(self._gaps_ms(steps)[1:]))

    def _gaps_ms(self, steps: Sequence[Any]) -> list[float]:
        begun_ns = time.perf_counter_ns()
        arrivals_ns = [begun_ns, *run_steps(self._model.programs, steps)]
        return [(after - before) / 1e6 for before, after in pairwise(arrivals_ns)]

    def times(self) -> FormatTimes:
        return FormatTimes(
            name=self._arm.name,
            held_bytes=sum(_num_bytes(stage.weights) for stage in self._model.programs.stages),
            decode_ms={batch: median(samples[1:]) for batch, samples in self._decode_ms.items()},
            decode_bytes={batch: self._decode_bytes(batch) for batch in self._job.batches},
            prefill_ms={tokens: median(samples[1:]) for tokens, samples in self._prefill_ms.items()},
        )

    def _decode_bytes(self, batch: int) -> float:
        """All weights but the table of embeddings once, of the experts those that an even router hits, and all keys."""
        model = latent_model_of(Checkpoint.open(Path(self._arm.folder)).config)
        share = expected_experts(model, batch) / model.config.n_routed_experts
        kv_bytes = self._model.block_bytes / self._model.block_size * batch * self._job.context_tokens
        total = kv_bytes
        for stage in self._model.programs.stages:
            held = stage.weights
            experts, embeddings = _num_bytes(held.experts), _num_bytes(held.embed) if held.head is not None else 0
            total += _num_bytes(held) - embeddings - experts * (1 - share)
        return total


def _num_bytes(held: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(held))
