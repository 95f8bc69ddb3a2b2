"""The weights of Kimi K2 and DeepSeek-V3: every parameter declared once, with its shape, axes and place in a folder.

Layers of a kind are stacked; routed experts stay apart, so that only the experts that run are read. How weights lie on
a mesh is `sharding.rules`' business, reading files `models.folder.checkpoint`'s.
Einsum alphabet: b batch, n row, t query position, s key position, d embed, h heads, k head_dim, r lora rank, e experts,
f ffw, v vocab.
"""

import dataclasses
from typing import Any

import jax

from moonshard.models.experts import moe
from moonshard.models.formats.quantised import Quantised
from moonshard.models.kimi.config import KimiConfig
from moonshard.models.product import Stacked, Weight, taken
from moonshard.models.pytree import pytree
from moonshard.models.spec import Param, View
from moonshard.sharding.arrays import Array, Int
from moonshard.sharding.experts import ExpertPlacement

EMBEDDINGS = "model.embed_tokens.weight"


@pytree
class Attention[Leaf]:
    """Latent attention of a stack of layers. Without a q_lora_rank `q_a` is None, and `q_b` reads x itself."""

    norm: Leaf  # [l d]
    q_a: Leaf | None  # [l r d]
    q_a_bias: Leaf | None  # [l r]
    q_a_norm: Leaf | None  # [l r]
    q_b: Leaf  # [l h k r], k = nope + rope
    kv_a: Leaf  # [l r+rope d]
    kv_a_bias: Leaf | None  # [l r+rope]
    kv_a_norm: Leaf  # [l r]
    k_up: Leaf  # [l h k r], k = nope
    v_up: Leaf  # [l h v r]
    out: Leaf  # [l d h v]
    out_bias: Leaf | None  # [l d]


@pytree
class Mlp[Leaf]:
    """SwiGLU: a dense layer's, or the shared experts'."""

    gate_up: Leaf  # [l 2 f d]
    down: Leaf  # [l d f]


@pytree
class RouterWeights[Leaf]:
    gate: Leaf  # [l e d]
    bias: Leaf  # [l e]


@pytree
class Stack[Leaf]:
    """Layers of one kind, stacked along `layers`: dense ones have no router."""

    attention: Attention[Leaf]
    mlp_norm: Leaf  # [l d]
    mlp: Mlp[Leaf] | None
    router: RouterWeights[Leaf] | None


@pytree
class Weights[Leaf]:
    """The weights of the whole model, or of a stage: some consecutive layers."""

    embed: Leaf | None  # [v d], of the first stage
    dense: Stack[Leaf] | None
    sparse: Stack[Leaf] | None
    experts: moe.Experts[Leaf] | None
    norm: Leaf | None  # [d], of the last stage
    head: Leaf | None  # [v d], of the last stage; None there too: tied to `embed`


def in_place(stack: Stack[Weight], layer: Int[Array, ""], max_rows: int) -> Stack[Any]:
    """A layer's weights; those that `product` takes as they lie, for up to `max_rows`, stay in their stacks."""

    def placed(leaf: Weight) -> Any:
        return Stacked(leaf, layer, max_rows) if leaf.ndim > 2 else taken(leaf, layer)

    own = jax.tree.map(placed, stack, is_leaf=lambda leaf: isinstance(leaf, Quantised))
    return dataclasses.replace(own, router=jax.tree.map(lambda leaf: taken(leaf, layer), stack.router))


def declare(
    config: KimiConfig, layers: range | None = None, placement: ExpertPlacement | None = None
) -> Weights[Param]:
    """Every parameter of these layers, once; of all layers by default.

    `placement` covers the MoE layers among them. Without one, each expert is there once, and they lie in order.
    """
    layers = range(config.num_hidden_layers) if layers is None else layers
    is_first, is_last = layers.start == 0, layers.stop == config.num_hidden_layers
    dense = range(layers.start, min(layers.stop, config.num_dense_layers))
    sparse = range(max(layers.start, config.num_dense_layers), layers.stop)
    norm = Param(shape=(config.hidden_size,), axes=("embed",), source=lambda: "model.norm.weight", initial=1.0)
    return Weights(
        embed=_table(config, EMBEDDINGS) if is_first else None,
        dense=_declare_stack(config, dense, config.intermediate_size) if dense else None,
        sparse=_declare_stack(config, sparse, None) if sparse else None,
        experts=_declare_experts(config, sparse, placement) if sparse else None,
        norm=norm if is_last else None,
        head=_declare_head(config, is_first=is_first) if is_last else None,
    )


def _declare_head(config: KimiConfig, *, is_first: bool) -> Param | None:
    """A tied head is declared only where the embeddings are on another stage."""
    if not config.tie_word_embeddings:
        return _table(config, "lm_head.weight")
    return None if is_first else _table(config, EMBEDDINGS)


def _table(config: KimiConfig, name: str) -> Param:
    return Param(shape=(config.vocab_size, config.hidden_size), axes=("vocab", "embed"), source=lambda: name)


