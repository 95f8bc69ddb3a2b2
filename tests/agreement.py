"""The one statement of what "the same tokens" means, used wherever two paths are compared.

Float sums differ by 1e-6 with the shape of a batch, so a token may differ where two candidates all but tie. In f32,
every token is the reference's own choice after the tokens before it (the comparison is teacher-forced throughout), or
falls short of that choice by less than `NEAR_TIE`. The reference is the plain forward pass over the whole sequence,
which other tests hold against Hugging Face transformers.
"""

import functools
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from llguidance import LLMatcher

from moonshard.kv.pages import allocate_pages
from moonshard.models import weights
from moonshard.models.experts import moe
from moonshard.models.kimi.family import Kimi
from moonshard.models.model import Batch
from moonshard.models.registry import open_model
from moonshard.serving.control.sampling_parameters import Sampling
from moonshard.sharding.mesh import build_mesh, replicated
from moonshard.sharding.shape import MeshShape

FIXTURES = Path(__file__).parent / "fixtures"
NEAR_TIE = 1e-3  # of logits, or of noisy logits when sampling
ROUTER_NEAR_TIE = 1e-4  # of the scores that choose experts: a flip was seen at 6e-8
LOGIT_TOLERANCE = 2e-4
ROW = 64
ROWS = (4, 32, 64, 128)  # few shapes, few compilations: one takes as long as thirty passes over the padding


class Reference:
    """Logits of whole sequences under one checkpoint, in float32, every expert computed."""

    def __init__(self, folder: Path):
        checkpoint, model = open_model(folder)
        assert isinstance(model, Kimi)
        self.model, self.config = model, model.config
        self._mesh = build_mesh(MeshShape())
        self.weights = weights.load(self.model.declare(), checkpoint, "float32", self._mesh)
        self._run = jax.jit(self._forward)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """[T, vocab]"""
        return self.observe(tokens)[0]

    def observe(self, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Logits [T, vocab], and each position's least router margin over the layers [T]."""
        rows = next(rows for rows in ROWS if rows * ROW >= len(tokens))
        padded = np.zeros(rows * ROW, np.int32)
        padded[: len(tokens)] = tokens
        positions = np.where(np.arange(len(padded)) < len(tokens), np.arange(len(padded)), -1).astype(np.int32)
        batch = Batch(
            tokens=jnp.asarray(padded.reshape(rows, ROW)),
            positions=jnp.asarray(positions.reshape(rows, ROW)),
            block_tables=jnp.asarray(np.tile(np.arange(rows, dtype=np.int32), (rows, 1, 1))),
        )
        (group,) = self.model.kv_groups("float32")
        pages = allocate_pages(
            rows,
            group.num_layers,
            ROW,
            group.num_features,
            dtype="float32",
            sharding=replicated(self._mesh),
        )
        logits, margin = self._run(self.weights, pages, batch)
        return np.asarray(logits)[: len(tokens)], np.asarray(margin)[: len(tokens)]

    def _forward(self, loaded, pages, batch):
        with jax.default_matmul_precision("highest"):
            hidden, _, seen = self.model.forward(loaded, pages, batch, backend=moe.dense, observe=True)
            assert seen is not None
            assert seen.router_margin is not None
            return self.model.unembed(loaded, hidden.reshape(-1, self.config.hidden_size)), seen.router_margin.min(
                axis=0
            )


@cache
def reference(name: str = "kimi_k2") -> Reference:
    return Reference(FIXTURES / name)


def assert_drawn_from(
    model: Reference,
    prompt: Sequence[int],
    completion: Sequence[int],
    sampling: Sampling,
    choice: int = 0,
    *,
    stop_token_ids: Collection[int] = (),
    min_tokens: int = 0,
    allowed: np.ndarray | None = None,
) -> bool:
    """Every token is the one that the reference draws after the tokens before it, or all but ties with that one.

    `allowed`: [tokens of the completion, vocab], which may be drawn there; None: any.

    A token may be another only after a router's near tie: then one path took another expert, and the rest of the
    sequence cannot be compared. Says whether that happened; tests with many sequences bound how often.
    Cuts are not looked at: they have tests of their own.
    """
    logits, margin = model.observe([*prompt, *completion])
    scores = adjusted(logits[len(prompt) - 1 : -1], prompt, completion, sampling)
    scores[:min_tokens, list(stop_token_ids)] = -np.inf
    if allowed is not None:
        scores[~allowed] = -np.inf
    if sampling.temperature > 0:
        scores = scores / sampling.temperature + noise(
            sampling.seed, choice, range(len(prompt), len(prompt) + len(completion)), scores.shape[1]
        )
    chosen = scores[np.arange(len(completion)), completion]
    short = scores.max(axis=1) - chosen
    if (short < NEAR_TIE).all():
        return False
    first = int((short >= NEAR_TIE).argmax())
    least = margin[: len(prompt) + first].min()
    assert least < ROUTER_NEAR_TIE, f"token {first} falls short by {short[first]:.4f}, least router margin {least:.1e}"
    return True


def allowed_by(matcher: LLMatcher, tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    """[tokens, vocab]: what a grammar lets through at each position, by a matcher that follows them one after another.

    Asserts that it lets these through.
    """
    found = list[np.ndarray]()
    for token in tokens:
        words = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        found.append(np.unpackbits(words, bitorder="little")[:vocab_size] == 1)
        assert matcher.consume_token(token), f"{token} after {tokens}"
    return np.stack(found)


def assert_same_tokens(
    model: Reference, prompt: Sequence[int], expected: Sequence[int], actual: Sequence[int], sampling: Sampling
) -> None:
    """Two completions of one prompt agree up to a near tie, and each is the reference's own after it."""
    assert len(expected) == len(actual)
    if list(expected) != list(actual):
        assert_drawn_from(model, prompt, expected, sampling)
        assert_drawn_from(model, prompt, actual, sampling)


def adjusted(logits: np.ndarray, prompt: Sequence[int], completion: Sequence[int], sampling: Sampling) -> np.ndarray:
    """A copy after penalties and bias: each position's by the tokens that stand before it."""
    scores = logits + 0.0
    counts = np.zeros(logits.shape[1], np.int32)
    is_prompt = np.isin(np.arange(logits.shape[1]), prompt)
    for row, token in zip(scores, completion, strict=True):
        repeated = np.where(row > 0, row / sampling.repetition_penalty, row * sampling.repetition_penalty)
        row[:] = np.where(is_prompt | (counts > 0), repeated, row)
        row -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
        counts[token] += 1
    for token, value in sampling.logit_bias.items():
        scores[:, token] += value
    return scores


def noise(seed: int, choice: int, positions: Sequence[int], vocab_size: int) -> np.ndarray:
    """The Gumbel noise of each absolute position, [positions, vocab]: keyed by seed, choice and position alone."""
    words = np.asarray([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
    return np.stack([np.asarray(_gumbel(words, choice, position, vocab_size)) for position in positions])


@functools.partial(jax.jit, static_argnames="vocab_size")
def _gumbel(words: jax.Array, choice: int, position: int, vocab_size: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), choice)
    return jax.random.gumbel(jax.random.fold_in(key, position), (vocab_size,))
