"""Loads a model in each format at once, and times the steps of all in turns."""

from dataclasses import replace
from pathlib import Path
from statistics import median

from moonshard.experiments.bench.floors.asked import decode_work, item_bytes
from moonshard.experiments.bench.formats.kernels import KernelSteps, num_bytes
from moonshard.experiments.bench.formats.record import Arm, FormatsJob, FormatTimes
from moonshard.experiments.bench.steps.bare_steps import BareSteps, gaps_ms, with_small_pool
from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.native import library
from moonshard.models.registry import latent_model_of
from moonshard.serving.config.keys import Config
from moonshard.serving.engine.loading.model import load_model

DECODE_STEPS = 16  # in a repeat


def time_formats(config: Config, job: FormatsJob) -> tuple[FormatTimes, ...]:
    config = replace(config, decode=replace(config.decode, max_slots=max(job.batches)))
    config = with_small_pool(config, max(*job.prompt_tokens, job.context_tokens) + DECODE_STEPS)
    arms = [_LoadedArm(config, job, arm) for arm in job.arms]
    for _ in range(job.repeats + 1):  # the first compiles and warms up
        for arm in arms:
            arm.run()
    return tuple(arm.times() for arm in arms)


class _LoadedArm:
    """A model in one format, and what its steps took so far."""

    def __init__(self, config: Config, job: FormatsJob, arm: Arm):
        self._arm, self._job = arm, job
        held = replace(config.model, path=Path(arm.folder), weights=arm.holding)
        self._config = replace(config, model=held)
        self._model = load_model(self._config, "both", lambda message: None, prepares="none")
        self._steps = BareSteps(self._model, job.seed)
        self._decode_ms: dict[int, list[float]] = {batch: [] for batch in job.batches}
        self._prefill_ms: dict[int, list[float]] = {tokens: [] for tokens in job.prompt_tokens}
        self._kernels = None if library.chosen() is None else self._kernel_steps()

    def run(self) -> None:
        """Each step once, the decode steps some times."""
        for num_tokens, samples in self._prefill_ms.items():
            samples.append(sum(gaps_ms(self._model.programs, self._steps.prefill(0, num_tokens))))
        for batch, samples in self._decode_ms.items():
            steps = self._steps.decode(range(batch), self._job.context_tokens, DECODE_STEPS)
            samples.append(median(gaps_ms(self._model.programs, steps)[1:]))
        if self._kernels is not None:
            self._kernels.run()

    def times(self) -> FormatTimes:
        model, size = latent_model_of(Checkpoint.open(self._config.model.path).config), item_bytes(self._config)
        return FormatTimes(
            name=self._arm.name,
            held_bytes=sum(num_bytes(stage.weights) for stage in self._model.programs.stages),
            decode_ms={batch: median(samples[1:]) for batch, samples in self._decode_ms.items()},
            decode_bytes={
                batch: decode_work(model, batch, self._job.context_tokens, size).num_bytes
                for batch in self._job.batches
            },
            prefill_ms={tokens: median(samples[1:]) for tokens, samples in self._prefill_ms.items()},
            kernels=() if self._kernels is None else self._kernels.times(),
        )

    def _kernel_steps(self) -> KernelSteps:
        model = latent_model_of(Checkpoint.open(self._config.model.path).config)
        weights = self._model.programs.stages[0].weights
        return KernelSteps(weights, model.config.num_experts_per_tok, self._job.kernel_batches, self._job.seed)
