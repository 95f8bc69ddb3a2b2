"""What a decode engine sees of a draft model: weights and KV of its own, and tokens guessed from the target's features.

Row alignment, of every draft: the row of position t reads the target's feature of position t and the token at t + 1, is
cached and rotated as position t, and its hidden state says the token at t + 2. So a draft's KV of position t depends on
the token at t + 1: a prefix of tokens vouches for all of a draft's rows but its last.

After a target's step, whose last token is drawn, `extend` runs over the positions that were accepted, with the tokens
that follow them, and writes their KV from the target's own features. `chain` then guesses on from the last of these
rows: its further rows read the draft's own hidden states instead, and the next `extend` overwrites them. A draft's
KV lies in layers of its own of the target's pages, under the target's block tables: what copies, moves or keeps a block
has both.

Guesses are greedy: the law that they were drawn from is one-hot. Which are accepted is the engine's business.
Sources: EAGLE-3 (arXiv 2503.01840), section 3; DeepSeek-V3 (arXiv 2412.19437), section 2.2.
"""

from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from moonshard.kv.pages import Pages
from moonshard.models.experts import moe
from moonshard.models.machines import XLA, Machine
from moonshard.models.model import Batch, Observations
from moonshard.models.spec import KvGroup
from moonshard.sharding.arrays import Array, Float, Int
from moonshard.sharding.shard import ALONE, Shard


@runtime_checkable
class Tables(Protocol):
    """A target's weights, as far as a draft may share them. `head` None: tied to `embed`."""

    @property
    def embed(self) -> Any: ...
    @property
    def head(self) -> Any: ...


