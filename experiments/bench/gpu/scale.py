"""How large everything of the GPU bench is: for a card, for a card in a hurry, and for a trial on a CPU."""

from dataclasses import dataclass, replace

from moonshard.experiments.bench.gpu.checks import MoeCase
from moonshard.experiments.bench.gpu.serving.mix import ServingPlan
from moonshard.experiments.bench.gpu.serving.rows import full_plan, quicker, tiny_plan
from moonshard.experiments.bench.gpu.slice import SliceSizes, kimi_k2_slice, smaller
from moonshard.experiments.bench.gpu.timing import Effort


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How large everything is, for a card or for a trial on a CPU."""

    sizes: SliceSizes
    cases: tuple[MoeCase, ...]
    effort: Effort
    copy_bytes: int
    matmul_side: int
    serving: ServingPlan  # of engines


def full_scale(num_moe_layers: int) -> Scale:
    """The sizes for a card: 34 GB of experts for each MoE layer, and 6 GB of everything else."""
    return Scale(
        sizes=SliceSizes(
            model=kimi_k2_slice(num_moe_layers),
            block_size=64,
            q_tile=32,
            prompt_tokens=2048,
            batches=(1, 16, 64, 128),
            context_tokens=(1024, 4096),
        ),
        cases=(
            MoeCase(num_tokens=1, top_k=8, num_experts=64, embed=1024, ffw=512),
            MoeCase(num_tokens=17, top_k=8, num_experts=16, embed=7168, ffw=2048),
            MoeCase(num_tokens=500, top_k=8, num_experts=64, embed=1024, ffw=512),
            MoeCase(num_tokens=1000, top_k=4, num_experts=16, embed=1024, ffw=512),
        ),
        effort=Effort(num_samples=20, calls_per_sample=4),
        copy_bytes=8 << 30,
        matmul_side=8192,
        serving=full_plan(),
    )


def trial_scale(num_moe_layers: int) -> Scale:
    """The sizes for a trial: a few kilobytes of everything, which show that the command works, and no speed."""
    model = kimi_k2_slice(
        num_moe_layers,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_attention_heads=2,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
    )
    return Scale(
        sizes=SliceSizes(
            model=model, block_size=16, q_tile=16, prompt_tokens=32, batches=(1, 2), context_tokens=(16, 40)
        ),
        cases=(MoeCase(num_tokens=5, top_k=2, num_experts=4, embed=32, ffw=32),),
        effort=Effort(num_samples=2, calls_per_sample=1),
        copy_bytes=1 << 16,
        matmul_side=64,
        serving=tiny_plan(),
    )


def quick(scale: Scale) -> Scale:
    """The same layers with fewer checks, batches, contexts and arms."""
    return replace(scale, sizes=smaller(scale.sizes), cases=scale.cases[:1], serving=quicker(scale.serving))
