"""Logits of one prompt, position by position: the tool for numerics questions.

It runs the forward pass that serves, on pages of its own and without the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from moonshard.kv.pages import Pages, allocate_pages
from moonshard.models import weights
from moonshard.models.experts import moe
from moonshard.models.model import Batch
from moonshard.models.registry import open_model
from moonshard.models.spec import ModelError, matmul_precision, page_layers
from moonshard.sharding.mesh import build_mesh, replicated
from moonshard.sharding.shape import MeshShape

ROW_TOKENS = 64  # queries per row
BLOCK_SIZE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """What a forward pass over one prompt of T tokens saw, in float32."""

    logits: np.ndarray  # [T, vocab]
    hidden: np.ndarray  # [layers + 1, T, embed]: embeddings, then the residual stream after each layer
    experts: np.ndarray | None  # [moe layers, T, k], unsorted
    router_margin: np.ndarray | None  # [moe layers, T]


def score(folder: Path, tokens: Sequence[int], dtype: str = "float32") -> np.ndarray:
    """Logits [T, vocab] in float32 of a prompt, computed in `dtype`.

    Raises:
        ModelError: a token outside the vocabulary, or an empty prompt. CheckpointError for a bad folder.
    """
    return observe(folder, tokens, dtype).logits


def observe(folder: Path, tokens: Sequence[int], dtype: str = "float32", backend: moe.Backend = moe.blocks) -> Scored:
    """As `score`, with the residual stream after every layer and the chosen experts."""
    return Scorer(folder, dtype, backend).observe(tokens)


class Scorer:
    """A checkpoint's weights on one device, for any number of prompts.

    Compiles once for each number of rows that prompts take. Raises CheckpointError or ModelError for a bad folder.
    """

    def __init__(self, folder: Path, dtype: str = "float32", backend: moe.Backend = moe.blocks):
        checkpoint, model = open_model(folder)
        self.config = model.config
        self._groups = model.kv_groups(dtype)
        self.fingerprint = checkpoint.fingerprint
        self._dtype = dtype
        self._mesh = build_mesh(MeshShape())
        self._weights = weights.load(model.declare(), checkpoint, dtype, self._mesh)
        config, precision = self.config, matmul_precision(dtype)

        @jax.jit
        def run(loaded, pages, batch):
            with jax.default_matmul_precision(precision):
                how = {"backend": backend, "observe": True, "chunk_tokens": batch.tokens.size}
                hidden, _, seen = model.forward(loaded, pages, batch, **how)
                return model.unembed(loaded, hidden.reshape(-1, config.hidden_size)), seen

        self._run = run

    def observe(self, tokens: Sequence[int]) -> Scored:
        """What the model makes of a prompt. ModelError for a token outside the vocabulary, or an empty prompt."""
        _check_tokens(tokens, self.config.vocab_size)
        batch, count = _rows(tokens, len(self._groups)), len(tokens)
        logits, seen = self._run(self._weights, self._pages(batch), batch)
        assert seen.hidden is not None  # as asked
        layers = seen.hidden.shape[0]
        return Scored(
            logits=np.asarray(logits)[:count],
            hidden=np.asarray(seen.hidden, np.float32).reshape(layers, -1, self.config.hidden_size)[:, :count],
            experts=None if seen.experts is None else np.asarray(seen.experts)[:, :count],
            router_margin=None if seen.router_margin is None else np.asarray(seen.router_margin)[:, :count],
        )

    def _pages(self, batch: Batch) -> Pages:
        _, num_groups, num_columns = batch.block_tables.shape
        return allocate_pages(
            num_groups * num_columns,
            page_layers(self._groups, range(self.config.num_hidden_layers)),
            BLOCK_SIZE,
            self._groups[0].num_features,
            dtype=self._dtype,
            sharding=replicated(self._mesh),
        )


def _check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    if not tokens:
        raise ModelError("tokens: the prompt is empty")
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ModelError(f"tokens: {token} is outside the vocabulary of {vocab_size}")


def _rows(tokens: Sequence[int], num_groups: int) -> Batch:
    """One prompt as rows of `ROW_TOKENS` queries over one run of blocks, as long for each KV group."""
    num_rows = -(-len(tokens) // ROW_TOKENS)
    padded = np.zeros(num_rows * ROW_TOKENS, np.int32)
    padded[: len(tokens)] = tokens
    positions = np.where(np.arange(len(padded)) < len(tokens), np.arange(len(padded)), -1).astype(np.int32)
    blocks = np.arange(num_groups * -(-len(padded) // BLOCK_SIZE), dtype=np.int32).reshape(1, num_groups, -1)
    return Batch(
        tokens=jnp.asarray(padded.reshape(num_rows, -1)),
        positions=jnp.asarray(positions.reshape(num_rows, -1)),
        block_tables=jnp.asarray(np.tile(blocks, (num_rows, 1, 1))),
    )