def _declare_stack(config: KimiConfig, layers: range, dense_width: int | None) -> Stack[Param]:
    def leaf(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], **options: Any) -> Param:
        source = options.pop("source", lambda layer: f"model.layers.{layers[layer]}.{name}")
        defaults = {"stacked": 1, "is_factor": len(shape) > 1}
        return Param(shape=(len(layers), *shape), axes=("layers", *axes), source=source, **{**defaults, **options})

    def mlp(prefix: str, width: int) -> Mlp[Param]:
        def source(layer: int, which: int) -> str:
            return f"model.layers.{layers[layer]}.{prefix}.{('gate', 'up')[which]}_proj.weight"

        return Mlp(
            gate_up=leaf("", (2, width, config.hidden_size), (None, "ffw", "embed"), source=source, stacked=2),
            down=leaf(f"{prefix}.down_proj.weight", (config.hidden_size, width), ("embed", "ffw")),
        )

    shared_width = config.moe_intermediate_size * config.n_shared_experts
    return Stack(
        attention=declare_attention(config, leaf),
        mlp_norm=leaf("post_attention_layernorm.weight", (config.hidden_size,), ("embed",), initial=1.0),
        mlp=mlp("mlp", dense_width)
        if dense_width is not None
        else (mlp("mlp.shared_experts", shared_width) if shared_width else None),
        router=None
        if dense_width is not None
        else RouterWeights(
            gate=leaf(
                "mlp.gate.weight", (config.n_routed_experts, config.hidden_size), (None, "embed"), is_factor=False
            ),
            bias=leaf(
                "mlp.gate.e_score_correction_bias", (config.n_routed_experts,), (None,), dtype="float32", initial=0.0
            ),
        ),
    )


def declare_attention(config: KimiConfig, leaf: Any, width: int | None = None) -> Attention[Param]:
    """`width`: of what queries and latents are made of; None: of the residual stream. `leaf` makes a parameter."""
    d, h, r = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    read = width or d
    nope, v, k = config.qk_nope_head_dim, config.v_head_dim, config.qk_head_dim
    q_rank, bias = config.q_lora_rank, config.attention_bias
    q_name = "q_b_proj" if q_rank else "q_proj"

    def kv_up(shape: tuple[int, ...], part: slice) -> Param:
        return leaf(
            "self_attn.kv_b_proj.weight",
            shape,
            ("heads", None, "kv_lora"),
            tensor_shape=(h * (nope + v), r),
            view=View(shape=(h, nope + v, r), part=(slice(None), part)),
        )

    return Attention(
        norm=leaf("input_layernorm.weight", (d,), ("embed",), initial=1.0),
        q_a=leaf("self_attn.q_a_proj.weight", (q_rank, read), (None, "embed")) if q_rank else None,
        q_a_bias=leaf("self_attn.q_a_proj.bias", (q_rank,), (None,), initial=0.0) if q_rank and bias else None,
        q_a_norm=leaf("self_attn.q_a_layernorm.weight", (q_rank,), (None,), initial=1.0) if q_rank else None,
        q_b=leaf(
            f"self_attn.{q_name}.weight",
            (h, k, q_rank or read),
            ("heads", None, None),
            tensor_shape=(h * k, q_rank or read),
            view=View(shape=(h, k, q_rank or read)),
        ),
        kv_a=leaf("self_attn.kv_a_proj_with_mqa.weight", (config.latent_size, read), (None, "embed")),
        kv_a_bias=leaf("self_attn.kv_a_proj_with_mqa.bias", (config.latent_size,), (None,), initial=0.0)
        if bias
        else None,
        kv_a_norm=leaf("self_attn.kv_a_layernorm.weight", (r,), ("kv_lora",), initial=1.0),
        k_up=kv_up((h, nope, r), slice(None, nope)),
        v_up=kv_up((h, v, r), slice(nope, None)),
        out=leaf(
            "self_attn.o_proj.weight",
            (d, h, v),
            ("embed", "heads", None),
            tensor_shape=(d, h * v),
            view=View(shape=(d, h, v)),
        ),
        out_bias=leaf("self_attn.o_proj.bias", (d,), ("embed",), initial=0.0) if bias else None,
    )


def _declare_experts(config: KimiConfig, layers: range, placement: ExpertPlacement | None) -> moe.Experts[Param]:
    d, f = config.hidden_size, config.moe_intermediate_size
    e = config.n_routed_experts if placement is None else placement.num_places

    def expert_at(layer: int, index: int) -> int:
        return index if placement is None else int(placement.expert_of[layer, index])

    def gate_up(layer: int, index: int, which: int) -> str:
        expert = expert_at(layer, index)
        return f"model.layers.{layers[layer]}.mlp.experts.{expert}.{('gate', 'up')[which]}_proj.weight"

    def down(layer: int, index: int) -> str:
        return f"model.layers.{layers[layer]}.mlp.experts.{expert_at(layer, index)}.down_proj.weight"

    return moe.Experts(
        gate_up=Param(
            shape=(len(layers), e, 2, f, d),
            axes=("layers", "experts", None, "expert_ffw", "embed"),
            source=gate_up,
            stacked=3,
            is_factor=True,
        ),
        down=Param(
            shape=(len(layers), e, d, f),
            axes=("layers", "experts", "embed", "expert_ffw"),
            source=down,
            stacked=2,
            is_factor=True,
        ),
    )
