"""Kimi K2 and DeepSeek-V3, read top to bottom: configuration, weights, rotary positions, layer, forward.

One pure function, `forward`, serves prompts and decoding over paged latents, of all layers or of a stage's; `unembed`
makes logits of what it returns. Layers of a kind are stacked and scanned; routed experts stay outside the scan, so that
only the experts that run are read. How weights lie on a mesh is `sharding.rules`' business, reading files
`models.checkpoint`'s.
Einsum alphabet: b batch, n row, t query position, s key position, d embed, h heads, k head_dim, r lora rank, e experts,
f ffw, v vocab.
Sources: DeepSeek-V3 (arXiv 2412.19437), section 2.1; Kimi K2 (arXiv 2507.20534); numerics as in Hugging Face
transformers' DeepseekV3ForCausalLM; YaRN (arXiv 2309.00071).
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from moonshard.kv.pages import Pages, TokenCut, write_tokens
from moonshard.models import moe
from moonshard.models.attention import latent_attention, merge_over, partial_attention
from moonshard.models.checkpoint import Checkpoint
from moonshard.models.expert_copies import to_copies
from moonshard.models.moe_exchange import exchanged
from moonshard.models.pytree import pytree
from moonshard.models.spec import KvGroup, ModelError, Param
from moonshard.sharding.arrays import Array, Bool, Float, Int
from moonshard.sharding.experts import ExpertPlacement
from moonshard.sharding.shard import ALONE, Shard

# --- configuration ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """Context extension by per-frequency interpolation; names as in `rope_scaling`."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class KimiConfig:
    """Names as in Hugging Face's config.json, where it has them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    first_k_dense_replace: int
    max_position_embeddings: int
    rms_norm_eps: float
    lora_norm_eps: float  # of the norms inside q_a and kv_a: 1e-6 in Hugging Face, whatever rms_norm_eps says
    rope_theta: float
    rope_interleave: bool
    yarn: Yarn | None
    attention_bias: bool
    tie_word_embeddings: bool

    @property
    def num_dense_layers(self) -> int:
        return min(self.first_k_dense_replace, self.num_hidden_layers)

    @property
    def num_moe_layers(self) -> int:
        return self.num_hidden_layers - self.num_dense_layers

    def moe_layers(self, layers: range) -> slice:
        """Which of all MoE layers are among these layers of the model."""
        first = self.num_dense_layers
        return slice(max(layers.start - first, 0), max(layers.stop - first, 0))

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_size(self) -> int:
        """Values cached per token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def kv_groups(self, dtype: str) -> tuple[KvGroup, ...]:
        latent = KvGroup(
            name="latent", kind="full", num_layers=self.num_hidden_layers, num_features=self.latent_size, dtype=dtype
        )
        return (latent,)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "KimiConfig":
        """A checkpoint's configuration. ModelError, with the path of its config.json."""
        try:
            return cls.from_hugging_face(checkpoint.config)
        except ModelError as error:
            raise ModelError(f"{checkpoint.folder}/{error}") from error

    @classmethod
    def from_hugging_face(cls, raw: Mapping[str, Any]) -> "KimiConfig":
        """Reads config.json, in the spelling of transformers 4 or 5.

        Raises:
            ModelError: `config.json: ` and the field that is missing, ill-typed or unsupported.
        """
        fields = _ConfigReader(raw)
        fields.require("model_type", {"deepseek_v3", "kimi_k2"})
        fields.require("hidden_act", {"silu"}, default="silu")
        fields.require("scoring_func", {"sigmoid"}, default="sigmoid")
        fields.require("quantization_config", {None}, default=None)
        config = cls(
            vocab_size=fields.size("vocab_size"),
            hidden_size=fields.size("hidden_size"),
            intermediate_size=fields.size("intermediate_size"),
            moe_intermediate_size=fields.size("moe_intermediate_size"),
            num_hidden_layers=fields.size("num_hidden_layers"),
            num_attention_heads=fields.size("num_attention_heads"),
            kv_lora_rank=fields.size("kv_lora_rank"),
            q_lora_rank=fields.optional_size("q_lora_rank"),
            qk_nope_head_dim=fields.size("qk_nope_head_dim"),
            qk_rope_head_dim=fields.size("qk_rope_head_dim"),
            v_head_dim=fields.size("v_head_dim"),
            n_routed_experts=fields.size("n_routed_experts"),
            n_shared_experts=fields.optional_size("n_shared_experts", default=1) or 0,
            num_experts_per_tok=fields.size("num_experts_per_tok"),
            n_group=fields.size("n_group", default=1),
            topk_group=fields.size("topk_group", default=1),
            norm_topk_prob=fields.flag("norm_topk_prob", default=True),
            routed_scaling_factor=fields.number("routed_scaling_factor", default=1.0),
            first_k_dense_replace=fields.optional_size("first_k_dense_replace", default=0) or 0,
            max_position_embeddings=fields.size("max_position_embeddings"),
            rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
            lora_norm_eps=fields.number("lora_norm_eps", default=1e-6),
            rope_theta=fields.rope_theta(),
            rope_interleave=fields.flag("rope_interleave", default=True),
            yarn=fields.yarn(),
            attention_bias=fields.flag("attention_bias", default=False),
            tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        )
        _check(config)
        return config