@runtime_checkable
class Draft(Protocol):
    """A draft model as a value; hashable, as it stands in the keys of programs."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target at whose input features are taken; none: its last hidden state, after the final norm."""
        ...

    @property
    def feature_size(self) -> int:
        """Values of the target that a row reads."""
        ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that it can guess."""
        ...

    @property
    def cuts_tokens(self) -> bool:
        """Whether its KV may be in blocks whose tokens are cut over devices."""
        ...

    def declare(self) -> Any:
        """A tree of `Param` with `embed` and `head`; these are None where the target's are borrowed: see `lend`."""
        ...

    def kv_groups(self, dtype: str) -> tuple[KvGroup, ...]:
        """One group, of one layer. Its number of features may be another than the target's."""
        ...

    def num_page_layers(self, num_features: int) -> int:
        """How many layers its KV takes in pages whose tokens have so many features a layer.

        ModelError where it cannot lie there.
        """
        ...

    def in_layers_of(self, page_layer: int) -> "Draft":
        """The same draft, whose KV begins in that layer of the pages."""
        ...

    def extend(
        self,
        weights: Any,
        pages: Pages,
        batch: Batch,
        features: Float[Array, "n t f"],
        *,
        shard: Shard = ALONE,
        machine: Machine = XLA,
        backend: moe.Backend = moe.blocks,
    ) -> tuple[Float[Array, "n t d"], Pages]:
        """Rows that read the target.

        Args:
            weights: with all tables, see `lend`.
            batch: of position t the token at t + 1. Block tables of one group; positions below 0 are padding.
            features: the target's at these positions, see `features_of`.

        Returns:
            Each row's hidden state, and the pages with the rows' KV.
        """
        ...

    def step(
        self,
        weights: Any,
        pages: Pages,
        batch: Batch,
        hidden: Float[Array, "n t d"],
        *,
        shard: Shard = ALONE,
        machine: Machine = XLA,
        backend: moe.Backend = moe.blocks,
    ) -> tuple[Float[Array, "n t d"], Pages]:
        """As `extend`, of rows that read the hidden state of the row before them instead of the target."""
        ...

    def logits(
        self, weights: Any, hidden: Float[Array, "b d"], shard: Shard = ALONE, *, machine: Machine = XLA
    ) -> Float[Array, "b v"]:
        """Of the draft's own vocabulary, in float32."""
        ...

    def token_of(self, weights: Any, guessed: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """The target's tokens that are guessed by these numbers of the draft's vocabulary."""
        ...


def lend(weights: Any, target: Tables) -> Any:
    """A draft's weights with the target's tables, the same arrays, where there are none of its own."""
    own_head = weights.head if weights.head is not None else target.head
    return replace(
        weights,
        embed=weights.embed if weights.embed is not None else target.embed,
        head=own_head if own_head is not None else target.embed,
    )


def features_of(draft: Draft, hidden: Float[Array, "n t d"], seen: Observations | None) -> Float[Array, "n t f"]:
    """What a draft reads of a target's forward pass, from what `Model.forward` returned with `taps=draft.taps`.

    The lowest tap comes first.
    """
    if not draft.taps:
        return hidden
    assert seen is not None  # as the taps asked
    assert seen.tapped is not None
    return seen.tapped.reshape(*seen.tapped.shape[:2], -1)


def best_guess(
    draft: Draft, weights: Any, hidden: Float[Array, "b d"], shard: Shard = ALONE, machine: Machine = XLA
) -> Int[Array, "b"]:
    """The likeliest token after each row, of the target's vocabulary."""
    guessed = draft.logits(weights, hidden, shard, machine=machine).argmax(axis=-1).astype(jnp.int32)
    return draft.token_of(weights, guessed)


def chain(
    draft: Draft,
    weights: Any,
    pages: Pages,
    block_tables: Int[Array, "n one m"],
    positions: Int[Array, "n"],
    hidden: Float[Array, "n d"],
    num_tokens: int,
    *,
    num_wanted: Int[Array, ""] | None = None,
    room: Int[Array, "n"] | None = None,
    shard: Shard = ALONE,
    machine: Machine = XLA,
    backend: moe.Backend = moe.blocks,
) -> tuple[Int[Array, "n k"], Pages]:
    """Guesses `num_tokens` tokens on from one row of each sequence, each from the guesses before it.

    Args:
        positions: of the last row that `extend` ran; below 0: a sequence that is padding.
        hidden: of that row.
        num_wanted: guesses beyond these cost nothing, and are 0; None: all are wanted.
        room: tokens of each sequence for which its table has blocks; None: as many as the table has columns for.

    Returns:
        The guesses for positions + 2 and so on, of the target's vocabulary; what padding guesses means nothing, nor
        what is guessed from a position without room. The pages have KV of positions + 1 and so on, one less than there
        are guesses, as far as there is room.
    """
    if room is None:
        room = jnp.full_like(positions, block_tables.shape[-1] * pages.shape[2] * shard.num_parts("kv_tokens"))
    wanted = jnp.int32(num_tokens) if num_wanted is None else jnp.minimum(num_wanted, num_tokens)

    def further(ahead: Int[Array, ""], carry: tuple[Array, Array, Array, Pages]) -> tuple[Array, Array, Array, Pages]:
        found, token, hidden, pages = carry
        own = positions + ahead
        own = jnp.where((positions >= 0) & (own < room), own, -1)
        batch = Batch(tokens=token[:, None], positions=own[:, None], block_tables=block_tables)
        how = {"shard": shard, "machine": machine, "backend": backend}
        after, pages = draft.step(weights, pages, batch, hidden[:, None], **how)
        token = best_guess(draft, weights, after[:, 0], shard, machine)
        return found.at[ahead].set(token), token, after[:, 0], pages

    first = jax.lax.cond(
        wanted > 0, lambda: best_guess(draft, weights, hidden, shard, machine), lambda: jnp.zeros_like(positions)
    )
    found = jnp.zeros((num_tokens, len(positions)), jnp.int32).at[0].set(first)
    found, _, _, pages = jax.lax.fori_loop(1, wanted, further, (found, first, hidden, pages))
    return found.T, pages
