"""The forward pass against Hugging Face transformers' recorded logits, hidden states and experts, on every path.

The recorded sequences have no router near a tie, so every choice of experts must be the recorded one.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.kv.pages import allocate_pages
from moonshard.models import weights
from moonshard.models.experts import moe
from moonshard.models.kimi.family import Kimi
from moonshard.models.kimi.forward import forward, unembed
from moonshard.models.kimi.weights import declare
from moonshard.models.model import Batch
from moonshard.models.score import Scorer, score
from moonshard.models.spec import ModelError
from moonshard.serving.control.plan import DecodePlan, DecodeRow, PrefillChunk, PrefillPlan
from moonshard.serving.control.request import Request, SequenceId, SlotId
from moonshard.serving.control.sampling_parameters import Sampling
from moonshard.serving.engine.compiled.stage_model import StageModel
from moonshard.serving.engine.encoder import StepEncoder
from moonshard.serving.engine.programs import Drawn, Programs
from moonshard.serving.engine.steps import StepShapes
from moonshard.sharding.mesh import build_mesh, replicated
from moonshard.sharding.shape import MeshShape
from moonshard.sharding.shard import ALONE
from tests.agreement import FIXTURES, LOGIT_TOLERANCE, ROUTER_NEAR_TIE, reference

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
NUM_BLOCKS, BLOCK_SIZE = 16, 16
BF16_TOLERANCE = 0.03


@cache
def recorded(name: str, file: str = "ref.npz") -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURES / name / file))


def expert_sets(experts: np.ndarray) -> np.ndarray:
    return np.sort(experts, axis=-1)


@cache
def scorer(name: str, backend: moe.Backend) -> Scorer:
    return Scorer(FIXTURES / name, backend=backend)


@pytest.mark.parametrize("name", ["kimi_k2", "dsv3_groups"])
@pytest.mark.parametrize(
    ("backend", "prompt"),
    [
        *((moe.blocks, 2), (moe.dense, 1)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((moe.blocks, 1), (moe.dense, 2))),
    ],
    ids=["blocks-2", "dense-1", "blocks-1", "dense-2"],
)
def test_logits_hidden_states_and_experts_are_those_of_hugging_face(name, backend, prompt):
    ref = recorded(name)
    seen = scorer(name, backend).observe(ref[f"ids{prompt}"].tolist())
    np.testing.assert_allclose(seen.logits, ref[f"logits{prompt}"], atol=LOGIT_TOLERANCE)
    # The recorded last state is after the final norm, which `logits` covers.
    np.testing.assert_allclose(seen.hidden[:-1], ref[f"hidden{prompt}"][:-1], atol=LOGIT_TOLERANCE)
    routed = [ref[key] for key in sorted(ref) if key.startswith(f"route{prompt}/") and key.endswith("/2")]
    assert seen.experts is not None
    np.testing.assert_array_equal(expert_sets(seen.experts), expert_sets(np.stack(routed)))


def test_a_long_prompt_has_the_logits_and_experts_of_hugging_face():
    ref = recorded("kimi_k2", "ref_long.npz")
    seen = scorer("kimi_k2", moe.blocks).observe([*ref["ids"].tolist(), *ref["greedy"].tolist()])
    assert ref["router_margin"].min() > ROUTER_NEAR_TIE
    assert seen.experts is not None
    assert seen.router_margin is not None
    np.testing.assert_array_equal(expert_sets(seen.experts), ref["experts"])
    np.testing.assert_allclose(seen.router_margin.min(axis=0), ref["router_margin"], atol=ROUTER_NEAR_TIE)
    np.testing.assert_allclose(seen.logits[ref["positions"]], ref["logits"], atol=LOGIT_TOLERANCE)
    np.testing.assert_allclose(seen.logits[len(ref["ids"]) - 1 : -1], ref["greedy_logits"], atol=LOGIT_TOLERANCE)


def test_a_prompt_that_cannot_be_scored_is_refused_by_name():
    for tokens, message in (([], "empty"), ([1, 2048], "2048"), ([-1], "-1")):
        with pytest.raises(ModelError, match=f"tokens: .*{message}"):
            score(FIXTURES / "kimi_k2", tokens)


@cache
def compiled_forward(name: str):
    model = reference(name)

    @jax.jit
    def run(loaded, pages, tokens, positions, tables):
        with jax.default_matmul_precision("highest"):
            batch = Batch(tokens=tokens, positions=positions, block_tables=tables[:, None])
            hidden, pages, _ = forward(model.config, loaded, pages, batch)
            return unembed(loaded, hidden.reshape(-1, hidden.shape[-1])), pages

    return run


class Paged:
    """One sequence at a time over blocks in a shuffled order; unused blocks and table columns hold noise."""

    def __init__(self, name: str = "kimi_k2", loaded=None):
        self.config = reference(name).config
        self.loaded = reference(name).weights if loaded is None else loaded
        self.rng = np.random.default_rng(0)
        shape = (NUM_BLOCKS, self.config.num_hidden_layers, BLOCK_SIZE, self.config.latent_size)
        self.pages = jnp.asarray(self.rng.normal(size=shape).astype(np.float32))
        self.table = self.rng.permutation(NUM_BLOCKS)[:8].astype(np.int32)
        self._run = compiled_forward(name)

    def feed(self, ids, start: int, shape: tuple[int, int]) -> np.ndarray:
        """Logits of `ids` at positions from `start`, as rows of the given shape; what is left over is padding."""
        count, size = len(ids), shape[0] * shape[1]
        tokens, positions = self.rng.integers(0, 2048, size), np.full(size, -1)
        tokens[:count], positions[:count] = ids, start + np.arange(count)
        tables = np.tile(self.table, (shape[0], 1))
        tokens, positions = (a.reshape(shape).astype(np.int32) for a in (tokens, positions))
        logits, self.pages = self._run(self.loaded, self.pages, tokens, positions, tables)
        return np.asarray(logits)[:count]


@pytest.mark.parametrize("name", ["kimi_k2", "dsv3_groups"])
def test_prefill_then_decode_gives_the_logits_of_one_pass(name):
    ids, logits = recorded(name)["ids2"], recorded(name)["logits2"]
    paged, split = Paged(name), 57
    np.testing.assert_allclose(paged.feed(ids[:split], 0, (4, 16)), logits[:split], atol=LOGIT_TOLERANCE)
    for position in range(split, len(ids)):
        step = paged.feed(ids[position : position + 1], position, (1, 1))
        np.testing.assert_allclose(step[0], logits[position], atol=LOGIT_TOLERANCE)


@pytest.mark.parametrize("shape", [pytest.param((1, 65), marks=pytest.mark.slow), (9, 8)])
def test_rows_of_one_sequence_in_one_step_are_as_one_row(shape):
    ids, logits = recorded("kimi_k2")["ids2"], recorded("kimi_k2")["logits2"]
    np.testing.assert_allclose(Paged().feed(ids, 0, shape), logits, atol=LOGIT_TOLERANCE)


def test_padding_rows_change_no_logits_and_no_page():
    ids, logits = recorded("kimi_k2")["ids1"], recorded("kimi_k2")["logits1"]
    paged = Paged()
    before = np.asarray(paged.pages)
    np.testing.assert_allclose(paged.feed(ids, 0, (4, 16)), logits, atol=LOGIT_TOLERANCE)
    changed = (np.asarray(paged.pages) != before).any(axis=(1, 3))
    expected = np.zeros_like(changed)
    expected[paged.table[0]] = True
    expected[paged.table[1], : len(ids) - BLOCK_SIZE] = True
    np.testing.assert_array_equal(changed, expected)


def test_a_sequence_of_nan_does_not_reach_the_next_owner_of_its_blocks():
    ids, logits = recorded("kimi_k2")["ids1"], recorded("kimi_k2")["logits1"]
    poisoned = next(token for token in range(2048) if token not in ids)
    loaded = replace(reference().weights, embed=reference().weights.embed.at[poisoned].set(jnp.nan))
    paged = Paged(loaded=loaded)
    assert np.isnan(paged.feed([poisoned] * 64, 0, (4, 16))).all()
    paged.rng = np.random.default_rng(0)
    np.testing.assert_allclose(paged.feed(ids[:1], 0, (1, 1)), logits[:1], atol=LOGIT_TOLERANCE)


@cache
def dense_only():
    """A random model without routers, so that a rounding cannot flip an expert: (config, weights in float32)."""
    config = replace(reference().config, first_k_dense_replace=reference().config.num_hidden_layers)
    return config, weights.initialise(declare(config), 0, "float32", build_mesh(MeshShape()))


def in_dtype(loaded, dtype: str):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), loaded)


def dense_only_logits(dtype: str, tokens: np.ndarray) -> np.ndarray:
    config, loaded = dense_only()
    mesh = build_mesh(MeshShape())
    pages = allocate_pages(2, config.num_hidden_layers, 32, config.latent_size, dtype=dtype, sharding=replicated(mesh))

    @jax.jit
    def run(loaded, pages, batch):
        hidden, pages, _ = forward(config, loaded, pages, batch)
        return unembed(loaded, hidden[0]), pages

    positions, table = jnp.arange(len(tokens))[None], jnp.asarray([[1, 0]])
    batch = Batch(tokens=jnp.asarray(tokens)[None], positions=positions, block_tables=table[:, None])
    logits, pages = run(in_dtype(loaded, dtype), pages, batch)
    assert pages.dtype == jnp.dtype(dtype)
    return np.asarray(logits)


@pytest.mark.slow
def test_bfloat16_logits_stay_near_float32_ones():
    tokens = np.random.default_rng(0).integers(0, 2048, 48)
    exact, rounded = dense_only_logits("float32", tokens), dense_only_logits("bfloat16", tokens)
    assert 0 < np.linalg.norm(rounded - exact) / np.linalg.norm(exact) < BF16_TOLERANCE


@pytest.mark.slow
def test_the_programs_serve_in_bfloat16():
    config, loaded = dense_only()
    shapes = StepShapes(
        slots_per_partition=2,
        columns_per_sequence=2,
        max_context_tokens=64,
        q_tile=32,
        prefill_buckets=(32,),
        decode_buckets=(2,),
    )
    rounded = in_dtype(loaded, "bfloat16")
    mesh = build_mesh(MeshShape())
    layers = range(config.num_hidden_layers)
    part = StageModel(model=Kimi(config), layers=layers, weights=rounded, mesh=mesh, shard=ALONE, backend=moe.blocks)
    programs = Programs.of([part], shapes, blocks_per_partition=2, block_size=32, dtype="bfloat16")
    encoder = StepEncoder(shapes)
    prompt = np.random.default_rng(0).integers(0, 2048, 20)
    request = Request(id=bytes(16), prompt=tuple(prompt.tolist()), max_tokens=8, sampling=Sampling(temperature=0.0))
    of = {"sequence": SequenceId(request.id, 0), "request": request, "slot": SlotId(0, 1), "block_table": (1, 0)}
    chunk = PrefillChunk(start=0, tokens=request.prompt, samples=((of["sequence"], of["slot"]),), **of)
    first = programs.fetch(programs.launch(encoder.encode(PrefillPlan(number=0, chunks=(chunk,)))))
    decode = DecodePlan(number=1, rows=(DecodeRow(position=20, **of),))
    second = programs.fetch(programs.launch(encoder.encode(decode)))
    assert isinstance(first, Drawn)
    assert isinstance(second, Drawn)
    assert programs.stages[0].state.pages.dtype == jnp.bfloat16
    drawn = [int(first.tokens[0, 0]), int(second.tokens[0, 0])]
    exact = dense_only_logits("float32", np.asarray([*prompt, drawn[0], *[0] * 27]))[19:21]
    for token, logits in zip(drawn, exact, strict=True):
        assert logits[token] > logits.max() - 4 * BF16_TOLERANCE * logits.std()
