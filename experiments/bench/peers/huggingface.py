"""Latency of Hugging Face transformers on the same folder, machine and threads: what our own numbers stand beside.

    .venv-oracle/bin/python experiments/bench/peers/huggingface.py FOLDER [--threads 2] [--prompt-tokens 128 512 2048]
    ...

Runs in .venv-oracle and imports nothing of moonshard. Float32 on CPU, greedy, random prompts. The decode loop is
written out, since `generate` adds work per step that is not the model's. One JSON object on stdout:
    ttft_ms: prompt tokens -> median time from a prompt to its first token
    itl_ms: batch -> median time of a decode step after `context_tokens`
    output_tokens_per_s: batch -> tokens of all sequences per second of decoding, median over the repeats
"""
# pyright: reportMissingImports=false
# torch and transformers live in .venv-oracle, not in the environment that checks types.

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch
import transformers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM


def load(folder: Path) -> DeepseekV3ForCausalLM:
    """The model in float32, with transformers' default attention; Kimi K2's model type is opened as DeepSeek-V3."""
    raw = json.loads((folder / "config.json").read_text())
    config = DeepseekV3Config.from_dict({**raw, "model_type": "deepseek_v3"})
    return DeepseekV3ForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def draw_prompts(model: DeepseekV3ForCausalLM, batch: int, num_tokens: int, seed: int) -> torch.Tensor:
    """Random ids [batch, num_tokens]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (batch, num_tokens), generator=generator)


def prefill(model: DeepseekV3ForCausalLM, prompts: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """The first tokens [batch, 1] after the prompts, and the KV cache."""
    seen = model(prompts, use_cache=True, logits_to_keep=1)
    return seen.logits[:, -1:].argmax(dim=-1), seen.past_key_values


def decode(model: DeepseekV3ForCausalLM, tokens: torch.Tensor, cache: Any, num_steps: int) -> list[float]:
    """Duration of each step in milliseconds."""
    durations_ms = []
    for _ in range(num_steps):
        start_ns = perf_counter_ns()
        logits = model(tokens, past_key_values=cache, use_cache=True).logits
        tokens = logits[:, -1:].argmax(dim=-1)
        durations_ms.append((perf_counter_ns() - start_ns) / 1e6)
    return durations_ms


def measure_ttft(model: DeepseekV3ForCausalLM, num_tokens: int, repeats: int) -> float:
    """Median in milliseconds over fresh prompts; the first run warms up and does not count."""
    durations_ms = []
    for seed in range(repeats + 1):
        prompts = draw_prompts(model, 1, num_tokens, seed)
        start_ns = perf_counter_ns()
        prefill(model, prompts)
        durations_ms.append((perf_counter_ns() - start_ns) / 1e6)
    return median(durations_ms[1:])


def measure_decode(
    model: DeepseekV3ForCausalLM, batch: int, context_tokens: int, num_steps: int, repeats: int
) -> tuple[float, float]:
    """Median step in milliseconds, and tokens per second; the first run warms up and does not count."""
    steps_ms, rates = [], []
    for seed in range(repeats + 1):
        tokens, cache = prefill(model, draw_prompts(model, batch, context_tokens, seed))
        durations_ms = decode(model, tokens, cache, num_steps)
        if seed > 0:
            steps_ms += durations_ms
            rates.append(batch * num_steps / sum(durations_ms) * 1e3)
    return median(steps_ms), median(rates)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    model = load(options.folder)
    with torch.inference_mode():
        ttft_ms = {n: measure_ttft(model, n, options.repeats) for n in options.prompt_tokens}
        decoding = {
            batch: measure_decode(model, batch, options.context_tokens, options.decode_steps, options.repeats)
            for batch in options.batch
        }
    return {
        "engine": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "dtype": "float32",
        "attention": model.config._attn_implementation,
        "threads": torch.get_num_threads(),
        "repeats": options.repeats,
        "context_tokens": options.context_tokens,
        "decode_steps": options.decode_steps,
        "ttft_ms": ttft_ms,
        "itl_ms": {batch: itl_ms for batch, (itl_ms, _) in decoding.items()},
        "output_tokens_per_s": {batch: rate for batch, (_, rate) in decoding.items()},
    }


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures Hugging Face transformers on a checkpoint folder, on CPU.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--context-tokens", type=int, default=128, help="prompt tokens before the decode steps")
    parser.add_argument("--decode-steps", type=int, default=32, help="measured steps per repeat")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    print(json.dumps(measure(options), indent=2))


if __name__ == "__main__":
    main()
