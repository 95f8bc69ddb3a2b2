"""The forward pass of Kimi K2 and DeepSeek-V3: layer, stack, model, read top to bottom.

One pure function, `forward`, serves prompts and decoding over paged latents, of all layers or of a stage's; `unembed`
makes logits of what it returns. Layers of a kind are stacked and scanned; routed experts stay outside the scan.
Einsum alphabet: b batch, n row, t query position, s key position, d embed, h heads, k head_dim, r lora rank, e experts,
f ffw, v vocab.
Sources: DeepSeek-V3 (arXiv 2412.19437), section 2.1; Kimi K2 (arXiv 2507.20534); numerics as in Hugging Face
transformers' DeepseekV3ForCausalLM.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from moonshard.kv.pages import Pages, TokenCut, write_tokens
from moonshard.models.attention import latent_attention, merge_over, partial_attention
from moonshard.models.expanded_attention import expanded_attention, num_queries_to_expand
from moonshard.models.experts import moe
from moonshard.models.experts.copies import to_copies
from moonshard.models.experts.exchange import exchanged
from moonshard.models.kimi import weights as weights_of
from moonshard.models.kimi.config import KimiConfig
from moonshard.models.kimi.rotary import rotary_frequencies, rotate, softmax_scale
from moonshard.models.kimi.weights import Attention, Mlp, Stack, Weights
from moonshard.models.machines import XLA, Machine
from moonshard.models.model import Attend, Batch, ExpandedAttention, Observations, PagedAttention
from moonshard.models.native import attention as native_attention
from moonshard.models.native import expanded_attention as native_expanded
from moonshard.models.product import Stacked, product, widened
from moonshard.sharding.arrays import Array, Bool, Float, Int
from moonshard.sharding.experts import ExpertPlacement
from moonshard.sharding.shard import ALONE, Shard


def rms_norm(x: Float[Array, "*b d"], weight: Float[Array, "d"], eps: float) -> Float[Array, "*b d"]:
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * normal.astype(x.dtype)


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
    attention: PagedAttention = latent_attention,
    machine: Machine = XLA,
) -> tuple[Float[Array, "n t h r"], Pages]:
    """Writes the tokens' latents, then attends over everything written; by `attention` where blocks are whole."""
    tables, positions = batch.block_tables[:, 0], batch.positions  # of the only group
    cut = TokenCut(part=shard.part("kv_tokens"), num_parts=shard.num_parts("kv_tokens"))
    pages = write_tokens(pages, layer, tables, positions, features, cut)
    if cut.num_parts == 1:
        return attention(queries, pages, layer, tables, positions, value_rank=value_rank, scale=scale), pages
    sizes = {"value_rank": value_rank, "keys_per_step": machine.keys}
    whole = shard.gather_heads(queries)
    partial = partial_attention(whole, pages, layer, tables, positions, scale=scale, cut=cut, **sizes)
    return merge_over(shard, partial).astype(queries.dtype), pages


def attend_expanded(
    queries: Float[Array, "n t h k"],
    features: Float[Array, "n t f"],
    pages: Pages,
    layer: Int[Array, ""],
    batch: Batch,
    w: Attention[Any],
    *,
    scale: float,
    attention: ExpandedAttention = expanded_attention,
) -> tuple[Float[Array, "n t h v"], Pages]:
    """Writes the tokens' latents, then attends over the keys and values that everything written stands for.

    By a kernel of `models.native` where the weights are left in their stacks, else by `attention`.
    """
    tables, positions = batch.block_tables[:, 0], batch.positions  # of the only group
    pages = write_tokens(pages, layer, tables, positions, features)
    if isinstance(w.k_up, Stacked):
        where = (pages, layer, tables, positions, w.k_up.stack, w.v_up.stack, w.k_up.layer)
        return native_expanded.expanded_attention(queries, *where, scale=scale), pages
    k_up, v_up = widened(w.k_up, queries.dtype), widened(w.v_up, queries.dtype)  # once, and not for every few keys
    return attention(queries, pages, layer, tables, positions, k_up, v_up, scale=scale), pages


def expands(config: KimiConfig, longest: int, shard: Shard, machine: Machine = XLA) -> bool:
    """Whether a step's keys and values are expanded, with up to `longest` tokens of one sequence in it.

    Operations decide, as the machine does them: either way a key is read from memory about once, and what is expanded
    stays in the caches. With its tokens cut over devices a key meets all heads, whose W_uk and W_uv no device has.
    """
    least = num_queries_to_expand(config.kv_lora_rank, config.qk_nope_head_dim, config.v_head_dim)
    return least is not None and longest >= least * machine.expand_from and shard.num_parts("kv_tokens") == 1


def absorbed(machine: Machine) -> PagedAttention:
    """The kernel, or as XLA has it."""
    if machine.reads_in_place:
        return native_attention.latent_attention
    return functools.partial(latent_attention, keys_per_step=machine.keys)


def expanded_in_xla(machine: Machine) -> ExpandedAttention:
    """`models.expanded_attention` with the machine's sizes."""
    sizes = {"keys_per_step": machine.expanded_keys, "queries_per_step": machine.expanded_queries}
    return functools.partial(expanded_attention, **sizes)


