"""Hugging Face transformers beside us: the same folder, lengths and batches, run as a script in its own environment."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from moonshard.experiments.common.machine import ROOT, num_cores
from moonshard.experiments.common.running.measurement import Level, Measurement, Plan, Unit

PYTHON = ROOT / ".venv-oracle/bin/python"
SERVED: tuple[Level, ...] = ("served", "disaggregated")
SCRIPT = Path(__file__).with_name("huggingface.py")


def run_peer(folder: Path, plan: Plan) -> dict[str, dict[str, float]] | None:
    """The script's report; None where its environment is not installed. CalledProcessError if it fails."""
    if not PYTHON.exists():
        return None
    sizes = {
        "--threads": [num_cores()],
        "--prompt-tokens": plan.prompt_tokens,
        "--batch": plan.batches,
        "--context-tokens": [plan.context_tokens[0]],
        "--decode-steps": [plan.peer_decode_steps],
        "--repeats": [plan.peer_repeats],
    }
    arguments = [str(word) for option, values in sizes.items() for word in (option, *values)]
    ran = subprocess.run([PYTHON, SCRIPT, folder, *arguments], stdout=subprocess.PIPE, check=True)
    return json.loads(ran.stdout)


def peers_of(reports: Sequence[Mapping[str, Mapping[str, float]]], plan: Plan) -> dict[tuple[str, str], Measurement]:
    """Their figure beside each of ours, by our key, where they have one. Their samples are medians of rounds."""
    context, found = plan.context_tokens[0], {}

    def put(level: Level, name: str, unit: Unit, table: str, size: int) -> None:
        samples = tuple(report[table][str(size)] for report in reports)
        found[level, name] = Measurement(level=level, name=name, unit=unit, samples=samples)

    for size in plan.prompt_tokens if reports else ():
        put("device", f"prefill, {size} tokens", "ms", "ttft_ms", size)
        for level, protocol in product(SERVED, ("gRPC", "HTTP")):
            put(level, f"TTFT, {size} prompt tokens, {protocol}", "ms", "ttft_ms", size)
    for size in plan.batches if reports else ():
        put("device", f"decode step, batch {size}, context {context}", "ms", "itl_ms", size)
        put("device", f"engine step, batch {size}", "ms", "itl_ms", size)
        for level in SERVED:
            put(level, f"TPOT, batch {size}", "ms", "itl_ms", size)
            put(level, f"output tokens, batch {size}", "tokens/s", "output_tokens_per_s", size)
    return found
