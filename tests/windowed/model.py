"""A tiny decoder with KV groups, for tests: some layers attend over everything, and the others over a window.

No model that is served has a window as yet. This one is a family like `models.kimi`, in one file, for one device. It
reads whole block tables and masks by position, since clarity counts here and speed does not.
Einsum alphabet: n row, t query position, s key position, d embed, h heads, k head_dim, f ffw, v vocab.
Sources: grouped layers as in Gemma 2 (arXiv 2408.00118), section 2; rotary embedding (RoFormer, arXiv 2104.09864).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moonshard.kv.pages import Pages, read_blocks, write_tokens
from moonshard.models.experts import moe
from moonshard.models.folder.config_reader import ConfigReader
from moonshard.models.formats.sizes import Held
from moonshard.models.machines import XLA, Machine
from moonshard.models.model import Attend, Batch, ExpandedAttention, Observations, PagedAttention
from moonshard.models.product import product
from moonshard.models.pytree import pytree
from moonshard.models.spec import KvGroup, ModelError, Param, StepSize, View, WeightFormat, kv_pieces
from moonshard.models.weights import is_param
from moonshard.sharding.arrays import Array, Bool, Float
from moonshard.sharding.budget import ModelPieces, WeightPiece
from moonshard.sharding.experts import ExpertPlacement
from moonshard.sharding.rules import Rules
from moonshard.sharding.shape import MeshShape
from moonshard.sharding.shard import ALONE, Shard

MODEL_TYPE = "windowed"
FULL, SLIDING = "full_attention", "sliding_attention"  # of config.json's layer_types
BF16_BITS = 16.0
# Compiled programs are kept by what they are made of, and that does not know the code of tests.
SOURCE_DIGEST = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowedConfig:
    """Names as in Hugging Face's config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    sliding_window: int  # how many tokens back from its own, itself included, a query of a sliding layer sees
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float

    @classmethod
    def from_hugging_face(cls, raw: Mapping[str, Any]) -> "WindowedConfig":
        """Raises ModelError: `config.json: ` and the field that is missing, ill-typed or unsupported."""
        fields = ConfigReader(raw)
        fields.require("model_type", {MODEL_TYPE})
        num_layers, types = fields.size("num_hidden_layers"), raw.get("layer_types")
        if not isinstance(types, list) or len(types) != num_layers or not {FULL, SLIDING}.issuperset(types):
            raise ModelError(f"config.json: layer_types is {types!r}, not a kind for each of {num_layers} layers")
        return cls(
            vocab_size=fields.size("vocab_size"),
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("intermediate_size"),
            num_hidden_layers=num_layers,
            num_attention_heads=fields.size("num_attention_heads"),
            head_dim=fields.size("head_dim"),
            layer_types=tuple(types),
            sliding_window=fields.size("sliding_window"),
            max_position_embeddings=fields.size("max_position_embeddings"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope_theta=fields.rope_theta(),
        )

    @property
    def n_routed_experts(self) -> int:
        return 0

    @property
    def num_moe_layers(self) -> int:
        return 0

    def moe_layers(self, layers: range) -> slice:
        del layers
        return slice(0, 0)

    def layers_of(self, kind: str) -> tuple[int, ...]:
        return tuple(layer for layer, each in enumerate(self.layer_types) if each == kind)

    def kv_groups(self, dtype: str) -> tuple[KvGroup, ...]:
        """Keys and values of all heads are the features of a token."""
        size = 2 * self.num_attention_heads * self.head_dim
        windows = {FULL: None, SLIDING: self.sliding_window}
        return tuple(
            KvGroup(name=kind, layers=layers, num_features=size, dtype=dtype, window=window)
            for kind, window in windows.items()
            if (layers := self.layers_of(kind))
        )


@pytree
class Layer[Leaf]:
    attention_norm: Leaf  # [d]
    query: Leaf  # [h k d]
    key: Leaf  # [h k d]
    value: Leaf  # [h k d]
    out: Leaf  # [d h k]
    mlp_norm: Leaf  # [d]
    gate: Leaf  # [f d]
    up: Leaf  # [f d]
    down: Leaf  # [d f]


@pytree
class Weights[Leaf]:
    """The weights of the whole model, or of some consecutive layers."""

    embed: Leaf | None  # [v d], of the first stage
    layers: tuple[Layer[Leaf], ...]
    norm: Leaf | None  # [d], of the last stage
    head: Leaf | None  # [v d], of the last stage


def _declare_layer(config: WindowedConfig, layer: int) -> Layer[Param]:
    d, f, h, k = config.hidden_size, config.intermediate_size, config.num_attention_heads, config.head_dim

    def leaf(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], **options: Any) -> Param:
        return Param(shape=shape, axes=axes, source=lambda: f"model.layers.{layer}.{name}.weight", **options)

    def to_heads(name: str) -> Param:
        shapes = {"tensor_shape": (h * k, d), "view": View(shape=(h, k, d))}
        return leaf(f"self_attn.{name}", (h, k, d), ("heads", None, "embed"), **shapes)

    from_heads = {"tensor_shape": (d, h * k), "view": View(shape=(d, h, k))}
    return Layer(
        attention_norm=leaf("input_layernorm", (d,), ("embed",), initial=1.0),
        query=to_heads("q_proj"),
        key=to_heads("k_proj"),
        value=to_heads("v_proj"),
        out=leaf("self_attn.o_proj", (d, h, k), ("embed", "heads", None), **from_heads),
        mlp_norm=leaf("post_attention_layernorm", (d,), ("embed",), initial=1.0),
        gate=leaf("mlp.gate_proj", (f, d), ("ffw", "embed")),
        up=leaf("mlp.up_proj", (f, d), ("ffw", "embed")),
        down=leaf("mlp.down_proj", (d, f), ("embed", "ffw")),
    )


