"""The configuration of Kimi K2 and DeepSeek-V3, as config.json has it; every fault names its field.

Kimi K2.5 is K2 with a tower that sees: what is served of it is its text part. Which number formats are served,
`models.folder.quantization` knows.
Sources: DeepSeek-V3 (arXiv 2412.19437), section 2.1; Kimi K2 (arXiv 2507.20534); names as in Hugging Face transformers'
DeepseekV3Config.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moonshard.models.folder.config_reader import MAX_EXPERTS, ConfigReader, Yarn
from moonshard.models.folder.text_part import TEXT_CONFIG
from moonshard.models.spec import KvGroup

PLAIN_TYPES = ("deepseek_v3", "kimi_k2")  # config.json's model_type
WRAPPED_TYPES = ("kimi_k25",)  # of which the text part is one of the plain ones
MODEL_TYPES = (*PLAIN_TYPES, *WRAPPED_TYPES)


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
        layers = tuple(range(self.num_hidden_layers))
        return (KvGroup(name="latent", layers=layers, num_features=self.latent_size, dtype=dtype),)

    @classmethod
    def from_hugging_face(cls, raw: Mapping[str, Any]) -> "KimiConfig":
        """Reads config.json, in the spelling of transformers 4 or 5, or what of it describes the text part.

        Raises:
            ModelError: `config.json: ` and the field that is missing, ill-typed or unsupported.
        """
        fields = ConfigReader(raw)
        fields.require("model_type", set(MODEL_TYPES))
        if raw["model_type"] in WRAPPED_TYPES:
            fields = fields.inside(TEXT_CONFIG)
            fields.require("model_type", set(PLAIN_TYPES))
        fields.require("hidden_act", {"silu"}, default="silu")
        fields.require("scoring_func", {"sigmoid"}, default="sigmoid")
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
        _check(config, fields)
        return config


def _check(config: KimiConfig, fields: ConfigReader) -> None:
    def demand(holds: bool, field: str, why: str) -> None:
        if not holds:
            raise fields.fault(f"{field} {why}")

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
