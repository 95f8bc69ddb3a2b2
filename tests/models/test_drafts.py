"""Drafts against recorded references, and the laws of their rows: pages, padding, chains, tables."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.models import weights
from moonshard.models.draft import Draft
from moonshard.models.eagle.attention import PagedHeads, grouped_attention
from moonshard.models.eagle.config import EagleConfig
from moonshard.models.eagle.draft import Eagle
from moonshard.models.eagle.taps import default_taps, read_taps
from moonshard.models.eagle.weights import Stored
from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.folder.config_reader import ConfigReader
from moonshard.models.folder.writing import Piece, Planned, write_pieces
from moonshard.models.machines import MACHINES, XLA
from moonshard.models.model import Batch
from moonshard.models.native import library
from moonshard.models.registry import open_draft, open_model
from moonshard.models.spec import ModelError
from moonshard.sharding.mesh import build_mesh
from moonshard.sharding.shape import MeshShape
from tests.agreement import FIXTURES, LOGIT_TOLERANCE, reference
from tests.models.drafts import Drafting, loaded_draft, recorded, shifted, target_features, with_mtp, with_taps

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
EAGLE = FIXTURES / "kimi_k2_eagle3"


def eagle_input(prompt: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that follow, and features, from our own forward pass."""
    ref = recorded("kimi_k2_eagle3", "ref_eagle3.npz")
    ids = ref[f"ids{prompt}"]
    return shifted(ids.tolist(), int(ref[f"first{prompt}"])), target_features(tuple(ids.tolist()), (1, 2, 3))


def eagle_draft(tmp_path: Path):
    """The fixture's draft with the taps that its reference was recorded with."""
    return loaded_draft(with_taps(tmp_path / "draft", [0, 1, 2]))


@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_a_chain_has_the_reference_s_tokens_and_logits(prompt, tmp_path):
    ref = recorded("kimi_k2_eagle3", "ref_eagle3.npz")
    drafting = eagle_draft(tmp_path)
    following, features = eagle_input(prompt)
    hidden = drafting.extend(following, features)[-1]
    last = len(following) - 1
    np.testing.assert_array_equal(drafting.chain(hidden, last, 3), ref[f"draft{prompt}"])
    for ahead, token in enumerate(ref[f"draft{prompt}"]):
        np.testing.assert_allclose(
            drafting.logits(hidden)[0], ref[f"draft_logits{prompt}"][ahead], atol=LOGIT_TOLERANCE
        )
        hidden = drafting.step(int(token), hidden, last + 1 + ahead)


@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_multi_token_prediction_has_the_hidden_states_and_logits_of_hugging_face(prompt, tmp_path):
    ref = recorded("kimi_k2_mtp", "ref_mtp.npz")
    drafting = loaded_draft(None, with_mtp(tmp_path / "target"))
    ids = ref[f"ids{prompt}"].tolist()
    following = shifted(ids, int(ref[f"greedy{prompt}"][0]))
    hidden = drafting.extend(following, target_features(tuple(ids), ()))
    np.testing.assert_allclose(hidden, ref[f"mtp_hidden{prompt}"], atol=LOGIT_TOLERANCE)
    np.testing.assert_allclose(drafting.logits(hidden[-2:]), ref[f"mtp_logits{prompt}"], atol=LOGIT_TOLERANCE)


# ---- the laws of rows, of each kind of draft with random weights

LATENT = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 2048,
    "num_attention_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 4096,
    "rope_theta": 50000.0,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "fc_norm": True, "norm_output": True},
}
LLAMA = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 2048,
    "draft_vocab_size": 300,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 10000.0,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    "norm_before_residual": True,
}


def random_draft(raw: dict, tmp_path: Path) -> Drafting:
    config = EagleConfig.from_hugging_face(raw, reference().config)
    whole = config.draft_vocab_size == config.vocab_size
    draft = Eagle(config=config, stored=Stored(has_embed=True, has_head=True, has_targets=not whole))
    drawn = weights.initialise(draft.declare(), 5, "float32", build_mesh(MeshShape()))
    return Drafting(draft, drawn)


def mtp_draft(_: dict, tmp_path: Path) -> Drafting:
    return loaded_draft(None, with_mtp(tmp_path / "target"))


KINDS = pytest.mark.parametrize(("make", "raw"), [(random_draft, LLAMA), (random_draft, LATENT), (mtp_draft, {})])