def _table(config: WindowedConfig, name: str) -> Param:
    return Param(shape=(config.vocab_size, config.hidden_size), axes=("vocab", "embed"), source=lambda: name)


@dataclass(frozen=True, slots=True)
class Windowed:
    """The model; see `models.model.Model` for what its methods promise."""

    config: WindowedConfig
    source_digest: str = SOURCE_DIGEST

    def declare(self, layers: range | None = None, placement: ExpertPlacement | None = None) -> Weights[Param]:
        del placement
        config = self.config
        layers = range(config.num_hidden_layers) if layers is None else layers
        is_last = layers.stop == config.num_hidden_layers
        norm = Param(shape=(config.hidden_size,), axes=("embed",), source=lambda: "model.norm.weight", initial=1.0)
        return Weights(
            embed=_table(config, "model.embed_tokens.weight") if layers.start == 0 else None,
            layers=tuple(_declare_layer(config, layer) for layer in layers),
            norm=norm if is_last else None,
            head=_table(config, "lm_head.weight") if is_last else None,
        )

    def kv_groups(self, dtype: str) -> tuple[KvGroup, ...]:
        return self.config.kv_groups(dtype)

    def forward(
        self,
        weights: Weights[Array],
        pages: Pages,
        batch: Batch,
        *,
        hidden: Float[Array, "n t d"] | None = None,
        backend: moe.Backend = moe.blocks,
        attend: Attend | None = None,
        shard: Shard = ALONE,
        placement: ExpertPlacement | None = None,
        observe: bool = False,
        taps: tuple[int, ...] = (),
        unrolled: bool = False,
        machine: Machine = XLA,
        chunk_tokens: int | None = None,
        attention: PagedAttention | None = None,
        expanded: ExpandedAttention | None = None,
    ) -> tuple[Float[Array, "n t d"], Pages, Observations | None]:
        """Of all layers, on one device."""
        del backend, placement, unrolled, machine, chunk_tokens, attention, expanded
        assert hidden is None
        assert attend is None
        assert not taps
        assert shard.mesh.num_devices == 1
        assert weights.embed is not None
        assert weights.norm is not None
        config, groups = self.config, self.config.kv_groups(str(pages.dtype))
        rotary = _rotary(config, batch.positions)
        x = weights.embed[batch.tokens]
        seen = [x]
        for layer, w in enumerate(weights.layers):
            group = next(index for index, each in enumerate(groups) if layer in each.layers)
            attended, pages = _attend(config, w, x, pages, batch, rotary, groups[group], group, layer)
            x = x + attended
            x = x + _mlp(w, _rms_norm(x, w.mlp_norm, config.rms_norm_eps))
            seen.append(x)
        x = _rms_norm(x, weights.norm, config.rms_norm_eps)
        observations = Observations(hidden=jnp.stack([*seen[:-1], x]), experts=None, router_margin=None)
        return x, pages, observations if observe else None

    def unembed(
        self, weights: Weights[Array], hidden: Float[Array, "b d"], shard: Shard = ALONE, *, machine: Machine = XLA
    ) -> Float[Array, "b v"]:
        del machine
        assert shard.mesh.num_devices == 1
        assert weights.head is not None
        return product("bd,vd->bv", hidden, weights.head, accumulate=jnp.float32)

    def pieces(self, weights: WeightFormat | Held) -> ModelPieces:
        """In bf16 whatever is asked: no format packs so small a model."""
        del weights
        declared = self.declare()
        return ModelPieces(
            first=_pieces(declared.embed),
            layers=tuple(_pieces(layer) for layer in declared.layers),
            last=_pieces((declared.norm, declared.head)),
            kv=kv_pieces(self.kv_groups("bfloat16")),
        )

    def workspace_bytes(self, step: StepSize, mesh: MeshShape, rules: Rules) -> int:
        """Of the residual stream, the MLP and the logits alone: what a score takes depends on the context."""
        del mesh, rules
        config = self.config
        widest = 3 * config.hidden_size + 3 * config.intermediate_size
        return step.num_tokens * widest * 2 + step.num_logits * config.vocab_size * 4


