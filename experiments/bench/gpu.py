"""`python -m moonshard.experiments.bench.gpu`: is the GPU side right on this card, and how close to what it can do?

States the card and the software, compares with recorded and dense references, measures the card's own ceilings, then
times one MoE layer, attention and whole steps of a Kimi-K2-wide slice against the least they could take. Needs jax,
flax, and numpy only. Left out: the server, its scheduler, and more than one card.
Exit status: 0; 1 if a check fails, nothing is timed then; 2 if there is no GPU or the arguments are wrong.
"""

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax

from moonshard.experiments.bench.gpu_checks import MODELS, Check, MoeCase, check_models, check_sums
from moonshard.experiments.bench.gpu_exchange import check_exchange, exchange_rows
from moonshard.experiments.bench.gpu_rows import (
    Bench,
    Row,
    attention_rows,
    check_full_width,
    moe_rows,
    step_rows,
)
from moonshard.experiments.bench.gpu_slice import SliceSizes, draw_pages, draw_weights, kimi_k2_slice, smaller
from moonshard.experiments.bench.gpu_sweep import sweep_rows
from moonshard.experiments.bench.gpu_timing import Effort, measure_ceilings
from moonshard.experiments.bench.gpu_work import Ceilings
from moonshard.models import moe
from moonshard.models.moe_grouped import grouped

FIXTURES = Path(__file__).resolve().parents[2] / "tests" / "fixtures"
RESULTS = Path("results/bench-gpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How large everything is, for a card or for a trial on a CPU."""

    sizes: SliceSizes
    cases: tuple[MoeCase, ...]
    effort: Effort
    copy_bytes: int
    matmul_side: int


def full_scale(num_moe_layers: int) -> Scale:
    """34 GB of experts for each MoE layer, and 6 GB of everything else."""
    return Scale(
        sizes=SliceSizes(
            config=kimi_k2_slice(num_moe_layers),
            block_size=64,
            q_tile=32,
            prompt_tokens=2048,
            batches=(1, 16, 64, 128),
            context_tokens=(1024, 4096),
        ),
        cases=(
            MoeCase(num_tokens=1, top_k=8, num_experts=64, embed=1024, ffw=512),
            MoeCase(num_tokens=17, top_k=8, num_experts=16, embed=7168, ffw=2048),
            MoeCase(num_tokens=500, top_k=8, num_experts=64, embed=1024, ffw=512),
            MoeCase(num_tokens=1000, top_k=4, num_experts=16, embed=1024, ffw=512),
        ),
        effort=Effort(num_samples=20, calls_per_sample=4),
        copy_bytes=8 << 30,
        matmul_side=8192,
    )


def trial_scale(num_moe_layers: int) -> Scale:
    """A few kilobytes of everything: shows that the command works, and no speed."""
    config = replace(
        kimi_k2_slice(num_moe_layers),
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_attention_heads=2,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
    )
    return Scale(
        sizes=SliceSizes(
            config=config, block_size=16, q_tile=16, prompt_tokens=32, batches=(1, 2), context_tokens=(16, 40)
        ),
        cases=(MoeCase(num_tokens=5, top_k=2, num_experts=4, embed=32, ffw=32),),
        effort=Effort(num_samples=2, calls_per_sample=1),
        copy_bytes=1 << 16,
        matmul_side=64,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    on_gpu = jax.devices()[0].platform == "gpu"
    if not on_gpu and not options.allow_cpu:
        print(f"no GPU: jax sees {jax.devices()[0].device_kind} only (--allow-cpu tries the command on tiny shapes)")
        return 2
    scale = full_scale(options.moe_layers) if on_gpu else trial_scale(options.moe_layers)
    if options.quick:
        scale = replace(scale, sizes=smaller(scale.sizes), cases=scale.cases[:1])
    backends = {"grouped": functools.partial(grouped, interpret=not on_gpu), "blocks": moe.blocks}
    start, report = time.perf_counter(), {"environment": environment(), "scale": asdict(scale)}
    _say(start, json.dumps(report["environment"]))
    passed = _run(options, scale, backends, report, start)
    path = options.out or RESULTS / f"{time.strftime('%Y-%m-%d-%H%M%S')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    _say(start, f"wrote {path}")
    return 0 if passed else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="moonshard.experiments.bench.gpu", description="Is the GPU side right, and how close to its card?"
    )
    parser.add_argument("--quick", action="store_true", help="fewer checks, two batches, one context")
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
    report: dict[str, Any],
    start: float,
) -> bool:
    """Checks, then measures, filling the report as it goes. False if a check failed."""
    if not _record_checks(report, _checks(options, scale, backends), start):
        return False
    ceilings = measure_ceilings(scale.copy_bytes, scale.matmul_side, scale.effort)
    report["ceilings"] = asdict(ceilings)
    _say(start, _spell_ceilings(ceilings))
    loaded = jax.block_until_ready(draw_weights(scale.sizes.config, options.seed))
    _say(start, "drew the slice's weights")
    bench = Bench(sizes=scale.sizes, loaded=loaded, ceilings=ceilings, effort=scale.effort, seed=options.seed)
    checks = [check_full_width(bench, count, backends) for count in (1, scale.sizes.batches[-1])]
    checks.append(check_exchange(draw_pages(scale.sizes, options.seed)))
    if not _record_checks(report, checks, start):
        return False
    rows = []
    for row in _rows(options, bench, backends):
        rows.append(row)
        _say(start, spell_row(row))
    report["rows"] = [_as_json(row) for row in rows]
    print_table(report["environment"], ceilings, rows)
    return True


def _checks(options: argparse.Namespace, scale: Scale, backends: dict[str, moe.Backend]) -> Iterator[Check]:
    yield from check_sums(backends["grouped"], scale.cases, options.seed)
    yield from check_models(options.fixtures, MODELS[:1] if options.quick else MODELS, backends)


def _record_checks(report: dict[str, Any], checks: Iterable[Check], start: float) -> bool:
    passed = True
    for check in checks:
        passed = passed and check.passed
        word = "ok" if check.passed else "WRONG"
        _say(start, f"{word}: {check.name}: {check.error:.2e} (at most {check.tolerance:g})")
        report.setdefault("checks", []).append({**asdict(check), "passed": check.passed})
    return passed


def _rows(options: argparse.Namespace, bench: Bench, backends: dict[str, moe.Backend]) -> Iterator[Row]:
    for num_tokens in (*bench.sizes.batches, bench.sizes.prompt_tokens):
        yield from moe_rows(bench, num_tokens, backends)
        if options.sweep:
            yield from sweep_rows(bench, num_tokens, interpret=jax.devices()[0].platform != "gpu")
    yield from exchange_rows(bench, draw_pages(bench.sizes, options.seed))
    pages = draw_pages(bench.sizes, options.seed)
    yield from attention_rows(bench, pages)
    yield from step_rows(bench, pages, backends["grouped"])


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


def _say(start: float, what: str) -> None:
    print(f"[{time.perf_counter() - start:6.1f} s] {what}", flush=True)


def _spell_ceilings(ceilings: Ceilings) -> str:
    copy, product = ceilings.copy_bytes_per_s / 1e12, ceilings.matmul_flops_per_s / 1e12
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