def _check(config: KimiConfig) -> None:
    def demand(holds: bool, field: str, why: str) -> None:
        if not holds:
            raise ModelError(f"config.json: {field} {why}")

    experts, groups = config.n_routed_experts, config.n_group
    demand(config.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", f"= {config.qk_rope_head_dim} is odd")
    demand(experts % groups == 0, "n_group", f"= {groups} does not divide n_routed_experts = {experts}")
    demand(config.topk_group <= groups, "topk_group", f"= {config.topk_group} is more than n_group = {groups}")
    demand(groups == 1 or experts // groups >= 2, "n_group", f"= {groups} leaves fewer than 2 experts a group")
    all_experts = config.num_moe_layers * experts
    demand(all_experts <= MAX_EXPERTS, "n_routed_experts", f"= {experts} makes more than {MAX_EXPERTS} in all layers")
    choosable = experts // groups * config.topk_group
    demand(
        config.num_experts_per_tok <= choosable,
        "num_experts_per_tok",
        f"= {config.num_experts_per_tok} is more than the {choosable} experts that can be chosen",
    )


# Of any size in config.json: what is beyond it is damaged or hostile, and would be listed or allocated before anything
# else finds it out. Kimi K2 has 61 layers, 384 experts, 163,840 tokens and contexts of 262,144.
MAX_SIZE = 2**24
MAX_SIZES = {
    "num_hidden_layers": 4096,
    "num_attention_heads": 65_536,
    "n_routed_experts": 65_536,
    "n_shared_experts": 4096,
    "max_position_embeddings": 2**31 - 1,
    "original_max_position_embeddings": 2**31 - 1,
}
MAX_EXPERTS = 2**20  # in all layers


class _ConfigReader:
    """Typed access to config.json; every fault names its field."""

    def __init__(self, raw: Mapping[str, Any]):
        self._raw = raw
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise ModelError(f"config.json: rope_scaling is {rope!r}, not an object")
        self._rope = _ConfigReader(rope) if rope is not raw and rope else None

    def _get(self, name: str, default: Any = ...) -> Any:
        value = self._raw.get(name)
        if value is None:
            if default is ...:
                raise ModelError(f"config.json: {name} is missing")
            return default
        return value

    def require(self, name: str, allowed: set[Any], default: Any = ...) -> None:
        value = self._get(name, default)
        if isinstance(value, Mapping | list) or value not in allowed:
            names = ", ".join(sorted(str(a) for a in allowed if a is not None))
            shown = "an object" if isinstance(value, Mapping | list) else repr(value)
            raise ModelError(f"config.json: {name} is {shown}, not supported" + (f" (known: {names})" if names else ""))

    def size(self, name: str, default: Any = ...) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"config.json: {name} is {value!r}, not a positive integer")
        if value > (most := MAX_SIZES.get(name, MAX_SIZE)):
            raise ModelError(f"config.json: {name} is {_shown(value)}, more than {most}")
        return value

    def optional_size(self, name: str, default: int | None = None) -> int | None:
        value = self._get(name, default)
        return None if _is_off(value) else self.size(name, default)

    def number(self, name: str, default: Any = ...) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ModelError(f"config.json: {name} is {value!r}, not a positive number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if _is_off(self._raw.get(name)) else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {name} is {value!r}, not true or false")
        return value

    def rope_theta(self) -> float:
        inside = self._rope is not None and "rope_theta" in self._rope._raw
        reader = self._rope if inside and self._rope is not None else self
        return reader.number("rope_theta", default=10000.0)

    def yarn(self) -> Yarn | None:
        rope = self._rope
        if rope is None:
            return None
        kind = rope._get("rope_type", rope._get("type", "default"))
        if kind == "default":
            return None
        if kind != "yarn":
            raise ModelError(f"config.json: rope_scaling.type is {kind!r}, not supported (known: default, yarn)")
        return Yarn(
            factor=rope.number("factor"),
            original_max_position_embeddings=rope.size("original_max_position_embeddings"),
            beta_fast=rope.optional_number("beta_fast") or 32.0,
            beta_slow=rope.optional_number("beta_slow") or 1.0,
            mscale=rope.optional_number("mscale"),
            mscale_all_dim=rope.optional_number("mscale_all_dim"),
            attention_factor=rope.optional_number("attention_factor"),
            truncate=rope.flag("truncate", default=True),
        )


def _shown(value: int) -> str:
    """One of a million digits is not spelt out."""
    return str(value) if abs(value) < 10**30 else "a number of more than 30 digits"


def _is_off(value: Any) -> bool:
    return value is None or (value == 0 and value is not False)


# --- weights ----------------------------------------------------------------------------------------------------------

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
class Router[Leaf]:
    gate: Leaf  # [l e d]
    bias: Leaf  # [l e]


@pytree
class Stack[Leaf]:
    """Layers of one kind, stacked along `layers`: dense ones have no router."""

    attention: Attention[Leaf]
    mlp_norm: Leaf  # [l d]
    mlp: Mlp[Leaf] | None
    router: Router[Leaf] | None


@pytree
class Weights[Leaf]:
    """Those of the whole model, or of a stage: some consecutive layers."""

    embed: Leaf | None  # [v d], of the first stage
    dense: Stack[Leaf] | None
    sparse: Stack[Leaf] | None
    experts: moe.Experts[Leaf] | None
    norm: Leaf | None  # [d], of the last stage
    head: Leaf | None  # [v d], of the last stage; None there too: tied to `embed`


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
        return Param(shape=(len(layers), *shape), axes=("layers", *axes), source=source, **{"stacked": 1, **options})

    def mlp(prefix: str, width: int) -> Mlp[Param]:
        def source(layer: int, which: int) -> str:
            return f"model.layers.{layers[layer]}.{prefix}.{('gate', 'up')[which]}_proj.weight"

        return Mlp(
            gate_up=leaf("", (2, width, config.hidden_size), (None, "ffw", "embed"), source=source, stacked=2),
            down=leaf(f"{prefix}.down_proj.weight", (config.hidden_size, width), ("embed", "ffw")),
        )

    shared_width = config.moe_intermediate_size * config.n_shared_experts
    return Stack(
        attention=_declare_attention(config, leaf),
        mlp_norm=leaf("post_attention_layernorm.weight", (config.hidden_size,), ("embed",), initial=1.0),
        mlp=mlp("mlp", dense_width)
        if dense_width is not None
        else (mlp("mlp.shared_experts", shared_width) if shared_width else None),
        router=None
        if dense_width is not None
        else Router(
            gate=leaf("mlp.gate.weight", (config.n_routed_experts, config.hidden_size), (None, "embed")),
            bias=leaf(
                "mlp.gate.e_score_correction_bias", (config.n_routed_experts,), (None,), dtype="float32", initial=0.0
            ),
        ),
    )


def _declare_attention(config: KimiConfig, leaf: Any) -> Attention[Param]:
    d, h, r = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    nope, v, k = config.qk_nope_head_dim, config.v_head_dim, config.qk_head_dim
    q_rank, bias = config.q_lora_rank, config.attention_bias
    q_name = "q_b_proj" if q_rank else "q_proj"

    def kv_up(shape: tuple[int, ...], part: slice) -> Param:
        return leaf(
            "self_attn.kv_b_proj.weight",
            shape,
            ("heads", None, "kv_lora"),
            tensor_shape=(h * (nope + v), r),
            view=lambda w: w.reshape(h, nope + v, r)[:, part],
        )

    return Attention(
        norm=leaf("input_layernorm.weight", (d,), ("embed",), initial=1.0),
        q_a=leaf("self_attn.q_a_proj.weight", (q_rank, d), (None, "embed")) if q_rank else None,
        q_a_bias=leaf("self_attn.q_a_proj.bias", (q_rank,), (None,), initial=0.0) if q_rank and bias else None,
        q_a_norm=leaf("self_attn.q_a_layernorm.weight", (q_rank,), (None,), initial=1.0) if q_rank else None,
        q_b=leaf(
            f"self_attn.{q_name}.weight",
            (h, k, q_rank or d),
            ("heads", None, None),
            tensor_shape=(h * k, q_rank or d),
            view=lambda w: w.reshape(h, k, -1),
        ),
        kv_a=leaf("self_attn.kv_a_proj_with_mqa.weight", (config.latent_size, d), (None, "embed")),
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
            view=lambda w: w.reshape(d, h, v),
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
        ),
        down=Param(
            shape=(len(layers), e, d, f), axes=("layers", "experts", "embed", "expert_ffw"), source=down, stacked=2
        ),
    )