def self_attention(
    config: KimiConfig,
    w: Attention[Any],
    x: Float[Array, "n t d"],
    pages: Pages,
    layer: Int[Array, ""],
    batch: Batch,
    rotary: tuple[Array, Array],
    attend: Attend | None,
    expanded: ExpandedAttention,
    shard: Shard,
) -> tuple[Float[Array, "n t out"], Pages]:
    """Of one layer, over its normed input. `attend` None: `expanded`."""
    cos, sin = rotary
    r, nope = config.kv_lora_rank, config.qk_nope_head_dim
    queries = _queries(config, w, x)
    q_rope = rotate(queries[..., nope:], cos[:, :, None], sin[:, :, None], config.rope_interleave)
    kv = product("ntd,rd->ntr", x, w.kv_a) + (w.kv_a_bias if w.kv_a_bias is not None else 0)
    latent = rms_norm(kv[..., :r], w.kv_a_norm, config.lora_norm_eps)
    k_rope = rotate(kv[..., r:], cos, sin, config.rope_interleave)
    features = jnp.concatenate([latent, k_rope], axis=-1)
    scale = softmax_scale(config)
    if attend is None:
        queries = jnp.concatenate([queries[..., :nope], q_rope], axis=-1)
        with jax.named_scope("pages"):
            given = (queries, features, pages, layer, batch, w)
            values, pages = attend_expanded(*given, scale=scale, attention=expanded)
    else:
        q_latent = product("nthk,hkr->nthr", queries[..., :nope], w.k_up)
        queries = jnp.concatenate([q_latent, q_rope], axis=-1)
        with jax.named_scope("pages"):
            mixed, pages = attend(queries, features, pages, layer, batch, value_rank=r, scale=scale)
        values = product("nthr,hvr->nthv", mixed, w.v_up)
    out = shard.sum(product("nthv,dhv->ntd", values, w.out), shard.axes("heads"))
    return out + (w.out_bias if w.out_bias is not None else 0), pages


def _queries(config: KimiConfig, w: Attention[Array], x: Float[Array, "n t d"]) -> Float[Array, "n t h k"]:
    if w.q_a is not None and w.q_a_norm is not None:
        x = product("ntd,rd->ntr", x, w.q_a) + (w.q_a_bias if w.q_a_bias is not None else 0)
        x = rms_norm(x, w.q_a_norm, config.lora_norm_eps)
    return product("ntr,hkr->nthk", x, w.q_b)


def gated_mlp(w: Mlp[Array], x: Float[Array, "n t d"]) -> Float[Array, "n t d"]:
    return product("ntf,df->ntd", moe.gated(product("ntd,gfd->ntgf", x, w.gate_up)), w.down)


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
    """A dense MLP, or routed plus shared experts. `layer` counts within the stack."""
    x = rms_norm(x, w.mlp_norm, config.rms_norm_eps)
    out = gated_mlp(w.mlp, x) if w.mlp is not None else jnp.zeros_like(x)
    if w.router is None or experts is None:
        return shard.sum(out, shard.axes("ffw")), None
    flat = x.reshape(-1, x.shape[-1])
    with jax.named_scope("router"):
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
    with jax.named_scope("experts"):
        routed = backend(flat, routing, valid.reshape(-1), experts, layer)
    return _add_partial(shard, out, routed.reshape(x.shape)), routing