def rows_of(draft: Draft, count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(11)
    features = random.normal(size=(count, draft.feature_size)).astype(np.float32)
    return random.integers(0, 2048, count).astype(np.int32), features


@KINDS
def test_chunks_over_pages_and_padding_change_no_row(make, raw, tmp_path):
    drafting = make(raw, tmp_path)
    tokens, features = rows_of(drafting.draft, 29)
    whole = drafting.extend(tokens, features)
    apart = Drafting(drafting.draft, drafting.loaded, seed=3)
    first = apart.extend(tokens[:13], features[:13], shape=(2, 8))
    rest = apart.extend(tokens[13:], features[13:], start=13, shape=(3, 8))
    np.testing.assert_allclose(np.concatenate([first, rest]), whole, atol=1e-4)


@KINDS
def test_padding_writes_to_no_page(make, raw, tmp_path):
    drafting = make(raw, tmp_path)
    before = np.asarray(drafting.pages)
    drafting.extend(*rows_of(drafting.draft, 11), shape=(4, 4))
    changed = (np.asarray(drafting.pages) != before).any(axis=(1, 3))
    expected = np.zeros_like(changed)
    expected[drafting.table[0]] = True
    expected[drafting.table[1], :3] = True
    np.testing.assert_array_equal(changed, expected)
    alone = make(raw, tmp_path)
    alone.extend(*rows_of(drafting.draft, 11))
    np.testing.assert_allclose(drafting.pages, alone.pages, atol=1e-5)


@KINDS
def test_a_chain_is_step_after_step_and_the_next_extension_forgets_it(make, raw, tmp_path):
    drafting, plain = make(raw, tmp_path), make(raw, tmp_path)
    tokens, features = rows_of(drafting.draft, 20)
    hidden = drafting.extend(tokens[:15], features[:15])[-1]
    np.testing.assert_allclose(plain.extend(tokens[:15], features[:15])[-1], hidden, atol=1e-5)
    guesses = drafting.chain(hidden, 14, 4)
    for ahead, guess in enumerate(guesses):
        number = plain.logits(hidden).argmax(axis=-1)
        assert guess == plain.draft.token_of(plain.loaded, jnp.asarray(number))[0]
        hidden = plain.step(int(guess), hidden, 15 + ahead)
    true = Drafting(drafting.draft, drafting.loaded, seed=2).extend(tokens, features)[15:]
    np.testing.assert_allclose(drafting.extend(tokens[15:], features[15:], start=15), true, atol=1e-4)


@KINDS
def test_a_chain_at_the_end_of_its_table_overwrites_nothing(make, raw, tmp_path):
    drafting = make(raw, tmp_path)
    last = len(drafting.table) * 8 - 1
    hidden = drafting.extend(*rows_of(drafting.draft, 2), start=last - 1)[-1]
    before = np.asarray(drafting.pages)
    drafting.chain(hidden, last, 3)
    np.testing.assert_array_equal(np.asarray(drafting.pages), before)


MACHINES_HERE = {f"{keys} keys": replace(XLA, keys=keys) for keys in (8, 24, 256)}
if library.chosen() is not None:
    MACHINES_HERE["kernel"] = MACHINES["sse4"]  # it takes the best instructions that there are
PLACES = {"two heads a layer": 128, "one and a rest": 80, "one": 64, "across layers": 40}


@pytest.mark.parametrize("machine", MACHINES_HERE.values(), ids=list(MACHINES_HERE))
@pytest.mark.parametrize("num_features", PLACES.values(), ids=list(PLACES))
def test_grouped_attention_over_pages_is_softmax_over_what_was_written(machine, num_features):
    random = np.random.default_rng(4)
    count, groups, size = 43, 3, 32
    heads = PagedHeads(num_heads=groups, head_dim=size, num_features=num_features, first_layer=1)
    keys, values = random.normal(size=(2, count, groups, size)).astype(np.float32)
    table = jnp.asarray(random.permutation(9)[None, :6], jnp.int32)
    everywhere = jnp.arange(count, dtype=jnp.int32)[None]
    pages = jnp.asarray(random.normal(size=(9, 1 + heads.num_layers, 8, num_features)), jnp.float32)
    untouched = np.asarray(pages[:, 0])
    pages = heads.write(pages, table, everywhere, jnp.asarray(keys[None]), jnp.asarray(values[None]))
    np.testing.assert_array_equal(np.asarray(pages[:, 0]), untouched)
    queries, at = random.normal(size=(4, 2 * groups, size)), np.array([42, 5, 17, -1])
    given = (jnp.asarray(queries[None], jnp.float32), pages, table, jnp.asarray(at[None], jnp.int32))
    found = grouped_attention(*given, heads, machine)[0]
    for row, position in enumerate(at[:3]):
        for head in range(2 * groups):
            seen, mixed = (each[: position + 1, head // 2] for each in (keys, values))
            weights = np.exp(seen @ queries[row, head] * size**-0.5)
            np.testing.assert_allclose(found[row, head], weights @ mixed / weights.sum(), atol=1e-5)
    np.testing.assert_array_equal(found[3], 0)


def numpy_latent_row(drafting: Drafting, tokens: np.ndarray, features: np.ndarray) -> np.ndarray:
    """The MLA draft's hidden states by the formula, keys and values expanded, nothing absorbed or paged."""
    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), drafting.loaded)
    a, (r, rope) = w.attention, (24, 8)

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight

    def rotated(x, positions):
        angles = positions / 50000.0 ** (np.arange(0, rope, 2) / rope)
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.concatenate(
            [even * np.cos(angles) - odd * np.sin(angles), odd * np.cos(angles) + even * np.sin(angles)], -1
        )

    count = len(tokens)
    taps = features.reshape(count, 3, -1)
    g = np.concatenate([norm(taps[:, i], w.fc_norm[i]) for i in range(3)], -1) @ w.fc.T
    x = np.concatenate([norm(w.embed[tokens], a.norm), norm(g, w.hidden_norm)], -1)
    q = np.einsum("tr,hkr->thk", norm(x @ a.q_a.T, a.q_a_norm), a.q_b)
    latent, k_rope = np.split(x @ a.kv_a.T, [r], axis=-1)
    latent, at = norm(latent, a.kv_a_norm), np.arange(count)
    keys = np.einsum("sr,hkr->shk", latent, a.k_up)
    scores = np.einsum("thk,shk->hts", q[..., :16], keys)
    scores += np.einsum("thk,sk->hts", rotated(q[..., 16:], at[:, None, None]), rotated(k_rope, at[:, None]))
    scores = np.where(at[None, :] <= at[:, None], scores * 24**-0.5, -np.inf)
    mixed = np.exp(scores - scores.max(-1, keepdims=True))
    mixed /= mixed.sum(-1, keepdims=True)
    values = np.einsum("sr,hvr->shv", latent, a.v_up)
    h = g + np.einsum("hts,shv,dhv->td", mixed, values, a.out)
    gate, up = np.moveaxis(np.einsum("td,gfd->tgf", norm(h, w.mlp_norm), w.mlp.gate_up), 1, 0)
    return norm(h + (gate / (1 + np.exp(-gate)) * up) @ w.mlp.down.T, w.norm)


def test_a_draft_with_latent_attention_and_the_norms_of_3_1_is_its_formula(tmp_path):
    drafting = random_draft(LATENT, tmp_path)
    tokens, features = rows_of(drafting.draft, 21)
    found = drafting.extend(tokens, features)
    np.testing.assert_allclose(found, numpy_latent_row(drafting, tokens, features), atol=LOGIT_TOLERANCE)
    head = np.asarray(drafting.loaded.head)
    np.testing.assert_allclose(drafting.logits(found), found @ head.T, atol=LOGIT_TOLERANCE)


# ---- what the target gives


def test_taps_are_the_recorded_streams_and_change_nothing_else():
    ref = dict(np.load(FIXTURES / "kimi_k2" / "ref.npz"))
    ids = tuple(ref["ids1"].tolist())
    tapped = target_features(ids, (0, 2, 3)).reshape(len(ids), 3, -1)
    np.testing.assert_allclose(np.moveaxis(tapped, 1, 0), ref["hidden1"][[0, 2, 3]], atol=LOGIT_TOLERANCE)


def test_without_taps_a_program_keeps_no_stream():
    model = reference().model
    (group,) = model.kv_groups("float32")
    pages = jnp.zeros((2, group.num_layers, 8, group.num_features), jnp.float32)
    at, tables = jnp.arange(4, dtype=jnp.int32)[None], jnp.zeros((1, 1, 1), jnp.int32)

    def num_writes(**how) -> int:
        def run(loaded, pages, at, tables):
            batch = Batch(tokens=at, positions=at, block_tables=tables)
            return model.forward(loaded, pages, batch, **how)[::2]

        jaxpr = str(jax.make_jaxpr(run)(reference().weights, pages, at, tables))
        return jaxpr.count("= scatter[")

    assert num_writes(taps=(1, 3)) == num_writes() + 2  # of both stacks


# ---- folders


def test_ids_of_layers_are_read_in_both_ways():
    fields = ConfigReader({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 57]}})
    assert read_taps(fields, 61, "output") == default_taps(61) == (2, 30, 58)
    assert read_taps(fields, 61, "input") == (1, 29, 57)
    assert read_taps(ConfigReader({}), 61, "output") == (2, 30, 58)


