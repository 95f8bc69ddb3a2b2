"""The configuration of an EAGLE-3 draft, as its config.json has it, checked against the target; faults name the field.

Names as on the hub (SpecForge's `LlamaForCausalLMEagle3`, vLLM's `Eagle3DeepseekV2ForCausalLM`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moonshard.models.eagle.taps import TapIds, read_taps
from moonshard.models.folder.config_reader import ConfigReader
from moonshard.models.kimi.config import KimiConfig
from moonshard.models.model import ModelSizes

LLAMA = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
LATENT = ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaShape:
    """Attention with keys and values of their own, shared by groups of heads (GQA: arXiv 2305.13245)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float

    @property
    def num_features(self) -> int:
        """Values cached per token: keys, then values."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleConfig:
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    vocab_size: int  # the target's
    draft_vocab_size: int
    rms_norm_eps: float
    taps: tuple[int, ...]  # layers of the target at whose input it reads
    has_fc_norm: bool  # EAGLE-3.1: each tap has a norm of its own before they are joined
    norms_output: bool  # EAGLE-3.1: the hidden state that the next row reads is after the final norm
    norms_residual: bool  # what attention is added to is what it reads, normed; else as it comes
    attention: LlamaShape | KimiConfig

    @classmethod
    def from_hugging_face(cls, raw: Mapping[str, Any], target: ModelSizes, ids: TapIds = "output") -> "EagleConfig":
        """Reads a draft's config.json.

        Args:
            target: the sizes of the model that it guesses for.
            ids: what the ids of layers name, where there are some; see `taps`.

        Raises:
            ModelError: `config.json: ` and the field that is missing, ill-typed or unsupported, or that shows a draft
                for another target.
        """
        fields = ConfigReader(raw)
        is_latent = _is_latent(fields)
        fields.require("hidden_act", {"silu"}, default="silu")
        fields.require("num_hidden_layers", {1}, default=1)
        fields.require("attention_bias", {False}, default=False)
        hidden_size = fields.size("hidden_size")
        config = cls(
            hidden_size=hidden_size,
            target_hidden_size=fields.size("target_hidden_size", default=target.hidden_size),
            intermediate_size=fields.size("intermediate_size"),
            vocab_size=fields.size("vocab_size"),
            draft_vocab_size=fields.size("draft_vocab_size", default=raw.get("vocab_size")),
            rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
            taps=read_taps(fields, target.num_hidden_layers, ids),
            has_fc_norm=_flag(fields, "fc_norm"),
            norms_output=_flag(fields, "norm_output"),
            norms_residual=_flag(fields, "norm_before_residual"),
            attention=_latent_shape(fields) if is_latent else _llama_shape(fields),
        )
        _check(config, fields, target)
        return config


def _is_latent(fields: ConfigReader) -> bool:
    named = fields.get("architectures")
    known = (*LLAMA, *LATENT)
    if not isinstance(named, list) or len(named) != 1 or named[0] not in known:
        raise fields.fault(f"architectures is {named!r}: no EAGLE-3 draft (known: {', '.join(known)})")
    return named[0] in LATENT


def _flag(fields: ConfigReader, name: str) -> bool:
    """At the top or in `eagle_config`; false where it is in neither."""
    is_inside = fields.get(name) is None and isinstance(fields.get("eagle_config"), Mapping)
    return (fields.inside("eagle_config") if is_inside else fields).flag(name, default=False)


def _llama_shape(fields: ConfigReader) -> LlamaShape:
    if fields.yarn() is not None:
        raise fields.fault("rope_scaling is yarn, not supported with Llama's attention")
    heads = fields.size("num_attention_heads")
    shape = LlamaShape(
        num_heads=heads,
        num_kv_heads=fields.size("num_key_value_heads", default=heads),
        head_dim=fields.size("head_dim", default=max(1, fields.size("hidden_size") // heads)),
        rope_theta=fields.rope_theta(),
    )
    if heads % shape.num_kv_heads:
        raise fields.fault(f"num_key_value_heads = {shape.num_kv_heads} does not divide num_attention_heads = {heads}")
    if shape.head_dim % 2:
        raise fields.fault(f"head_dim = {shape.head_dim} is odd")
    return shape


def _latent_shape(fields: ConfigReader) -> KimiConfig:
    """The target's attention with sizes of its own. No experts: the one layer is dense."""
    rope = fields.size("qk_rope_head_dim")
    if rope % 2:
        raise fields.fault(f"qk_rope_head_dim = {rope} is odd")
    return KimiConfig(
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        moe_intermediate_size=1,
        num_hidden_layers=1,
        num_attention_heads=fields.size("num_attention_heads"),
        kv_lora_rank=fields.size("kv_lora_rank"),
        q_lora_rank=fields.optional_size("q_lora_rank"),
        qk_nope_head_dim=fields.size("qk_nope_head_dim"),
        qk_rope_head_dim=rope,
        v_head_dim=fields.size("v_head_dim"),
        n_routed_experts=1,
        n_shared_experts=0,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        first_k_dense_replace=1,
        max_position_embeddings=fields.size("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        lora_norm_eps=fields.number("lora_norm_eps", default=1e-6),
        rope_theta=fields.rope_theta(),
        rope_interleave=fields.flag("rope_interleave", default=True),
        yarn=fields.yarn(),
        attention_bias=False,
        tie_word_embeddings=False,
    )


def _check(config: EagleConfig, fields: ConfigReader, target: ModelSizes) -> None:
    """That it is a draft for this target."""
    if config.vocab_size != target.vocab_size:
        raise fields.fault(
            f"vocab_size = {config.vocab_size}: a draft for another target; this one's is {target.vocab_size}"
        )
    if config.target_hidden_size != target.hidden_size:
        what = f"target_hidden_size = {config.target_hidden_size}: a draft for another target"
        raise fields.fault(f"{what}; this one's hidden_size is {target.hidden_size}")
    if config.draft_vocab_size > config.vocab_size:
        raise fields.fault(
            f"draft_vocab_size = {config.draft_vocab_size} is more than vocab_size = {config.vocab_size}"
        )
