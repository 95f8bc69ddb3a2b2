"""Prefill and decode as the device side runs them, with no engine, gateway or wire around them.

The steps are made beforehand from the same plans that the scheduler makes. One step is always in flight behind the one
that is waited for, as in the engine, so that a decode step's time is the device's and not that of a round trip.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

from moonshard.experiments.common.running.measurement import Measurement, Plan
from moonshard.serving.config.keys import Config
from moonshard.serving.control.plan import DecodePlan, DecodeRow, PrefillChunk, PrefillPlan
from moonshard.serving.control.request import Request, SequenceId, SlotId
from moonshard.serving.control.sampling_parameters import Sampling
from moonshard.serving.engine.encoder import StepEncoder
from moonshard.serving.engine.loading.model import LoadedModel
from moonshard.serving.engine.programs import Programs
from moonshard.serving.engine.steps import Step

DECODE_STEPS = 32  # per repeat


class BareSteps:
    """Steps for sequences that own all blocks they need: sequence i sits in slot i."""

    def __init__(self, model: LoadedModel, seed: int):
        self._model = model
        self._random = Random(seed)
        self._encoder = StepEncoder(model.shapes)

    def prefill(self, index: int, num_tokens: int, *, cached_tokens: int = 0) -> list[Step]:
        """Prefills `num_tokens` of a fresh random prompt for sequence `index`, in chunks; the last chunk draws a token.

        Before them are others, whose KV counts as cached, whatever lies there.
        """
        chunks = self._chunks(index, self._request(index, cached_tokens + num_tokens), cached_tokens)
        return [self._encoder.encode(PrefillPlan(number=0, chunks=(chunk,))) for chunk in chunks]

    def decode(self, sequences: Sequence[int], context_tokens: int, num_steps: int) -> list[Step]:
        """Decodes these sequences, by index, each after a prefill of `context_tokens`."""
        rows = [
            (index, self._request(index, 1), self._block_table(index, context_tokens + num_steps))
            for index in sequences
        ]
        return [
            self._encoder.encode(
                DecodePlan(
                    number=0,
                    rows=tuple(
                        DecodeRow(
                            sequence=SequenceId(request.id, 0),
                            request=request,
                            slot=self._slot(index),
                            position=context_tokens + step,
                            block_table=table,
                        )
                        for index, request, table in rows
                    ),
                )
            )
            for step in range(num_steps)
        ]

    def _chunks(self, index: int, request: Request, first: int) -> Iterator[PrefillChunk]:
        size, prompt = self._model.shapes.prefill_buckets[-1], request.prompt
        sequence, slot, table = SequenceId(request.id, 0), self._slot(index), self._block_table(index, len(prompt))
        for start in range(first, len(prompt), size):
            is_last = start + size >= len(prompt)
            yield PrefillChunk(
                sequence=sequence,
                request=request,
                slot=slot,
                start=start,
                tokens=prompt[start : start + size],
                block_table=table,
                samples=((sequence, slot),) if is_last else (),
            )

    def _request(self, index: int, num_tokens: int) -> Request:
        prompt = tuple(self._random.randrange(self._model.vocab_size) for _ in range(num_tokens))
        return Request(id=bytes([index] * 16), prompt=prompt, sampling=Sampling(temperature=0.0), max_tokens=1)

    def _slot(self, index: int) -> SlotId:
        per_partition = self._model.pool.slots_per_partition
        return SlotId(index // per_partition, index % per_partition)

    def _block_table(self, index: int, num_tokens: int) -> tuple[int, ...]:
        needed = self._model.shapes.groups.num_blocks(-(-num_tokens // self._model.block_size))
        share = self._model.pool.blocks_per_partition // self._model.pool.slots_per_partition
        if needed > share:
            raise ValueError(f"{num_tokens} tokens in each slot need {needed} blocks; the pool has {share} for each")
        first = (index % self._model.pool.slots_per_partition) * share
        return tuple(range(first, first + needed))


def measure_bare_steps(model: LoadedModel, plan: Plan, seed: int) -> list[Measurement]:
    steps, programs = BareSteps(model, seed), model.programs
    return [
        *(_prefill(programs, steps, num_tokens, plan.repeats) for num_tokens in plan.prompt_tokens),
        *(
            _decode(programs, steps, batch, context_tokens, plan.repeats)
            for context_tokens in plan.context_tokens
            for batch in plan.batches
        ),
    ]


def _prefill(programs: Programs, steps: BareSteps, num_tokens: int, repeats: int) -> Measurement:
    samples = [sum(gaps_ms(programs, steps.prefill(0, num_tokens))) for _ in range(repeats + 1)]
    name = f"prefill, {num_tokens} tokens"
    return Measurement(level="device", name=name, unit="ms", samples=tuple(samples[1:]))


def _decode(programs: Programs, steps: BareSteps, batch: int, context_tokens: int, repeats: int) -> Measurement:
    for index in range(batch):
        run_steps(programs, steps.prefill(index, context_tokens))
    samples: list[float] = []
    for repeat in range(repeats + 1):
        arrivals_ns = run_steps(programs, steps.decode(range(batch), context_tokens, DECODE_STEPS))
        gaps = [(after - before) / 1e6 for before, after in pairwise(arrivals_ns)]
        samples += gaps if repeat else []
    name = f"decode step, batch {batch}, context {context_tokens}"
    return Measurement(level="device", name=name, unit="ms", samples=tuple(samples))


def run_steps(programs: Programs, steps: Sequence[Step]) -> list[int]:
    """Runs the steps, each launched before the one before it is done: when each step's tokens were on the host."""
    arrivals_ns, behind = [], None
    for step in steps:
        launched = programs.launch(step)
        if behind is not None:
            programs.fetch(behind)
            arrivals_ns.append(time.perf_counter_ns())
        behind = launched
    if behind is not None:
        programs.fetch(behind)
        arrivals_ns.append(time.perf_counter_ns())
    return arrivals_ns


def gaps_ms(programs: Programs, steps: Sequence[Step]) -> list[float]:
    """Runs the steps: how long each took, the first from the call on, others from when the one before them was done."""
    begun_ns = time.perf_counter_ns()
    arrivals_ns = [begun_ns, *run_steps(programs, steps)]
    return [(after - before) / 1e6 for before, after in pairwise(arrivals_ns)]


def with_small_pool(config: Config, longest_tokens: int) -> Config:
    """With as many blocks as a sequence of so many tokens takes in each slot, as `BareSteps` shares them out."""
    num_columns = -(-longest_tokens // config.kv.block_size)
    return replace(config, kv=replace(config.kv, num_blocks=config.decode.max_slots * num_columns))
