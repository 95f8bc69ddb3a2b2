"""Multi-token prediction as a draft: the layer behind a target's last one, in the target's own folder.

It reads the target's last hidden state after the final norm, or its own from the row before, after the norm of its
head (as Hugging Face transformers and SGLang give it; vLLM gives it before that norm). With several such layers the
first one guesses all tokens. Its experts lie in order, each once.
Sources: DeepSeek-V3 (arXiv 2412.19437), section 2.2; tensors' names as in its folder on the hub.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from moonshard.kv.pages import Pages
from moonshard.models.experts import moe
from moonshard.models.kimi import forward, weights
from moonshard.models.kimi.config import KimiConfig
from moonshard.models.kimi.weights import Weights
from moonshard.models.machines import XLA, Machine
from moonshard.models.model import Batch
from moonshard.models.product import Stacked, product
from moonshard.models.pytree import pytree
from moonshard.models.spec import KvGroup, Param
from moonshard.sharding.arrays import Array, Float, Int
from moonshard.sharding.shard import ALONE, Shard


@pytree
class MtpWeights[Leaf]:
    embed: Leaf | None  # [v d]; None: the target's
    token_norm: Leaf  # [d]
    hidden_norm: Leaf  # [d]
    join: Leaf  # [d 2d], of token and hidden state, each normed
    layer: Weights[Leaf]
    norm: Leaf  # [d]
    head: Leaf | None  # [v d]; None: the target's


@dataclass(frozen=True, kw_only=True, slots=True)
class Mtp:
    """See `models.draft.Draft` for what its methods promise."""

    config: KimiConfig  # the target's
    has_embed: bool
    has_head: bool
    page_layer: int = 0

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def feature_size(self) -> int:
        return self.config.hidden_size

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def draft_vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def cuts_tokens(self) -> bool:
        return True

    def declare(self) -> MtpWeights[Param]:
        d, place = self.config.hidden_size, self.config.num_hidden_layers
        prefix = prefix_of(self.config)

        def vector(name: str) -> Param:
            return Param(shape=(d,), axes=("embed",), source=lambda: prefix + name, initial=1.0)

        def table(name: str) -> Param:
            shape = (self.config.vocab_size, d)
            return Param(shape=shape, axes=("vocab", "embed"), source=lambda: prefix + name)

        return MtpWeights(
            embed=table(EMBED) if self.has_embed else None,
            token_norm=vector("enorm.weight"),
            hidden_norm=vector("hnorm.weight"),
            join=Param(
                shape=(d, 2 * d), axes=("embed", None), source=lambda: f"{prefix}eh_proj.weight", is_factor=True
            ),
            layer=weights.declare(self.config, range(place, place + 1)),
            norm=vector("shared_head.norm.weight"),
            head=table(HEAD) if self.has_head else None,
        )

    def kv_groups(self, dtype: str) -> tuple[KvGroup, ...]:
        return (KvGroup(name="draft", layers=(0,), num_features=self.config.latent_size, dtype=dtype),)

    def num_page_layers(self, num_features: int) -> int:
        del num_features  # its latents are the target's
        return 1

    def in_layers_of(self, page_layer: int) -> "Mtp":
        return replace(self, page_layer=page_layer)

    def extend(
        self,
        weights: MtpWeights[Array],
        pages: Pages,
        batch: Batch,
        features: Float[Array, "n t d"],
        *,
        shard: Shard = ALONE,
        machine: Machine = XLA,
        backend: moe.Backend = moe.blocks,
    ) -> tuple[Float[Array, "n t d"], Pages]:
        return self.step(weights, pages, batch, features, shard=shard, machine=machine, backend=backend)

    def step(
        self,
        weights: MtpWeights[Array],
        pages: Pages,
        batch: Batch,
        hidden: Float[Array, "n t d"],
        *,
        shard: Shard = ALONE,
        machine: Machine = XLA,
        backend: moe.Backend = moe.blocks,
    ) -> tuple[Float[Array, "n t d"], Pages]:
        """A row reads the row before it as it reads the target."""
        assert weights.embed is not None  # its own, or the target's
        eps, dtype = self.config.rms_norm_eps, weights.norm.dtype
        embedded = forward.look_up(weights.embed, batch.tokens, shard).astype(dtype)
        token = forward.rms_norm(embedded, weights.token_norm, eps)
        state = forward.rms_norm(hidden.astype(dtype), weights.hidden_norm, eps)
        x = product("ntf,df->ntd", jnp.concatenate([token, state], axis=-1), weights.join)
        how = {"shard": shard, "machine": machine, "backend": backend, "page_layer": self.page_layer}
        found, pages, _ = forward.forward(self.config, weights.layer, pages, batch, hidden=x, **how)
        return forward.rms_norm(found, weights.norm, eps), pages

    def logits(
        self,
        weights: MtpWeights[Array],
        hidden: Float[Array, "b d"],
        shard: Shard = ALONE,
        *,
        machine: Machine = XLA,
    ) -> Float[Array, "b v"]:
        head = weights.head
        assert head is not None  # its own, or the target's
        given = Stacked(head[None], jnp.int32(0), machine.kernel_rows) if machine.reads_in_place else head
        return shard.gather(product("bd,vd->bv", hidden, given, accumulate=jnp.float32), "vocab")

    def token_of(self, weights: MtpWeights[Array], guessed: Int[Array, "*b"]) -> Int[Array, "*b"]:
        del weights
        return guessed


EMBED, HEAD = "embed_tokens.weight", "shared_head.head.weight"


def prefix_of(config: KimiConfig) -> str:
    """With which the names of its tensors begin."""
    return f"model.layers.{config.num_hidden_layers}."
