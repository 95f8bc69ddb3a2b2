"""Tiny random DeepSeek-V3 checkpoints and what Hugging Face transformers computes from them, for .venv-oracle.

Every random value is rounded to bfloat16 first, so float32 compute on the saved file is exact with respect to it.
No word of moonshard: what is compared must not share code with what it is compared to.
"""
# pyright: reportMissingImports=false
# torch and transformers live in .venv-oracle, not in the environment that checks types.

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

ROUTER = "DeepseekV3TopkRouter"


def settle(num_threads: int = 2) -> None:
    """Makes kernels deterministic and quiet: the same file and number of threads give the same bits."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(True, warn_only=True)


def randomize(model: torch.nn.Module, seed: int, *, bias_mean: float = 0.0) -> torch.nn.Module:
    """Weights that hide nothing: scaled by fan-in, with random norms, biases and router corrections (`bias_mean`)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, values in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            std, mean = _scale(name, values)
            mean = bias_mean if name.endswith("e_score_correction_bias") else mean
            drawn = torch.randn(values.shape, generator=generator) * std + mean
            values.copy_(drawn.to(torch.bfloat16).float())
    return model


def _scale(name: str, values: torch.Tensor) -> tuple[float, float]:
    """Standard deviation and mean of a parameter's values."""
    fan_in = values.shape[-1]
    if name.endswith("e_score_correction_bias"):
        return 0.15, 0.0
    if "norm" in name and values.ndim == 1:
        return 0.1, 1.0
    if name.endswith("embed_tokens.weight"):
        return 1.0, 0.0
    if name.endswith("lm_head.weight"):
        return 3.0 / fan_in**0.5, 0.0
    if name.endswith("mlp.gate.weight"):
        return 2.0 / fan_in**0.5, 0.0
    return (0.1, 0.0) if values.ndim == 1 else (1.2 / fan_in**0.5, 0.0)


def to_bfloat16(model: torch.nn.Module) -> torch.nn.Module:
    """Rounds in place, except the router's correction bias, which real checkpoints keep in float32."""
    model = model.to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.data.float()
    return model


def spell_as_on_the_hub(config: Mapping[str, Any], type_field: str = "type") -> dict[str, Any]:
    """config.json as published checkpoints spell it: rope_theta and rope_scaling beside each other, torch_dtype."""
    hub = dict(config)
    rope = dict(hub.pop("rope_parameters"))
    hub["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type", "default")
    hub["rope_scaling"] = None if kind == "default" else {**rope, type_field: kind}
    hub.update(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    for derived in ("head_dim", "qk_head_dim"):
        hub.pop(derived, None)
    if hub.get("rope_interleave"):  # the usual way goes unsaid
        del hub["rope_interleave"]
    hub["torch_dtype"] = hub.pop("dtype", "bfloat16")
    return hub


def load(folder: Path) -> DeepseekV3ForCausalLM:
    """The folder's model in float32, whether it calls itself deepseek_v3 or (as Kimi K2 does) kimi_k2."""
    raw = json.loads((folder / "config.json").read_text())
    config = DeepseekV3Config.from_dict({**raw, "model_type": "deepseek_v3"})
    model, report = DeepseekV3ForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if faults := {name: keys for name, keys in report.items() if keys}:
        raise SystemExit(f"{folder}: transformers does not take the folder as it is: {faults}")
    return model.eval()


def greedy(model: DeepseekV3ForCausalLM, prompt: Sequence[int], num_tokens: int) -> np.ndarray:
    """The `num_tokens` most likely tokens after the prompt, whatever they are: no token ends it."""
    with torch.no_grad():
        sequence = model.generate(
            torch.tensor([list(prompt)]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return sequence[0, len(prompt) :].numpy()


def logits_of(model: DeepseekV3ForCausalLM, tokens: Sequence[int]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """One pass without a cache: logits [T, V], and each router's logits [T, experts] by its layer's name."""
    routed: dict[str, np.ndarray] = {}
    hooks = [
        module.register_forward_hook(lambda _m, _i, out, name=name: routed.__setitem__(name, out[0].numpy()))
        for name, module in routers(model).items()
    ]
    with torch.no_grad():
        logits = model(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()
    for hook in hooks:
        hook.remove()
    return logits, routed


def routers(model: torch.nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if type(module).__name__ == ROUTER}


def choices(router: Any, router_logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What a router chose: expert indices [T, k], ascending, and the least margin [T] of its choices.

    A margin is the distance between the last group or expert that was taken and the first that was not.
    """
    biased = torch.tensor(router_logits).sigmoid() + router.e_score_correction_bias
    grouped = biased.view(len(biased), router.num_group, -1)
    taken, group_margin = _top(grouped.topk(2, dim=-1).values.sum(dim=-1), router.topk_group)
    closed = torch.ones(grouped.shape[:2], dtype=torch.bool).scatter(1, taken, False)
    chosen, expert_margin = _top(grouped.masked_fill(closed[..., None], -torch.inf).flatten(1), router.top_k)
    return chosen.sort(dim=-1).values.numpy(), torch.minimum(group_margin, expert_margin).numpy()


def _top(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the k largest per row, and the distance to the next; infinite where all are taken."""
    if k == scores.shape[-1]:
        return scores.argsort(dim=-1), torch.full((len(scores),), torch.inf)
    values, indices = scores.topk(k + 1, dim=-1)
    return indices[:, :k], values[:, k - 1] - values[:, k]


def router_margin(model: torch.nn.Module, routed: Mapping[str, np.ndarray]) -> np.ndarray:
    """The least margin [T] over all routers; infinite without any."""
    margins = [choices(module, routed[name])[1] for name, module in routers(model).items()]
    return np.min(margins, axis=0) if margins else np.array([np.inf], np.float32)


def top2_margin(logits: np.ndarray) -> np.ndarray:
    """Distance [T] between the two largest logits."""
    second, first = np.partition(logits, -2, axis=-1)[..., -2:].T
    return first - second


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True))