def rewritten(folder: Path, *, config=None, without=(), renamed=None, tensors=None) -> Path:
    """The fixture's folder with changes; `tensors`: dtype, array by name."""
    source = Checkpoint.open(EAGLE)
    renamed, tensors = renamed or {}, tensors or {}
    pieces = []
    for name in (each for each in source.names if each not in without):
        new = next((name.replace(old, to) for old, to in renamed.items() if name.startswith(old)), name)
        dtype, array = tensors.get(name, (source.dtype(name), None))
        content = source.stored(name) if array is None else array
        shape = source.shape(name) if array is None else array.shape
        planned = {new: Planned(dtype=dtype, shape=shape)}
        pieces.append(Piece(tensors=planned, make=lambda new=new, content=content: {new: content}))
    taps = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    write_pieces(folder, source.config | taps | (config or {}), pieces)
    return folder


def test_the_layer_s_other_name_and_borrowed_tables(tmp_path):
    renamed = loaded_draft(rewritten(tmp_path / "a", renamed={"midlayer.": "layers.0."}))
    following, features = eagle_input(0)
    plain = eagle_draft(tmp_path)
    np.testing.assert_array_equal(renamed.extend(following, features), plain.extend(following, features))
    whole = {"config": {"draft_vocab_size": 2048}, "without": ("lm_head.weight", "d2t", "t2d")}
    borrowing = loaded_draft(rewritten(tmp_path / "b", **whole))
    assert borrowing.loaded.embed is reference().weights.embed
    assert borrowing.loaded.head is reference().weights.head


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": {"vocab_size": 2000}}, "vocab_size = 2000: a draft for another target"),
        ({"config": {"target_hidden_size": 256}}, "target_hidden_size = 256: a draft for another target"),
        ({"config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}, "'fc.weight' reads 384 values, not 2 layers of 128"),
        ({"config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, "eagle_aux_hidden_state_layer_ids is"),
        ({"config": {"eagle_aux_hidden_state_layer_ids": None}}, "a target of 4 layers is too small for the default"),
        ({"config": {"architectures": ["LlamaForCausalLM"]}}, "architectures is .*no EAGLE-3 draft"),
        ({"config": {"num_key_value_heads": 3}}, "num_key_value_heads = 3 does not divide"),
        ({"config": {"rope_scaling": {"rope_type": "llama3"}}}, "rope_scaling.type is 'llama3'"),
        ({"config": {"draft_vocab_size": 511}}, "'d2t' has 512 values"),
        ({"without": ("lm_head.weight",)}, "no tensor 'lm_head.weight'"),
        ({"without": ("d2t",)}, "no tensor 'd2t'"),
        ({"tensors": {"d2t": ("I64", np.full(512, 2000))}}, "'d2t' names no distinct tokens"),
        ({"tensors": {"t2d": ("BOOL", np.zeros(2048, bool))}}, "'t2d' has other tokens"),
    ],
)
def test_a_draft_for_another_target_is_refused_by_name(changes, message, tmp_path):
    checkpoint, model = open_model(FIXTURES / "kimi_k2")
    with pytest.raises(ModelError, match=message):
        open_draft(rewritten(tmp_path / "draft", **changes), model, checkpoint)


def test_a_target_without_a_further_layer_has_no_draft_of_its_own():
    checkpoint, model = open_model(FIXTURES / "kimi_k2")
    with pytest.raises(ModelError, match="no layer for multi-token prediction"):
        open_draft(None, model, checkpoint)
