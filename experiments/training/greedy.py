"""Greedy answers to many prompts at once, in this process: the forward pass that serves, without the machinery.

Nothing of scheduler, engine or transfer is here, so that what they serve can be held against it. Prompts that begin
alike share their whole blocks of KV: these are computed once, and stay until the pages are full.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from moonshard.experiments.training.greedy_blocks import BLOCK_SIZE, Blocks, Placed, num_blocks_of
from moonshard.kv.pages import Pages, allocate_pages
from moonshard.models import weights
from moonshard.models.experts import moe
from moonshard.models.model import Batch, Model
from moonshard.models.registry import open_model
from moonshard.models.spec import ModelError, matmul_precision, page_layers
from moonshard.serving.engine.loading.model import backend_for
from moonshard.sharding.mesh import build_mesh, replicated
from moonshard.sharding.shape import MeshShape

NUM_ROWS = 16  # of a prefill step, each of up to BLOCK_SIZE queries
NUM_SLOTS = 48  # sequences decoded together

Drawn = tuple[Int[Array, "n"], Pages, Int[Array, "moe_layers e"]]  # of a step: tokens, pages, tokens of each expert
Step = Callable[[Any, Pages, Batch, Int[np.ndarray, "n"]], Drawn]


def build_step(model: Model, backend: moe.Backend, precision: str) -> Step:
    """A jitted `greedy_step`, to which the pages are donated."""

    @partial(jax.jit, donate_argnums=1)
    def step(loaded: Any, pages: Pages, batch: Batch, last: Int[Array, "n"]) -> Drawn:
        with jax.default_matmul_precision(precision):
            return greedy_step(model, backend, loaded, pages, batch, last)

    return step


def greedy_step(
    model: Model,
    backend: moe.Backend,
    loaded: Any,
    pages: Pages,
    batch: Batch,
    last: Int[Array, "n"],
) -> Drawn:
    """The likeliest next token of each row, after the one at `last`."""
    hidden, pages, seen = model.forward(loaded, pages, batch, backend=backend, observe=True)
    tokens = model.unembed(loaded, hidden[jnp.arange(len(last)), last]).argmax(axis=-1)
    loads = jnp.zeros(loads_shape(model), jnp.int32)
    if seen is not None and seen.experts is not None:
        loads = add_choices(loads, seen.experts, batch.positions)
    return tokens, pages, loads


def add_choices(
    loads: Int[Array, "moe_layers e"], experts: Int[Array, "moe_layers tokens k"], positions: Int[Array, "n t"]
) -> Int[Array, "moe_layers e"]:
    """Counts each expert's tokens (n·t of them) without padding, whose position is -1."""
    layers = jnp.arange(len(experts))[:, None, None]
    return loads.at[layers, experts].add((positions.reshape(-1) >= 0)[:, None])


def loads_shape(model: Model) -> tuple[int, int]:
    """(layers with experts, experts)."""
    return model.config.num_moe_layers, model.config.n_routed_experts or 1


