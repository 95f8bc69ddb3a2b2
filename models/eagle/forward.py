"""The forward pass of an EAGLE-3 draft: what a row reads, its one layer, its head.

Which rows there are and what they are aligned with, `models.draft` says. Source: EAGLE-3 (arXiv 2503.01840), section
3.1 and figure 5; numerics as in SafeAILab's `cnets`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from moonshard.models.eagle.config import EagleConfig, LlamaShape
from moonshard.models.eagle.weights import EagleWeights, LlamaAttention
from moonshard.models.kimi.forward import gated_mlp, look_up, rms_norm
from moonshard.models.kimi.rotary import rotate
from moonshard.models.product import product
from moonshard.sharding.arrays import Array, Float, Int
from moonshard.sharding.shard import Shard

Attended = Callable[[Float[Array, "n t d2"]], Float[Array, "n t d"]]


def fused(config: EagleConfig, w: EagleWeights[Array], features: Float[Array, "n t f"]) -> Float[Array, "n t d"]:
    """The target's taps as one hidden state."""
    features = features.astype(w.norm.dtype)
    if w.fc_norm is not None:
        taps = features.reshape(*features.shape[:-1], len(config.taps), config.target_hidden_size)
        normed = [rms_norm(taps[..., tap, :], w.fc_norm[tap], config.rms_norm_eps) for tap in range(len(config.taps))]
        features = jnp.concatenate(normed, axis=-1)
    return product("ntf,df->ntd", features, w.fc)


def layer(
    config: EagleConfig,
    w: EagleWeights[Array],
    tokens: Int[Array, "n t"],
    hidden: Float[Array, "n t d"],
    attended: Attended,
    shard: Shard,
) -> Float[Array, "n t d"]:
    """The hidden states of rows that read `hidden` and the tokens after its positions.

    Args:
        attended: the attention, of a row's token and hidden state, normed and side by side.
    """
    assert w.embed is not None  # its own, or the target's
    eps = config.rms_norm_eps
    embedded = look_up(w.embed, tokens, shard).astype(hidden.dtype)
    with jax.named_scope("draft_attention"):
        normal = rms_norm(hidden, w.hidden_norm, eps)
        both = jnp.concatenate([rms_norm(embedded, w.attention.norm, eps), normal], axis=-1)
        x = (normal if config.norms_residual else hidden) + attended(both)
    with jax.named_scope("draft_feed_forward"):
        added = gated_mlp(w.mlp, rms_norm(x, w.mlp_norm, eps))
        x = x + (added if isinstance(config.attention, LlamaShape) else shard.sum(added, shard.axes("ffw")))
    return rms_norm(x, w.norm, eps) if config.norms_output else x


def logits(
    config: EagleConfig, w: EagleWeights[Array], hidden: Float[Array, "b d"], shard: Shard
) -> Float[Array, "b v"]:
    """In float32, of the draft's vocabulary."""
    assert w.head is not None  # its own, or the target's
    normal = hidden if config.norms_output else rms_norm(hidden, w.norm, config.rms_norm_eps)
    with jax.named_scope("draft_head"):
        return shard.gather(product("bd,vd->bv", normal, w.head, accumulate=jnp.float32), "vocab")


def project(
    shape: LlamaShape, w: LlamaAttention[Array], both: Float[Array, "n t d2"], positions: Int[Array, "n t"]
) -> tuple[Float[Array, "n t h k"], Float[Array, "n t g k"], Float[Array, "n t g k"]]:
    """Rotated queries and keys, and values, of Llama's attention."""
    exponents = np.arange(0, shape.head_dim, 2, dtype=np.float32) / np.float32(shape.head_dim)
    angles = positions.astype(jnp.float32)[:, :, None, None] / np.power(np.float32(shape.rope_theta), exponents)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    queries, keys = (
        rotate(product("ntd,hkd->nthk", both, matrix), cos, sin, interleave=False) for matrix in (w.q, w.k)
    )
    return queries, keys, product("ntd,hkd->nthk", both, w.v)


def joined(w: LlamaAttention[Array], mixed: Float[Array, "n t h k"]) -> Float[Array, "n t d"]:
    """What the heads of Llama's attention add to the stream."""
    return product("nthk,dhk->ntd", mixed, w.out)