# --- rotary positions -------------------------------------------------------------------------------------------------


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


# --- layers -----------------------------------------------------------------------------------------------------------


@pytree
class Batch:
    """Rows of tokens of one sequence each: tiles of prompts, or decode slots.

    `positions` below 0 are padding. A row's tokens are consecutive, and rows of one sequence may share a step: every
    row sees what all rows write.
    """

    tokens: Int[Array, "n t"]
    positions: Int[Array, "n t"]
    block_tables: Int[Array, "n m"]


@pytree
class Observations:
    """What a numerics question asks of a forward pass."""

    hidden: Float[Array, "layers_and_embed n t d"]  # embeddings, then the residual stream after each layer
    experts: Int[Array, "moe_layers tokens k"] | None
    router_margin: Float[Array, "moe_layers tokens"] | None


def rms_norm(x: Float[Array, "*b d"], weight: Float[Array, "d"], eps: float) -> Float[Array, "*b d"]:
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * normal.astype(x.dtype)


@runtime_checkable
class Attend(Protocol):
    """How absorbed queries meet keys: over pages when serving; `models.training` has the one that is differentiated."""

    def __call__(
        self,
        queries: Float[Array, "n t h f"],
        features: Float[Array, "n t f"],
        pages: Pages,
        layer: Int[Array, ""],
        batch: Batch,
        *,
        value_rank: int,
        scale: float,
    ) -> tuple[Float[Array, "n t h r"], Pages]: ...


