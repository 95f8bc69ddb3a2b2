"""`-m moonshard.experiments.bench.gpu.command`: is the GPU side right on this card, and how close to what it can do?

States the card and the software, compares with recorded and dense references, measures the card's own ceilings, then
times one MoE layer, attention and whole steps of a Kimi-K2-wide slice against the least they could take. Last, the
slice serves: engines with their schedulers, prefill and decode apart and both together. Needs jax and numpy only.
Gateway, wire and network are not measured, nor more than one card.
Exit status: 0; 1 if a check fails, nothing that it vouches for is timed then; 2 if there is no GPU or the arguments are
wrong. What was measured is written also where an error ends it.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from moonshard.experiments.bench.floors.work import Ceilings
from moonshard.experiments.bench.gpu.attention import attention_rows, check_attention, served_attention
from moonshard.experiments.bench.gpu.checks import MODELS, Check, check_models, check_sums
from moonshard.experiments.bench.gpu.exchange import check_exchange, exchange_rows
from moonshard.experiments.bench.gpu.expanded import check_expanded, expanded_rows
from moonshard.experiments.bench.gpu.packed import check_packed_sums, check_packed_width, packed_rows
from moonshard.experiments.bench.gpu.rows import (
    Bench,
    Row,
    check_full_width,
    moe_rows,
    step_rows,
)
from moonshard.experiments.bench.gpu.scale import Scale, full_scale, quick, trial_scale
from moonshard.experiments.bench.gpu.serving.apart_checks import check_alone, check_recorded, recorded_pair
from moonshard.experiments.bench.gpu.serving.engines import build_pair
from moonshard.experiments.bench.gpu.serving.mix import ServingPlan
from moonshard.experiments.bench.gpu.serving.rows import as_json, print_served, serve_arms
from moonshard.experiments.bench.gpu.slice import DTYPE, draw_pages, draw_weights
from moonshard.experiments.bench.gpu.sweep import sweep_rows
from moonshard.experiments.bench.gpu.timing import measure_ceilings
from moonshard.models.experts import moe
from moonshard.models.gpu.experts.backend import grouped_experts

FIXTURES = Path(__file__).resolve().parents[3] / "tests" / "fixtures"
RESULTS = Path("results/bench-gpu")


@dataclass(frozen=True, slots=True)
class Journal:
    """What is known so far: each entry is printed when it comes, and kept for the JSON report."""

    report: dict[str, Any]
    start_s: float = field(default_factory=time.perf_counter)
    rows: list[Row] = field(default_factory=list)

    def say(self, what: str) -> None:
        print(f"[{time.perf_counter() - self.start_s:6.1f} s] {what}", flush=True)

    def measure(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.rows.append(row)
            self.say(spell_row(row))
        self.report["rows"] = [_as_json(row) for row in self.rows]

    def all_pass(self, checks: Iterable[Check]) -> bool:
        """Runs, prints and reports every check, also after one has failed."""
        passed = True
        for check in checks:
            passed = passed and check.passed
            word = "ok" if check.passed else "WRONG"
            self.say(f"{word}: {check.name}: {check.error:.2e} (at most {check.tolerance:g})")
            self.report.setdefault("checks", []).append({**asdict(check), "passed": check.passed})
        return passed

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.report, indent=1) + "\n")
        self.say(f"wrote {path}")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    on_gpu = jax.devices()[0].platform == "gpu"
    if not on_gpu and not options.allow_cpu:
        print(f"no GPU: jax sees {jax.devices()[0].device_kind} only (--allow-cpu tries the command on tiny shapes)")
        return 2
    scale = full_scale(options.moe_layers) if on_gpu else trial_scale(options.moe_layers)
    if options.quick:
        scale = quick(scale)
    backends = {"grouped": grouped_experts, "blocks": moe.blocks}
    journal = Journal({"environment": environment(), "scale": asdict(scale)})
    journal.say(json.dumps(journal.report["environment"]))
    try:
        passed = _run(options, scale, backends, journal)
    finally:
        journal.write(options.out or RESULTS / f"{time.strftime('%Y-%m-%d-%H%M%S')}.json")
    return 0 if passed else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="moonshard.experiments.bench.gpu.command", description="Is the GPU side right, and how close to its card?"
    )
    parser.add_argument("--quick", action="store_true", help="fewer checks, two batches, one context")
    parser.add_argument("--only", choices=("rows", "serving"), help="the parts of a step and whole steps, or engines")
    parser.add_argument("--moe-layers", type=int, default=2, choices=(1, 2), help="of the slice; 34 GB each")
    parser.add_argument("--sweep", action="store_true", help="time other tiles for the MoE kernels, too")
    parser.add_argument("--allow-cpu", action="store_true", help="without a GPU, try everything on tiny shapes")
    parser.add_argument("--fixtures", type=Path, default=FIXTURES, help="the recorded tiny models")
    parser.add_argument("--out", type=Path, help=f"the JSON to write; a new file in {RESULTS} by default")
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 31), help="of all random inputs")
    options = parser.parse_args(arguments)
    if not options.fixtures.is_dir():
        parser.error(f"--fixtures: no folder {options.fixtures}")
    return options


def _run(
    options: argparse.Namespace,
    scale: Scale,
    backends: dict[str, moe.Backend],
    journal: Journal,
) -> bool:
    """Checks, then measures, filling the journal as it goes. False if a check failed."""
    bench = _prepare(options, scale, backends, journal)
    if bench is None:
        return False
    if options.only != "serving":
        _measure_rows(options, bench, backends, journal)
    if options.only == "rows":
        return True
    served_by = "grouped" if jax.devices()[0].platform == "gpu" else "blocks"  # as a worker chooses
    return _serve(options, scale.serving, bench, backends[served_by], journal)


def _prepare(
    options: argparse.Namespace,
    scale: Scale,
    backends: dict[str, moe.Backend],
    journal: Journal,
) -> Bench | None:
    """What all measurements need: kernels that are right, the card's ceilings, the slice. None if a check failed."""
    if not journal.all_pass(_checks(options, scale, backends)):
        return None
    ceilings = measure_ceilings(scale.copy_bytes, scale.matmul_side, scale.effort)
    journal.report["ceilings"] = asdict(ceilings)
    journal.say(_spell_ceilings(ceilings))
    bench = Bench(sizes=scale.sizes, loaded=None, ceilings=ceilings, effort=scale.effort, seed=options.seed)
    counts = 1, scale.sizes.batches[-1]
    if not journal.all_pass(check_packed_width(bench, counts, backends)):  # before the slice takes its room
        return None
    if options.only != "serving":
        journal.measure(packed_rows(bench, backends["grouped"], "grouped"))
    bench = replace(bench, loaded=jax.block_until_ready(draw_weights(scale.sizes.model, options.seed)))
    journal.say("drew the slice's weights")
    checks = [check_full_width(bench, count, backends) for count in counts]
    pages = draw_pages(scale.sizes, options.seed)
    checks += [*check_attention(bench, pages), *check_expanded(bench, pages), check_exchange(pages)]
    return bench if journal.all_pass(checks) else None


