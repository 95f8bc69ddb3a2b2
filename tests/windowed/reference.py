"""What the windowed model is, in plain numpy and float64: token after token, from the maths and not from its code.

Nothing of moonshard or jax is in it, there are no pages, no blocks and no batch; keys of a layer are a plain list. What
is compared with it must not share code with it.
Sources: RMS norm (arXiv 1910.07467), rotary embedding (arXiv 2104.09864) with the halves paired, SwiGLU
(arXiv 2002.05202), sliding windows as in Mistral 7B (arXiv 2310.06825), section 2.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file


@dataclass
class _Seen:
    """The tokens so far: of each layer, the turned key and the value of each head [h, k] at each position."""

    keys: list[list[np.ndarray]] = field(default_factory=list)
    values: list[list[np.ndarray]] = field(default_factory=list)


class Reference:
    """Logits of a folder's model. `window` replaces the folder's: what another window would give."""

    def __init__(self, folder: Path, *, window: int | None = None):
        self._config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors")
        self._weights = {name: tensor.astype(np.float64) for name, tensor in stored.items()}
        self._window = window or self._config["sliding_window"]

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """[T, vocab]: at each position what is thought of the next token."""
        seen = self._nothing_seen()
        return np.stack([self._next(seen, token) for token in tokens])

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The likeliest token after the prompt, and after each that follows."""
        return [token for token, _ in self._continued(prompt, num_tokens)]

    def least_margin(self, prompt: Sequence[int], num_tokens: int) -> float:
        """By how much the likeliest token is ahead of the next likeliest, where that is least along `greedy`."""
        return min(margin for _, margin in self._continued(prompt, num_tokens))

    def _continued(self, prompt: Sequence[int], num_tokens: int) -> list[tuple[int, float]]:
        seen, found = self._nothing_seen(), list[tuple[int, float]]()
        logits = [self._next(seen, token) for token in prompt][-1]
        for _ in range(num_tokens):
            second, first = np.sort(logits)[-2:]
            found.append((int(logits.argmax()), float(first - second)))
            logits = self._next(seen, found[-1][0])
        return found

    def _nothing_seen(self) -> _Seen:
        num_layers = self._config["num_hidden_layers"]
        return _Seen(keys=[[] for _ in range(num_layers)], values=[[] for _ in range(num_layers)])

    def _next(self, seen: _Seen, token: int) -> np.ndarray:
        """Takes one more token; the logits of the one after it."""
        w = self._weights
        stream = w["model.embed_tokens.weight"][token]
        for layer in range(self._config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            normed = self._normed(stream, w[f"{name}.input_layernorm.weight"])
            stream = stream + self._attended(seen, layer, normed)
            normed = self._normed(stream, w[f"{name}.post_attention_layernorm.weight"])
            gate, up = w[f"{name}.mlp.gate_proj.weight"] @ normed, w[f"{name}.mlp.up_proj.weight"] @ normed
            stream = stream + w[f"{name}.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        return w["lm_head.weight"] @ self._normed(stream, w["model.norm.weight"])

    def _attended(self, seen: _Seen, layer: int, x: np.ndarray) -> np.ndarray:
        name, num_heads = f"model.layers.{layer}.self_attn", self._config["num_attention_heads"]
        position = len(seen.keys[layer])
        query, key, value = (
            (self._weights[f"{name}.{which}_proj.weight"] @ x).reshape(num_heads, -1) for which in "qkv"
        )
        seen.keys[layer].append(self._turned(key, position))
        seen.values[layer].append(value)
        is_sliding = self._config["layer_types"][layer] == "sliding_attention"
        first = max(0, position + 1 - self._window) if is_sliding else 0
        keys, values = np.array(seen.keys[layer][first:]), np.array(seen.values[layer][first:])
        turned, mixed = self._turned(query, position), []
        for head in range(num_heads):
            scores = keys[:, head] @ turned[head] / np.sqrt(self._config["head_dim"])
            odds = np.exp(scores - scores.max())
            mixed.append(odds / odds.sum() @ values[:, head])
        return self._weights[f"{name}.o_proj.weight"] @ np.concatenate(mixed)

    def _turned(self, heads: np.ndarray, position: int) -> np.ndarray:
        """Each pair of values i and i + k / 2 as a complex number, turned by position / theta ** (2 i / k)."""
        half = self._config["head_dim"] // 2
        pairs = heads[:, :half] + 1j * heads[:, half:]
        pairs = pairs * np.exp(1j * position * float(self._config["rope_theta"]) ** (-np.arange(half) / half))
        return np.concatenate([pairs.real, pairs.imag], axis=1)

    def _normed(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return weight * x / np.sqrt(np.square(x).mean() + self._config["rms_norm_eps"])