def _add_partial(shard: Shard, shared: Float[Array, "n t d"], routed: Float[Array, "n t d"]) -> Float[Array, "n t d"]:
    """Adds shared and routed experts, partial sums where `tensor` cuts them: one all-reduce where it cuts both."""
    over_shared = shard.axes("ffw")
    cuts_routed = "tensor" in (*shard.axes("experts"), *shard.axes("expert_ffw"))
    if cuts_routed and over_shared == ("tensor",):
        return shard.sum(shared + routed, over_shared)
    return shard.sum(shared, over_shared) + (shard.sum(routed, ("tensor",)) if cuts_routed else routed)


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
    taps: tuple[int, ...] = (),
    unrolled: bool = False,
    machine: Machine = XLA,
    chunk_tokens: int | None = None,
    attention: PagedAttention | None = None,
    expanded: ExpandedAttention | None = None,
    page_layer: int = 0,
) -> tuple[Float[Array, "n t d"], Pages, Observations | None]:
    """`models.model.Model.forward` of this family: what is cached are the tokens' latents. `page_layer`: the pages'
    layer of the first of these layers.
    """
    valid = batch.positions >= 0
    in_place, longest = machine.reads_in_place, chunk_tokens or batch.positions.shape[1]
    is_absorbed = attention is not None and expanded is None
    if attend is None and (is_absorbed or not expands(config, longest, shard, machine)):
        attention = attention or absorbed(machine)
        attend = functools.partial(attend_paged, shard=shard, attention=attention, machine=machine)
    expanded = expanded or expanded_in_xla(machine)
    backend = exchanged(backend, shard)
    if placement is not None:
        backend = to_copies(backend, placement, shard)
    rotary = cos_and_sin(config, batch.positions)

    def scan_stack(x, pages, tapped, stack: Stack[Array], experts: moe.Experts[Array] | None, first: int):
        def step(carry, inputs):
            x, pages, tapped = carry
            w, index = (weights_of.in_place(stack, inputs, machine.kernel_rows), inputs) if in_place else inputs
            layer = first + index
            tapped = _tap(taps, tapped, layer, x)
            with jax.named_scope("attention"):
                normal = rms_norm(x, w.attention.norm, config.rms_norm_eps)
                where = (pages, page_layer + layer, batch, rotary)
                attended, pages = self_attention(config, w.attention, normal, *where, attend, expanded, shard)
            x = x + attended
            with jax.named_scope("feed_forward"):
                added, routing = _feed_forward(config, w, experts, x, index, valid, backend, shard)
            x = x + added
            return (x, pages, tapped), (x, routing) if observe else (None, None)

        num_layers = stack.mlp_norm.shape[0]
        layers = jnp.arange(num_layers)
        inputs = layers if in_place else (stack, layers)
        carry, (streams, routing) = jax.lax.scan(step, (x, pages, tapped), inputs, unroll=num_layers if unrolled else 1)
        return *carry, streams, routing

    x = _embed(weights, batch.tokens, shard) if hidden is None else hidden
    seen: list[Any] = [x[None]]
    routing, tapped = None, jnp.zeros((len(taps), *x.shape), x.dtype) if taps else None
    if weights.dense is not None:
        x, pages, tapped, streams, _ = scan_stack(x, pages, tapped, weights.dense, None, 0)
        seen.append(streams)
    if weights.sparse is not None:
        num_dense = 0 if weights.dense is None else weights.dense.mlp_norm.shape[0]
        x, pages, tapped, streams, routing = scan_stack(x, pages, tapped, weights.sparse, weights.experts, num_dense)
        seen.append(streams)
    if weights.norm is not None:
        x = rms_norm(x, weights.norm, config.rms_norm_eps)
    if not observe and tapped is None:
        return x, pages, None
    return x, pages, _observations(seen if observe else None, routing, tapped)


def _tap(
    taps: tuple[int, ...], tapped: Float[Array, "taps n t d"] | None, layer: Int[Array, ""], x: Float[Array, "n t d"]
) -> Float[Array, "taps n t d"] | None:
    """Keeps the stream where a tap is at this layer's input."""
    if tapped is None:
        return None
    places = jnp.asarray(taps) == layer
    return tapped.at[jnp.where(places.any(), places.argmax(), len(taps))].set(x, mode="drop")


def _observations(
    hidden: list[Array] | None, routing: moe.Routing | None, tapped: Float[Array, "taps n t d"] | None
) -> Observations:
    return Observations(
        hidden=None if hidden is None else jnp.concatenate(hidden),
        experts=None if routing is None else routing.experts,
        router_margin=None if routing is None else routing.margin,
        tapped=None if tapped is None else jnp.moveaxis(tapped, 0, 2),
    )


def cos_and_sin(
    config: KimiConfig, positions: Int[Array, "n t"]
) -> tuple[Float[Array, "n t r"], Float[Array, "n t r"]]:
    """The cosines and sines by which queries and keys are rotated."""
    frequencies, factor = rotary_frequencies(config)
    angles = positions.astype(jnp.float32)[:, :, None] * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def _computed_dtype(weights: Weights[Array]) -> jnp.dtype:
    """Vectors are held in what is computed in, whatever matrices are held in (`models.weights.load`)."""
    stack = weights.sparse if weights.dense is None else weights.dense
    assert stack is not None  # there is a layer at least
    return stack.mlp_norm.dtype


def _embed(weights: Weights[Array], tokens: Int[Array, "n t"], shard: Shard) -> Float[Array, "n t d"]:
    """The first stage's stream, in what is computed in."""
    assert weights.embed is not None  # of the first stage
    return look_up(weights.embed, tokens, shard).astype(_computed_dtype(weights))


def look_up(table: Float[Array, "v d"], tokens: Int[Array, "n t"], shard: Shard) -> Float[Array, "n t d"]:
    """Each device looks up the tokens whose rows of the table it has, and adds 0 for the others."""
    axes = shard.axes("vocab")
    if not axes:
        return table[tokens]
    own = tokens - shard.part("vocab") * len(table)
    is_own = (own >= 0) & (own < len(table))
    found = table.at[jnp.where(is_own, own, len(table))].get(mode="fill", fill_value=0)
    return shard.sum(found, axes)


def unembed(
    weights: Weights[Array], hidden: Float[Array, "b d"], shard: Shard = ALONE, *, machine: Machine = XLA
) -> Float[Array, "b v"]:
    """Logits in float32."""
    head = weights.embed if weights.head is None else weights.head
    assert head is not None  # of the last stage
    given = Stacked(head[None], jnp.int32(0), machine.kernel_rows) if machine.reads_in_place else head
    with jax.named_scope("head"):
        return shard.gather(product("bd,vd->bv", hidden, given, accumulate=jnp.float32), "vocab")