def attend_paged(
    queries: Float[Array, "n t h f"],
    features: Float[Array, "n t f"],
    pages: Pages,
    layer: Int[Array, ""],
    batch: Batch,
    *,
    value_rank: int,
    scale: float,
    shard: Shard = ALONE,
) -> tuple[Float[Array, "n t h r"], Pages]:
    """Writes the tokens' latents, then attends over everything written."""
    tables, positions = batch.block_tables, batch.positions
    cut = TokenCut(part=shard.part("kv_tokens"), num_parts=shard.num_parts("kv_tokens"))
    pages = write_tokens(pages, layer, tables, positions, features, cut)
    if cut.num_parts == 1:
        return latent_attention(queries, pages, layer, tables, positions, value_rank=value_rank, scale=scale), pages
    partial = partial_attention(
        shard.gather_heads(queries), pages, layer, tables, positions, value_rank=value_rank, scale=scale, cut=cut
    )
    return merge_over(shard, partial).astype(queries.dtype), pages


def _attend(
    config: KimiConfig,
    w: Attention[Array],
    x: Float[Array, "n t d"],
    pages: Pages,
    layer: Int[Array, ""],
    batch: Batch,
    rotary: tuple[Array, Array],
    attend: Attend,
    shard: Shard,
) -> tuple[Float[Array, "n t d"], Pages]:
    cos, sin = rotary
    r, nope = config.kv_lora_rank, config.qk_nope_head_dim
    x = rms_norm(x, w.norm, config.rms_norm_eps)
    queries = _queries(config, w, x)
    q_rope = rotate(queries[..., nope:], cos[:, :, None], sin[:, :, None], config.rope_interleave)
    q_latent = jnp.einsum("nthk,hkr->nthr", queries[..., :nope], w.k_up)
    kv = jnp.einsum("ntd,rd->ntr", x, w.kv_a) + (w.kv_a_bias if w.kv_a_bias is not None else 0)
    latent = rms_norm(kv[..., :r], w.kv_a_norm, config.lora_norm_eps)
    k_rope = rotate(kv[..., r:], cos, sin, config.rope_interleave)
    features = jnp.concatenate([latent, k_rope], axis=-1)
    queries = jnp.concatenate([q_latent, q_rope], axis=-1)
    mixed, pages = attend(queries, features, pages, layer, batch, value_rank=r, scale=softmax_scale(config))
    values = jnp.einsum("nthr,hvr->nthv", mixed, w.v_up)
    out = shard.sum(jnp.einsum("nthv,dhv->ntd", values, w.out), shard.axes("heads"))
    return out + (w.out_bias if w.out_bias is not None else 0), pages