def _measure_rows(
    options: argparse.Namespace,
    bench: Bench,
    backends: dict[str, moe.Backend],
    journal: Journal,
) -> None:
    journal.measure(_rows(options, bench, backends))
    print_table(journal.report["environment"], bench.ceilings, journal.rows)


def _serve(
    options: argparse.Namespace,
    plan: ServingPlan,
    bench: Bench,
    backend: moe.Backend,
    journal: Journal,
) -> bool:
    """The part with engines, last: checks, then measures. False if a check failed."""
    if not journal.all_pass(check_recorded(options.fixtures, recorded_pair(options.fixtures, backend))):
        return False
    pair = build_pair(bench.model, bench.loaded, plan.sizes, backend, DTYPE, served_attention())
    journal.say("compiled two engines' programs")
    if not journal.all_pass([check_alone(pair, plan.mix, options.seed)]):
        return False
    served = serve_arms(pair, plan, options.seed, journal.say)
    about = journal.report["environment"]
    source = f"{about['device']}, jax {about['jax']}, {about['date']}, {bench.model.config.num_hidden_layers} layers"
    journal.report.update(as_json(served, source))
    print_served(served)
    return True


def _checks(options: argparse.Namespace, scale: Scale, backends: dict[str, moe.Backend]) -> Iterator[Check]:
    yield from check_sums(backends["grouped"], scale.cases, options.seed)
    yield from check_packed_sums(backends["grouped"], scale.cases, options.seed)
    yield from check_models(options.fixtures, MODELS[:1] if options.quick else MODELS, backends)


def _rows(options: argparse.Namespace, bench: Bench, backends: dict[str, moe.Backend]) -> Iterator[Row]:
    for num_tokens in (*bench.sizes.batches, bench.sizes.prompt_tokens):
        yield from moe_rows(bench, num_tokens, backends)
        if options.sweep:
            yield from sweep_rows(bench, num_tokens)
    yield from exchange_rows(bench, draw_pages(bench.sizes, options.seed))
    pages = draw_pages(bench.sizes, options.seed)
    yield from attention_rows(bench, pages)
    yield from expanded_rows(bench, pages)
    yield from step_rows(bench, pages, backends["grouped"], served_attention())


def environment() -> dict[str, str]:
    return {
        "device": jax.devices()[0].device_kind,
        "driver": _driver(),
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _as_json(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "median_ms": row.timing.median_s * 1e3,
        "spread": row.timing.spread,
        "floor_ms": row.floor_s * 1e3,
        "share_of_floor": row.share_of_floor,
        "note": row.note,
        "samples_ms": [round(sample * 1e3, 5) for sample in row.timing.samples_s],
    }


def _spell_ceilings(ceilings: Ceilings) -> str:
    copy, product = ceilings.bytes_per_s / 1e12, ceilings.matmul_flops_per_s / 1e12
    return f"copy {copy:.2f} TB/s (read + written), bf16 product {product:.0f} TFLOP/s"


def spell_row(row: Row) -> str:
    return (
        f"{row.name:<46} {row.timing.median_s * 1e3:9.3f} ms ±{row.timing.spread:4.0%}"
        f"  floor {row.floor_s * 1e3:8.3f} ms  {row.share_of_floor:5.0%}  {row.note}"
    )


def print_table(about: dict[str, str], ceilings: Ceilings, rows: Sequence[Row]) -> None:
    print(f"\n{about['device']}, driver {about['driver']}, jax {about['jax']}, {about['date']}")
    print(_spell_ceilings(ceilings))
    print("median of the samples; the floor is the least that the weights, keys and products need at those rates")
    for row in rows:
        print(spell_row(row))


if __name__ == "__main__":
    sys.exit(main())
