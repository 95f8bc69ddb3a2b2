"""Drafts in tests: a target with its draft, loaded in float32, and rows over shuffled blocks."""

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from moonshard.models import weights
from moonshard.models.draft import Draft, chain, lend
from moonshard.models.eagle.taps import TapIds
from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.folder.writing import write_checkpoint
from moonshard.models.model import Batch, Observations
from moonshard.models.registry import open_draft, open_model
from moonshard.sharding.mesh import build_mesh
from moonshard.sharding.shape import MeshShape
from tests.agreement import FIXTURES, reference

NUM_BLOCKS, BLOCK_SIZE, NUM_COLUMNS = 40, 8, 20


@cache
def recorded(name: str, file: str) -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURES / name / file))


class Drafting:
    """One sequence at a time; blocks that are not its own hold noise."""

    def __init__(self, draft: Draft, loaded, seed: int = 0):
        self.draft, self.loaded = draft, loaded
        random = np.random.default_rng(seed)
        (group,) = draft.kv_groups("float32")
        shape = (NUM_BLOCKS, group.num_layers, BLOCK_SIZE, group.num_features)
        self.pages = jnp.asarray(random.normal(size=shape).astype(np.float32))
        self.table = random.permutation(NUM_BLOCKS)[:NUM_COLUMNS].astype(np.int32)
        self._random = random

    def extend(self, tokens: np.ndarray, features: np.ndarray, start: int = 0, shape=None) -> np.ndarray:
        """Hidden states [tokens, d] of rows from position `start` on, in rows of that shape, the rest padding."""
        batch, fed = self._batch(tokens, features, start, shape)
        hidden, self.pages = run_extend(self.draft, self.loaded, self.pages, batch, fed)
        return np.asarray(hidden).reshape(-1, hidden.shape[-1])[: len(tokens)]

    def step(self, token: int, hidden: np.ndarray, position: int) -> np.ndarray:
        batch, fed = self._batch(np.array([token]), hidden[None], position, None)
        found, self.pages = run_step(self.draft, self.loaded, self.pages, batch, fed)
        return np.asarray(found)[0, 0]

    def chain(self, hidden: np.ndarray, position: int, num_tokens: int) -> np.ndarray:
        """Of a sequence beside another one that is padding."""
        tables = np.stack([self.table, self.table])[:, None]
        positions = jnp.asarray([-1, position], jnp.int32)
        tokens, self.pages = run_chain(
            self.draft, self.loaded, self.pages, tables, positions, jnp.stack([hidden + 1, hidden]), num_tokens
        )
        return np.asarray(tokens)[1]

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        with jax.default_matmul_precision("highest"):
            return np.asarray(self.draft.logits(self.loaded, jnp.atleast_2d(hidden)))

    def _batch(self, tokens, features, start, shape) -> tuple[Batch, jax.Array]:
        rows, columns = shape or (1, len(tokens))
        size, count = rows * columns, len(tokens)
        padded, positions = self._random.integers(0, 2048, size), np.full(size, -1)
        padded[:count], positions[:count] = tokens, start + np.arange(count)
        fed = self._random.normal(size=(size, features.shape[-1])).astype(np.float32)
        fed[:count] = features
        own = [jnp.asarray(each.reshape(rows, columns).astype(np.int32)) for each in (padded, positions)]
        tables = jnp.asarray(np.tile(self.table, (rows, 1, 1)))
        return Batch(tokens=own[0], positions=own[1], block_tables=tables), jnp.asarray(fed.reshape(rows, columns, -1))


def _run(call, static):
    def run(draft, *given):
        with jax.default_matmul_precision("highest"):
            return call(draft, *given)

    return jax.jit(run, static_argnums=static)


run_extend = _run(lambda draft, *given: draft.extend(*given), (0,))
run_step = _run(lambda draft, *given: draft.step(*given), (0,))
run_chain = _run(chain, (0, 6))


def loaded_draft(folder: Path | None, target: str | Path = "kimi_k2", ids: TapIds = "output") -> Drafting:
    checkpoint, model = open_model(FIXTURES / target)
    tensors, draft = open_draft(folder, model, checkpoint, ids)
    own = weights.load(draft.declare(), tensors, "float32", build_mesh(MeshShape()))
    return Drafting(draft, lend(own, reference().weights))


def with_taps(folder: Path, ids: list[int]) -> Path:
    shutil.copytree(FIXTURES / "kimi_k2_eagle3", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": ids}))
    return folder


def with_mtp(folder: Path) -> Path:
    """The tiny target with a layer for multi-token prediction, which is its last one but for four tensors."""
    if folder.exists():
        return folder
    target, extra = Checkpoint.open(FIXTURES / "kimi_k2"), Checkpoint.open(FIXTURES / "kimi_k2_mtp")
    tensors = {name: target.tensor(name) for name in target.names}
    last, behind = "model.layers.3.", "model.layers.4."
    tensors |= {name.replace(last, behind): target.tensor(name) for name in target.names if name.startswith(last)}
    tensors |= {name: extra.tensor(name) for name in extra.names}
    write_checkpoint(folder, extra.config, tensors)
    return folder


@cache
def target_features(tokens: tuple[int, ...], taps: tuple[int, ...]) -> np.ndarray:
    """[t, f]: what the target's forward pass gives a draft."""
    model, count = reference().model, len(tokens)
    num_blocks = -(-count // BLOCK_SIZE)
    (group,) = model.kv_groups("float32")
    pages = jnp.zeros((num_blocks, group.num_layers, BLOCK_SIZE, group.num_features), jnp.float32)
    batch = Batch(
        tokens=jnp.asarray([tokens], jnp.int32),
        positions=jnp.arange(count, dtype=jnp.int32)[None],
        block_tables=jnp.arange(num_blocks, dtype=jnp.int32)[None, None],
    )

    @jax.jit
    def run(loaded, pages, batch):
        with jax.default_matmul_precision("highest"):
            hidden, _, seen = model.forward(loaded, pages, batch, taps=taps)
            return read(taps, hidden, seen)

    return np.asarray(run(reference().weights, pages, batch))[0]


def read(taps: tuple[int, ...], hidden: jax.Array, seen: Observations | None) -> jax.Array:
    if not taps:
        return hidden
    assert seen is not None
    assert seen.tapped is not None
    return seen.tapped.reshape(*hidden.shape[:2], -1)


def shifted(tokens: Sequence[int], first: int) -> np.ndarray:
    """Each token's successor; the last one's is the first that the target drew."""
    return np.array([*tokens[1:], first], np.int32)
