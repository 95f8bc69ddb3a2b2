"""Rotary positions: frequencies, their interpolation, and the scale of the scores that goes with it.

Sources: RoFormer (arXiv 2104.09864); YaRN (arXiv 2309.00071); numerics as in Hugging Face transformers.
"""

import math

import jax.numpy as jnp
import numpy as np

from moonshard.models.kimi.config import KimiConfig, Yarn
from moonshard.sharding.arrays import Array, Float


def rotary_frequencies(config: KimiConfig) -> tuple[np.ndarray, float]:
    """Inverse frequencies [rope / 2] in float32, and the factor on cos and sin. YaRN: arXiv 2309.00071, section 3."""
    size = config.qk_rope_head_dim
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    plain = 1.0 / np.power(np.float32(config.rope_theta), exponents)
    yarn = config.yarn
    if yarn is None:
        return plain.astype(np.float32), 1.0

    def dimension(rotations: float) -> float:
        wavelengths = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return size * math.log(wavelengths) / (2 * math.log(config.rope_theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (np.arange(size // 2, dtype=np.float32) - low) / (high - low if high != low else 0.001)
    interpolated = np.clip(ramp, 0, 1)
    mixed = plain / np.float32(yarn.factor) * interpolated + plain * (1 - interpolated)
    return mixed.astype(np.float32), _rotary_factor(yarn)


def _rotary_factor(yarn: Yarn) -> float:
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)
    return _mscale(yarn.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(config: KimiConfig) -> float:
    scale = config.qk_head_dim**-0.5
    if config.yarn and config.yarn.mscale_all_dim:
        scale *= _mscale(config.yarn.factor, config.yarn.mscale_all_dim) ** 2
    return scale


def rotate(
    x: Float[Array, "n t *h k"],
    cos: Float[Array, "n t *one half"],
    sin: Float[Array, "n t *one half"],
    interleave: bool,
) -> Float[Array, "n t *h k"]:
    """Rotates pairs of features; interleaved pairs come out as [evens | odds], in queries and keys alike."""
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleave else (x[..., :half], x[..., half:])
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