class GreedyModel:
    """A loaded model and its pages."""

    def __init__(self, folder: Path, dtype: str, max_context_tokens: int):
        """Raises CheckpointError or ModelError for a folder that cannot be used, also where its context is shorter."""
        checkpoint, model = open_model(folder)
        longest = model.config.max_position_embeddings
        if longest < max_context_tokens:
            raise ModelError(f"{folder}: a context of {longest} tokens; the tasks take {max_context_tokens}")
        mesh = build_mesh(MeshShape())
        params = model.declare()
        weights.check_shapes(params, checkpoint)
        self.fingerprint = checkpoint.fingerprint
        self.num_computed_tokens = 0  # of prompts
        self.expert_loads = np.zeros(loads_shape(model), np.int64)
        self._max_tokens = max_context_tokens
        self._width = num_blocks_of(max_context_tokens)  # of a block table
        self._blocks = Blocks(NUM_SLOTS * self._width)
        self._weights: Any = weights.load(params, checkpoint, dtype, mesh)
        groups = model.kv_groups(dtype)
        self._num_groups = len(groups)
        self._pages = allocate_pages(
            self._num_groups * self._blocks.num_blocks,
            page_layers(groups, range(model.config.num_hidden_layers)),
            BLOCK_SIZE,
            groups[0].num_features,
            dtype=dtype,
            sharding=replicated(mesh),
        )
        backend = backend_for(mesh.devices.flat[0].platform)
        self._step = build_step(model, backend, matmul_precision(dtype))

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stops: Collection[int]
    ) -> list[tuple[int, ...]]:
        """Each prompt's continuation up to a stop token (not included), or `max_tokens`.

        ModelError for a prompt that leaves no room for so many.
        """
        for prompt in prompts:
            if not prompt or len(prompt) + max_tokens > self._max_tokens:
                raise ModelError(
                    f"a prompt of {len(prompt)} tokens, and {max_tokens} to follow it: at most {self._max_tokens}"
                )
        found: list[tuple[int, ...]] = []
        for first in range(0, len(prompts), NUM_SLOTS):
            found += self._together(prompts[first : first + NUM_SLOTS], max_tokens, frozenset(stops))
        return found

    @property
    def router_bias(self) -> np.ndarray:
        """[layers with experts, experts]. ModelError where there is no router."""
        return np.asarray(self._sparse_and_router()[1].bias)

    @router_bias.setter
    def router_bias(self, bias: np.ndarray) -> None:
        """Forgets all KV that was computed with the bias before. `fingerprint` stays that of the folder."""
        sparse, router = self._sparse_and_router()
        put = jax.device_put(bias.astype(router.bias.dtype), router.bias.sharding)
        self._weights = replace(self._weights, sparse=replace(sparse, router=replace(router, bias=put)))
        self._blocks.forget()

    def _sparse_and_router(self) -> tuple[Any, Any]:
        sparse = self._weights.sparse
        if sparse is None or sparse.router is None:
            raise ModelError("no layer has routed experts")
        return sparse, sparse.router

    def _together(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stops: frozenset[int]
    ) -> list[tuple[int, ...]]:
        if len(self._blocks.free) < sum(num_blocks_of(len(prompt) + max_tokens) for prompt in prompts):
            self._blocks.forget()
        placed = [self._blocks.place(prompt, len(prompt) + max_tokens) for prompt in prompts]
        first = self._prefill(placed)
        answers = self._decode(placed, first, max_tokens, stops)
        for sequence in placed:
            self._blocks.release(sequence)
        return answers

    def _prefill(self, placed: Sequence[Placed]) -> list[int]:
        """Computes the parts of the prompts that are not cached, in order; returns each answer's first token."""
        rows = [
            (number, start)
            for number, sequence in enumerate(placed)
            for start in range(sequence.num_known * BLOCK_SIZE, len(sequence.tokens), BLOCK_SIZE)
        ]
        first = [0] * len(placed)
        for begin in range(0, len(rows), NUM_ROWS):
            some = rows[begin : begin + NUM_ROWS]
            tokens, positions, tables = self._blank(NUM_ROWS, BLOCK_SIZE)
            last = np.zeros(NUM_ROWS, np.int32)
            for row, (number, start) in enumerate(some):
                part = placed[number].tokens[start : start + BLOCK_SIZE]
                tokens[row, : len(part)] = part
                positions[row, : len(part)] = np.arange(start, start + len(part))
                tables[row, : len(placed[number].blocks)] = placed[number].blocks
                last[row] = len(part) - 1
                self.num_computed_tokens += len(part)
            drawn = self._launch(tokens, positions, tables, last)
            for row, (number, _) in enumerate(some):
                first[number] = int(drawn[row])  # of a prompt's several rows the last one stays
        return first

    def _decode(
        self, placed: Sequence[Placed], first: Sequence[int], max_tokens: int, stops: frozenset[int]
    ) -> list[tuple[int, ...]]:
        answers: list[list[int]] = [[] for _ in placed]
        drawn = {number: token for number, token in enumerate(first) if token not in stops}
        while drawn:
            tokens, positions, tables = self._blank(NUM_SLOTS, 1)
            for number, token in drawn.items():
                answers[number].append(token)
                if len(answers[number]) < max_tokens:
                    tokens[number] = token
                    positions[number] = len(placed[number].tokens) + len(answers[number]) - 1
                    tables[number, : len(placed[number].blocks)] = placed[number].blocks
            running = [number for number in drawn if positions[number] >= 0]
            following = self._launch(tokens, positions, tables, np.zeros(NUM_SLOTS, np.int32)) if running else ()
            drawn = {number: int(following[number]) for number in running if following[number] not in stops}
        return [tuple(answer) for answer in answers]

    def _blank(self, num_rows: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, positions and block tables that are all padding."""
        shape = (num_rows, num_tokens)
        return np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.zeros((num_rows, self._width), np.int32)

    def _launch(self, tokens: np.ndarray, positions: np.ndarray, tables: np.ndarray, last: np.ndarray) -> np.ndarray:
        first = np.arange(self._num_groups, dtype=np.int32)[:, None] * self._blocks.num_blocks  # of each KV group
        of_groups = tables[:, None] + first
        batch = Batch(tokens=jnp.asarray(tokens), positions=jnp.asarray(positions), block_tables=jnp.asarray(of_groups))
        drawn, self._pages, loads = self._step(self._weights, self._pages, batch, last)
        self.expert_loads += np.asarray(loads)
        return np.asarray(drawn)
