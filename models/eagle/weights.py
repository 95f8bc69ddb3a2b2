"""The weights of an EAGLE-3 draft: every parameter declared once, under its name on the hub.

The layer's tables are cut over a mesh as the target's. MLA is cut as the target's is; Llama's attention and the MLP
after it are whole on every device. Einsum alphabet: t query position, d embed, h heads, g heads of keys, k head_dim,
f ffw, v vocab.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from moonshard.models.eagle.config import EagleConfig, LlamaShape
from moonshard.models.formats.quantised import Quantised, Weight
from moonshard.models.kimi.weights import Attention, Mlp, declare_attention
from moonshard.models.product import Stacked
from moonshard.models.pytree import pytree
from moonshard.models.spec import Param, View

LAYER = "midlayer."
EMBED, HEAD, TARGETS = "embed_tokens.weight", "lm_head.weight", "d2t"


@pytree
class LlamaAttention[Leaf]:
    """Reads twice the hidden size: the token and the hidden state, each normed."""

    norm: Leaf  # [d], of the token's embedding
    q: Leaf  # [h k 2d]
    k: Leaf  # [g k 2d]
    v: Leaf  # [g k 2d]
    out: Leaf  # [d h k]


@pytree
class EagleWeights[Leaf]:
    embed: Leaf | None  # [v d]; None: the target's
    fc_norm: Leaf | None  # [taps dt]
    fc: Leaf  # [d taps*dt]
    hidden_norm: Leaf  # [d]
    attention: LlamaAttention[Leaf] | Attention[Leaf]  # `norm` is of the token's embedding
    mlp_norm: Leaf  # [d]
    mlp: Mlp[Leaf]
    norm: Leaf  # [d]
    head: Leaf | None  # [draft_v d]; None: the target's
    d2t: Leaf | None  # [draft_v] int32: how far above a number of the draft's vocabulary its token is


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """Which of the tensors that may be missing a folder has."""

    has_embed: bool
    has_head: bool
    has_targets: bool


def declare(config: EagleConfig, stored: Stored) -> EagleWeights[Param]:
    """Every parameter that the folder has, once."""
    d, f = config.hidden_size, config.intermediate_size

    def vector(name: str) -> Param:
        return Param(shape=(d,), axes=("embed",), source=lambda: name, initial=1.0)

    def table(rows: int, name: str) -> Param:
        return Param(shape=(rows, d), axes=("vocab", "embed"), source=lambda: name)

    width = len(config.taps) * config.target_hidden_size
    is_latent = not isinstance(config.attention, LlamaShape)
    ffw = "ffw" if is_latent else None  # as the attention: whole, or cut
    return EagleWeights(
        embed=table(config.vocab_size, EMBED) if stored.has_embed else None,
        fc_norm=_fc_norm(config) if config.has_fc_norm else None,
        fc=_matrix("fc", (d, width), ("embed", None)),
        hidden_norm=vector(f"{LAYER}hidden_norm.weight"),
        attention=_attention(config),
        mlp_norm=vector(f"{LAYER}post_attention_layernorm.weight"),
        mlp=Mlp(
            gate_up=Param(
                shape=(2, f, d),
                axes=(None, ffw, "embed"),
                source=lambda which: f"{LAYER}mlp.{('gate', 'up')[which]}_proj.weight",
                stacked=1,
                is_factor=True,
            ),
            down=_matrix(f"{LAYER}mlp.down_proj", (d, f), ("embed", ffw)),
        ),
        norm=vector("norm.weight"),
        head=table(config.draft_vocab_size, HEAD) if stored.has_head else None,
        d2t=Param(shape=(config.draft_vocab_size,), axes=(None,), source=lambda: TARGETS, dtype="int32", initial=0.0)
        if stored.has_targets
        else None,
    )


def in_place(w: EagleWeights[Any], max_rows: int) -> EagleWeights[Any]:
    """Those that `product` takes as they lie, for up to `max_rows`, as the kernels of `models.native` read them."""

    def placed(leaf: Weight | None) -> Any:
        is_matrix = leaf is not None and not isinstance(leaf, Stacked) and leaf.ndim > 1
        return Stacked(jax.tree.map(lambda part: part[None], leaf), jnp.int32(0), max_rows) if is_matrix else leaf

    def all_placed(tree: Any) -> Any:
        return jax.tree.map(placed, tree, is_leaf=lambda leaf: isinstance(leaf, Quantised | Stacked))

    return replace(w, fc=placed(w.fc), attention=all_placed(w.attention), mlp=all_placed(w.mlp), head=placed(w.head))


def _matrix(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], **options: Any) -> Param:
    return Param(shape=shape, axes=axes, source=lambda: f"{name}.weight", is_factor=True, **options)


def _fc_norm(config: EagleConfig) -> Param:
    shape = (len(config.taps), config.target_hidden_size)
    return Param(shape=shape, axes=(None, "embed"), source=lambda tap: f"fc_norm.{tap}.weight", stacked=1, initial=1.0)


def _attention(config: EagleConfig) -> LlamaAttention[Param] | Attention[Param]:
    if isinstance(config.attention, LlamaShape):
        return _llama_attention(config, config.attention)

    def leaf(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], **options: Any) -> Param:
        defaults: dict[str, Any] = {"is_factor": len(shape) > 1}
        return Param(shape=shape, axes=axes, source=lambda: f"{LAYER}{name}", **{**defaults, **options})

    return declare_attention(config.attention, leaf, width=2 * config.hidden_size)


def _llama_attention(config: EagleConfig, shape: LlamaShape) -> LlamaAttention[Param]:
    d, h, g, k = config.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim

    def projection(name: str, heads: int) -> Param:
        return _matrix(
            f"{LAYER}self_attn.{name}_proj",
            (heads, k, 2 * d),
            (None, None, None),
            tensor_shape=(heads * k, 2 * d),
            view=View(shape=(heads, k, 2 * d)),
        )

    return LlamaAttention(
        norm=Param(shape=(d,), axes=("embed",), source=lambda: f"{LAYER}input_layernorm.weight", initial=1.0),
        q=projection("q", h),
        k=projection("k", g),
        v=projection("v", g),
        out=_matrix(
            f"{LAYER}self_attn.o_proj",
            (d, h, k),
            ("embed", None, None),
            tensor_shape=(d, h * k),
            view=View(shape=(d, h, k)),
        ),
    )