def windowed(raw: Mapping[str, Any]) -> Windowed:
    """The model of a config.json, as `models.registry.FAMILIES` makes it."""
    return Windowed(WindowedConfig.from_hugging_face(raw))


def _attend(
    config: WindowedConfig,
    w: Layer[Array],
    x: Float[Array, "n t d"],
    pages: Pages,
    batch: Batch,
    rotary: tuple[Array, Array],
    group: KvGroup,
    group_index: int,
    layer: int,
) -> tuple[Float[Array, "n t d"], Pages]:
    """Writes the tokens' keys and values, then attends over all in the row's table that a query may see."""
    x = _rms_norm(x, w.attention_norm, config.rms_norm_eps)
    queries = _rotate(product("ntd,hkd->nthk", x, w.query), rotary)
    keys = _rotate(product("ntd,hkd->nthk", x, w.key), rotary)
    values = product("ntd,hkd->nthk", x, w.value)
    features = jnp.stack([keys, values], axis=2).reshape(*x.shape[:2], -1)
    table, within = batch.block_tables[:, group_index], jnp.int32(group.layers.index(layer))
    pages = write_tokens(pages, within, table, batch.positions, features)
    found = read_blocks(pages, within, table).astype(x.dtype)
    found = found.reshape(*found.shape[:2], 2, config.num_attention_heads, config.head_dim)
    scores = jnp.einsum("nthk,nshk->nhts", queries, found[:, :, 0], preferred_element_type=jnp.float32)
    is_seen = _seen(batch.positions, found.shape[1], group.window)
    scores = jnp.where(is_seen[:, None], scores * config.head_dim**-0.5, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    mixed = jnp.einsum("nhts,nshk->nthk", weights, found[:, :, 1])
    return product("nthk,dhk->ntd", mixed, w.out), pages


def _seen(positions: Array, num_keys: int, window: int | None) -> Bool[Array, "n t s"]:
    """Which keys each query sees. Key s is the one at position s of the table's columns, whatever its block holds."""
    keys, queries = jnp.arange(num_keys)[None, None], positions[:, :, None]
    is_past = keys <= queries
    return is_past if window is None else is_past & (keys > queries - window)


def _mlp(w: Layer[Array], x: Float[Array, "n t d"]) -> Float[Array, "n t d"]:
    gated = jax.nn.silu(product("ntd,fd->ntf", x, w.gate)) * product("ntd,fd->ntf", x, w.up)
    return product("ntf,df->ntd", gated, w.down)


def _rms_norm(x: Float[Array, "*b d"], weight: Float[Array, "d"], eps: float) -> Float[Array, "*b d"]:
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * normal.astype(x.dtype)


def _rotary(config: WindowedConfig, positions: Array) -> tuple[Array, Array]:
    """Cosines and sines [n, t, 1, k / 2], the same for all heads."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-np.arange(half) / half)
    angles = positions.astype(jnp.float32)[:, :, None, None] * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: Float[Array, "n t h k"], rotary: tuple[Array, Array]) -> Float[Array, "n t h k"]:
    """Turns each pair (i, i + k / 2) by its angle, as Hugging Face pairs them."""
    cos, sin = rotary
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _pieces(params: Any) -> tuple[WeightPiece, ...]:
    leaves = jax.tree.leaves(params, is_leaf=is_param)
    return tuple(WeightPiece(axes=param.axes, shape=param.shape, bits=BF16_BITS) for param in leaves)
