"""The part of the GPU bench that serves: prefill and decode apart against both together, and how long steps take.

Says how large it is, runs every arm, and lays out what was seen. What is served and how is `mix`'s, what is
compared `apart`'s.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from moonshard.experiments.bench.gpu.serving.apart import APART
from moonshard.experiments.bench.gpu.serving.engines import EnginePair, EngineSizes
from moonshard.experiments.bench.gpu.serving.mix import (
    ArmRun,
    Mix,
    ServingPlan,
    best_of,
    measure_arms,
    measure_capacity,
)
from moonshard.experiments.bench.gpu.serving.steps import StepRows, as_model, fit_columns, spell_fit
from moonshard.experiments.common.intervals import PERCENTILES


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedRow:
    """The results of all arms at all rates."""

    capacity_per_s: float
    runs: tuple[ArmRun, ...]
    steps: StepRows

    @property
    def by_rate(self) -> list[list[ArmRun]]:
        rates = dict.fromkeys(run.rate_per_s for run in self.runs)
        return [[run for run in self.runs if run.rate_per_s == rate] for rate in rates]


def full_plan() -> ServingPlan:
    """The mix of `experiments/studies/pd_vs_aggregated`: 64 requests for each arm, rate and repeat."""
    mix = Mix(prompt_tokens=(2048, 64), output_tokens=(16, 128), num_requests=(16, 48))
    sizes = EngineSizes(
        block_size=64,
        q_tile=32,
        prefill_buckets=(64, 256, 512, 1024),
        chunk_tokens=(256, 512, 1024),
        decode_buckets=(4, 8, 16, 32),
        num_blocks=mix.num_blocks(64),
        max_context_tokens=mix.max_context_tokens,
    )
    return ServingPlan(mix=mix, sizes=sizes, shares_of_capacity=(0.5, 0.8), num_repeats=3)


def tiny_plan() -> ServingPlan:
    """A few tokens of everything: it shows that the bench works, and no speed."""
    mix = Mix(prompt_tokens=(72, 9), output_tokens=(3, 8), num_requests=(2, 6))
    sizes = EngineSizes(
        block_size=16,
        q_tile=16,
        prefill_buckets=(16, 32),
        chunk_tokens=(16, 32),
        decode_buckets=(2, 4),
        num_blocks=mix.num_blocks(16),
        max_context_tokens=mix.max_context_tokens,
    )
    return ServingPlan(mix=mix, sizes=sizes, shares_of_capacity=(0.5, 0.8), num_repeats=2)


def quicker(plan: ServingPlan) -> ServingPlan:
    """One rate, one repeat, two chunk sizes. With one decode program the cost of a row cannot be fitted."""
    sizes = plan.sizes
    few = replace(
        sizes,
        prefill_buckets=tuple(dict.fromkeys((sizes.prefill_buckets[0], sizes.chunk_tokens[0], sizes.chunk_tokens[-1]))),
        chunk_tokens=(sizes.chunk_tokens[0], sizes.chunk_tokens[-1]),
        decode_buckets=sizes.decode_buckets[-1:],
    )
    return replace(plan, sizes=few, shares_of_capacity=plan.shares_of_capacity[-1:], num_repeats=1)


def serve_arms(pair: EnginePair, plan: ServingPlan, seed: int, say: Callable[[str], None]) -> ServedRow:
    """Runs everything that is timed, and calls `say` with each arm's result as soon as it is known."""
    steps, runs = StepRows(), list[ArmRun]()
    capacity = measure_capacity(pair, plan.mix, seed)
    say(f"one engine that has all requests from the start serves {capacity:.2f} a second")
    for share in plan.shares_of_capacity:
        for run in measure_arms(pair, plan, share * capacity, steps, seed):
            runs.append(run)
            say(_spell(run))
    return ServedRow(capacity_per_s=capacity, runs=tuple(runs), steps=steps)


def as_json(served: ServedRow, source: str) -> dict[str, Any]:
    """The report's part: `apart` with every arm, the `steps` themselves, and `step_times` for a simulator."""
    columns = served.steps.columns()
    return {
        "apart": {
            "capacity_per_s": served.capacity_per_s,
            "arms": [_arm_as_json(run) for run in served.runs],
            "best": [_beside(runs) for runs in served.by_rate],
        },
        "steps": columns,
        "step_times": as_model(fit_columns(columns), source),
    }


def print_served(served: ServedRow) -> None:
    print("\none engine, and two that share its device: ms, by arm and rate")
    for runs in served.by_rate:
        for run in runs:
            print(_spell(run))
        beside = _beside(runs)
        print(f"  best of one engine: {beside['arm']}; its ITL p90 / apart's: {beside['itl_p90_ratio']:.2f}")
    for fit in fit_columns(served.steps.columns()).values():
        print(spell_fit(fit))


def _spell(run: ArmRun) -> str:
    def spell(of: Callable[[float], float], *names: str) -> str:
        return f"{' '.join(names)} {' '.join(f'{of(PERCENTILES[name]):8.2f}' for name in names)}"

    return (
        f"{run.rate_per_s:7.2f}/s  {run.arm:<20}  ITL {spell(run.itl_ms, 'p50', 'p90', 'p99')}"
        f"  TTFT {spell(run.ttft_ms, 'p50', 'p90')}  token 1 to 2 {spell(run.first_gap_ms, 'p50', 'p90')}"
        f"  {run.num_alike / len(run.heard):.0%} the same tokens"
    )


def _beside(runs: list[ArmRun]) -> dict[str, Any]:
    """One rate: its best aggregated arm, and that arm's p90 of gaps divided by the disaggregated one's."""
    best, (apart,) = best_of(runs), [run for run in runs if run.arm == APART]
    return {
        "rate_per_s": best.rate_per_s,
        "arm": best.arm,
        "itl_p90_ratio": best.itl_ms(0.9) / apart.itl_ms(0.9),
    }


def _arm_as_json(run: ArmRun) -> dict[str, Any]:
    def quantiles(of: Callable[[float], float]) -> dict[str, float]:
        return {name: of(share) for name, share in PERCENTILES.items()}

    return {
        "arm": run.arm,
        "rate_per_s": run.rate_per_s,
        "num_requests": len(run.heard),
        "num_tokens": sum(len(one.tokens) for one in run.heard),
        "itl_ms": quantiles(run.itl_ms),
        "itl_p90_of_repeats_ms": run.itl_p90_of_repeats_ms,
        "ttft_ms": quantiles(run.ttft_ms),
        "first_gap_ms": quantiles(run.first_gap_ms),
        "num_alike": run.num_alike,
    }
