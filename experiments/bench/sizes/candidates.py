"""Loads a checkpoint once for each candidate of an entry, and times their steps in turn.

All other entries are those of the table, so an entry is judged beside what the others are today.
"""

from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import jax

from moonshard.experiments.bench.sizes.entries import Entry, entries_of, longest_tokens
from moonshard.experiments.bench.sizes.record import SizesJob, Tried, TriedSizes
from moonshard.experiments.bench.steps.bare_steps import BareSteps, gaps_ms, with_small_pool
from moonshard.models.machines import Machine
from moonshard.serving.config.keys import Config
from moonshard.serving.engine.loading.model import LoadedModel, kind_for, load_model, machine_for

DECODE_STEPS = 8  # in a repeat
Told = Callable[[str], None]


def try_sizes(config: Config, job: SizesJob, told: Told) -> TriedSizes:
    """Every candidate for each entry that makes a difference on this machine."""
    platform = jax.devices()[0].platform
    machine = machine_for(platform)
    config = replace(config, prefill=replace(config.prefill, chunk_tokens=None))
    config = with_small_pool(config, longest_tokens() + DECODE_STEPS)
    tried = list[Tried]()
    for entry in entries_of(machine):
        told(entry.name)
        tried += _try_entry(config, machine, entry, job)
    return TriedSizes(kind=kind_for(platform), tried=tuple(tried))


def _try_entry(config: Config, machine: Machine, entry: Entry, job: SizesJob) -> list[Tried]:
    current = getattr(machine, entry.name)
    candidates = sorted({*entry.candidates, current})
    arms = [_Arm(config, _with(machine, entry.name, candidate), entry, job.seed) for candidate in candidates]
    for _ in range(job.repeats + 1):  # the first compiles and warms up
        for arm in arms:
            arm.run()
    return [
        Tried(
            entry=entry.name,
            candidate=candidate,
            is_current=candidate == current,
            ms={name: median(samples[1:]) for name, samples in arm.ms.items()},
            longest_step_ms=median(arm.longest_ms[len(entry.probes) :]),
        )
        for candidate, arm in zip(candidates, arms, strict=True)
    ]


def _with(machine: Machine, name: str, candidate: float) -> Machine:
    changed: dict[str, Any] = {name: type(getattr(machine, name))(candidate)}
    return replace(machine, **changed)


class _Arm:
    """A model that is loaded with one candidate, and what its steps took so far."""

    def __init__(self, config: Config, machine: Machine, entry: Entry, seed: int):
        self._model = _loaded(config, machine)
        self._steps = BareSteps(self._model, seed)
        self._probes = entry.probes
        self.ms: dict[str, list[float]] = {probe.name: [] for probe in entry.probes}
        self.longest_ms: list[float] = []

    def run(self) -> None:
        """Each probe once."""
        for probe in self._probes:
            if probe.num_tokens:
                steps = self._steps.prefill(0, probe.num_tokens, cached_tokens=probe.cached_tokens)
                took_ms = gaps_ms(self._model.programs, steps)
                self.ms[probe.name].append(sum(took_ms))
            else:
                steps = self._steps.decode(range(probe.batch), probe.cached_tokens, DECODE_STEPS)
                took_ms = gaps_ms(self._model.programs, steps)[1:]
                self.ms[probe.name].append(median(took_ms))
            self.longest_ms.append(max(took_ms))


def _loaded(config: Config, machine: Machine) -> LoadedModel:
    return load_model(config, "both", lambda message: None, prepares="none", machine=machine)