def _queries(config: KimiConfig, w: Attention[Array], x: Float[Array, "n t d"]) -> Float[Array, "n t h k"]:
    if w.q_a is not None and w.q_a_norm is not None:
        x = jnp.einsum("ntd,rd->ntr", x, w.q_a) + (w.q_a_bias if w.q_a_bias is not None else 0)
        x = rms_norm(x, w.q_a_norm, config.lora_norm_eps)
    return jnp.einsum("ntr,hkr->nthk", x, w.q_b)


def _mlp(w: Mlp[Array], x: Float[Array, "n t d"]) -> Float[Array, "n t d"]:
    return jnp.einsum("ntf,df->ntd", moe.gated(jnp.einsum("ntd,gfd->ntgf", x, w.gate_up)), w.down)


def _feed_forward(
    config: KimiConfig,
    w: Stack[Array],
    experts: moe.Experts[Array] | None,
    x: Float[Array, "n t d"],
    layer: Int[Array, ""],
    valid: Bool[Array, "n t"],
    backend: moe.Backend,
    shard: Shard,
) -> tuple[Float[Array, "n t d"], moe.Routing | None]:
    """Dense MLP, or routed plus shared experts. `layer` counts within the stack."""
    x = rms_norm(x, w.mlp_norm, config.rms_norm_eps)
    out = _mlp(w.mlp, x) if w.mlp is not None else jnp.zeros_like(x)
    if w.router is None or experts is None:
        return shard.sum(out, shard.axes("ffw")), None
    flat = x.reshape(-1, x.shape[-1])
    routing = moe.route(
        flat,
        w.router.gate,
        w.router.bias,
        top_k=config.num_experts_per_tok,
        num_groups=config.n_group,
        top_groups=config.topk_group,
        normalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )
    routed = backend(flat, routing, valid.reshape(-1), experts, layer)
    return _add_partial(shard, out, routed.reshape(x.shape)), routing


def _add_partial(shard: Shard, shared: Float[Array, "n t d"], routed: Float[Array, "n t d"]) -> Float[Array, "n t d"]:
    """Shared and routed experts; each is a partial sum where `tensor` cuts it. One all-reduce where it cuts both."""
    over_shared = shard.axes("ffw")
    cuts_routed = "tensor" in (*shard.axes("experts"), *shard.axes("expert_ffw"))
    if cuts_routed and over_shared == ("tensor",):
        return shard.sum(shared + routed, over_shared)
    return shard.sum(shared, over_shared) + (shard.sum(routed, ("tensor",)) if cuts_routed else routed)


# --- forward ----------------------------------------------------------------------------------------------------------


def forward(
    config: KimiConfig,
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
    unrolled: bool = False,
) -> tuple[Float[Array, "n t d"], Pages, Observations | None]:
    """Runs all layers of these weights over a batch of rows, writing their latents into the pages.

    Args:
        hidden: the residual stream from the stage before; None on the first stage, which embeds the tokens.
        place: what the device that runs this must know of its mesh; weights, pages and rows are its own parts of them.
        placement: the one that these weights were declared with.
        unrolled: layers one after the other instead of in a loop. A gradient then copies nothing into stacks and out
            of them (a sixth of the time of the embedded model's on two cores), for a longer compilation.

    Returns:
        The residual stream, on the last stage after the final norm; the pages; the observations if asked for.
    """
    valid = batch.positions >= 0
    attend = attend or functools.partial(attend_paged, shard=shard)
    backend = exchanged(backend, shard)
    if placement is not None:
        backend = to_copies(backend, placement, shard)
    frequencies, factor = rotary_frequencies(config)
    angles = batch.positions.astype(jnp.float32)[:, :, None] * frequencies
    rotary = (jnp.cos(angles) * factor, jnp.sin(angles) * factor)

    def scan_stack(x, pages, stack: Stack[Array], experts: moe.Experts[Array] | None, first: int):
        def step(carry, inputs):
            x, pages = carry
            w, index = inputs
            with jax.named_scope("attention"):
                attended, pages = _attend(config, w.attention, x, pages, first + index, batch, rotary, attend, shard)
            x = x + attended
            with jax.named_scope("feed_forward"):
                added, routing = _feed_forward(config, w, experts, x, index, valid, backend, shard)
            x = x + added
            return (x, pages), (x, routing) if observe else (None, None)

        num_layers = stack.mlp_norm.shape[0]
        (x, pages), (streams, routing) = jax.lax.scan(
            step, (x, pages), (stack, jnp.arange(num_layers)), unroll=num_layers if unrolled else 1
        )
        return x, pages, streams, routing

    if hidden is None:
        assert weights.embed is not None  # of the first stage
        hidden = _embed(weights.embed, batch.tokens, shard)
    x = hidden
    seen: list[Any] = [x[None]]
    routing = None
    if weights.dense is not None:
        x, pages, streams, _ = scan_stack(x, pages, weights.dense, None, 0)
        seen.append(streams)
    if weights.sparse is not None:
        num_dense = 0 if weights.dense is None else weights.dense.mlp_norm.shape[0]
        x, pages, streams, routing = scan_stack(x, pages, weights.sparse, weights.experts, num_dense)
        seen.append(streams)
    if weights.norm is not None:
        x = rms_norm(x, weights.norm, config.rms_norm_eps)
    return x, pages, _observations(seen, routing) if observe else None


def _observations(hidden: list[Array], routing: moe.Routing | None) -> Observations:
    return Observations(
        hidden=jnp.concatenate(hidden),
        experts=None if routing is None else routing.experts,
        router_margin=None if routing is None else routing.margin,
    )


def _embed(table: Float[Array, "v d"], tokens: Int[Array, "n t"], shard: Shard) -> Float[Array, "n t d"]:
    """Each device looks up the tokens whose rows of the table it has, and adds 0 for the others."""
    axes = shard.axes("vocab")
    if not axes:
        return table[tokens]
    own = tokens - shard.part("vocab") * len(table)
    is_own = (own >= 0) & (own < len(table))
    found = table.at[jnp.where(is_own, own, len(table))].get(mode="fill", fill_value=0)
    return shard.sum(found, axes)


def unembed(weights: Weights[Array], hidden: Float[Array, "b d"], shard: Shard = ALONE) -> Float[Array, "b v"]:
    """Logits in float32."""
    head = weights.embed if weights.head is None else weights.head
    return shard.gather(jnp.einsum("bd,vd->bv", hidden, head, preferred_element_type=jnp.float32), "vocab")
