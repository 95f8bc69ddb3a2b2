"""A budget is what counting every device's arrays gives, and gives the figures worked out by hand for real models."""

import math

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.models.folder.known import KNOWN
from moonshard.models.gpu import card
from moonshard.models.kimi.config import KimiConfig
from moonshard.models.kimi.footprint import pieces, workspace_bytes
from moonshard.models.kimi.weights import declare
from moonshard.models.spec import StepSize
from moonshard.models.weights import abstract, is_param
from moonshard.sharding.budget import Budget, KvPiece, ModelPieces, WeightPiece, all_meshes, budget, ranked
from moonshard.sharding.mesh import build_mesh
from moonshard.sharding.rules import DECODE, PREFILL, Rules, context_parallel
from moonshard.sharding.shape import MeshShape

pytestmark = pytest.mark.xdist_group("jax")
GIB = 2**30
H100_BYTES = 81_559 * 2**20
K25 = pieces(KimiConfig.from_hugging_face(KNOWN["kimi-k2.5"].config), "int4-experts")


def of(mesh: MeshShape, model: ModelPieces = K25, rules: Rules = DECODE, device_bytes: int = H100_BYTES) -> Budget:
    return budget(model, mesh, rules, device_bytes, lambda mesh, rules: 0)


def test_the_weights_of_kimi_k25_take_what_its_files_take():
    """554.3 GiB with the vision tower and the shapes of the packed experts, which are left out here."""
    assert 552.9 < K25.num_bytes / GIB < 554.3


@pytest.mark.parametrize(
    ("mesh", "by_hand_gib"),
    [
        (MeshShape(tensor=8), 84),
        (MeshShape(expert=2, tensor=4), 62),
        (MeshShape(expert=4, tensor=2), 18),
        (MeshShape(expert=8), -69),
    ],
)
def test_headroom_is_the_one_by_hand_less_the_projections_that_tensor_devices_repeat(
    mesh: MeshShape, by_hand_gib: float
):
    """By hand, all that is no expert is cut `tensor` times. The low-rank projections, routers and norms are not."""
    uncut = sum(
        piece.num_bytes
        for layer in K25.layers
        for piece in layer
        if not {"heads", "ffw", "experts", "vocab"} & set(piece.axes)
    )
    repeated = uncut * (mesh.num_devices - mesh.expert)
    found = of(mesh)
    assert (found.headroom_bytes + repeated) / GIB == pytest.approx(by_hand_gib, abs=0.6)
    assert (found.reason is None) == (by_hand_gib > 0)


def test_the_meshes_that_leave_more_than_30_gib():
    enough = {str(mesh) for mesh in all_meshes(8) if mesh.pipe == 1 and of(mesh).headroom_bytes > 30 * GIB}
    assert enough == {"tensor=8", "expert=2 tensor=4"}


def test_a_latent_on_every_tensor_device_costs_what_context_parallel_gives_back():
    mesh = MeshShape(tensor=8)
    whole, parted = of(mesh), of(mesh, rules=context_parallel(DECODE))
    assert whole.headroom_bytes == parted.headroom_bytes
    assert parted.num_tokens // whole.num_tokens == 8
    assert whole.num_tokens == int(whole.stages[0].headroom_bytes // (61 * 576 * 2))


@pytest.mark.parametrize("rules", [PREFILL, DECODE])
@pytest.mark.parametrize("mesh", [MeshShape(expert=2, tensor=2), MeshShape(data=2, expert=4), MeshShape(tensor=4)])
def test_the_bytes_of_a_device_are_those_of_its_arrays(mesh: MeshShape, rules: Rules):
    config = small()
    found = of(mesh, pieces(config, "bf16"), rules)
    assert found.stages[0].weight_bytes == bytes_on_a_device(config, mesh, range(3), rules)


def small(**changes: object) -> KimiConfig:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 16, "vocab_size": 128, "intermediate_size": 96}
    return KimiConfig.from_hugging_face({**KNOWN["moonlight-16b"].config, **sizes, "num_hidden_layers": 3, **changes})


def bytes_on_a_device(config: KimiConfig, mesh: MeshShape, layers: range, rules: Rules) -> int:
    leaves = jax.tree.leaves(abstract(declare(config, layers), "bfloat16", build_mesh(mesh), rules))
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_table_that_is_tied_is_held_twice_only_by_stages_that_are_two(num_stages: int):
    config, mesh = small(tie_word_embeddings=True), MeshShape(pipe=num_stages)
    found = of(mesh, pieces(config, "bf16"))
    sizes = [stage.num_layers for stage in found.stages]
    layers = [range(sum(sizes[:index]), sum(sizes[: index + 1])) for index in range(num_stages)]
    held = [bytes_on_a_device(config, mesh, each, DECODE) for each in layers]
    assert [stage.weight_bytes for stage in found.stages] == held
    table_bytes = config.vocab_size * config.hidden_size * 2
    assert found.repeated_bytes == (table_bytes if num_stages > 1 else 0)


def test_every_parameter_is_counted_once():
    config = KimiConfig.from_hugging_face(KNOWN["deepseek-v3"].config)
    declared = sum(math.prod(param.shape) for param in jax.tree.leaves(declare(config), is_leaf=is_param))
    counted = pieces(config, "bf16")
    every = [*counted.first, *counted.last, *(piece for layer in counted.layers for piece in layer)]
    assert sum(math.prod(piece.shape) for piece in every) == declared
    assert declared / 1e9 == pytest.approx(671, abs=0.5)  # DeepSeek-V3 (arXiv 2412.19437), section 1, without MTP


def test_a_mesh_that_cannot_be_cut_says_why_and_comes_last():
    meshes = [of(mesh) for mesh in all_meshes(6)]
    last = ranked(meshes)[-1]
    assert not last.stages or last.headroom_bytes < 0
    assert any(each.reason and "does not divide" in each.reason for each in meshes)
    tokens = [each.num_tokens for each in ranked(meshes)]
    assert tokens == sorted(tokens, reverse=True)


@given(st.integers(1, 24))
def test_all_meshes_are_all_of_them(num_devices: int):
    found = list(all_meshes(num_devices))
    assert len(set(found)) == len(found)
    assert all(mesh.num_devices == num_devices for mesh in found)
    sizes = range(1, num_devices + 1)
    num = sum(a * b * c * d == num_devices for a in sizes for b in sizes for c in sizes for d in _divisors(num_devices))
    assert len(found) == num


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def four_layers(*kv: KvPiece) -> ModelPieces:
    """Of 1,000 bytes each, behind a table of as many."""
    layer = (WeightPiece(axes=("embed",), shape=(1000,), bits=8.0),)
    return ModelPieces(first=layer, layers=(layer,) * 4, last=(), kv=kv)


def test_stages_hold_as_many_tokens_as_the_tightest_of_them():
    model = four_layers(KvPiece(layers=(0, 1, 2, 3), layer_bytes_per_token=10))
    found = of(MeshShape(pipe=2), model, device_bytes=4000)
    assert [stage.num_layers for stage in found.stages] == [2, 2]
    assert [stage.weight_bytes for stage in found.stages] == [3000, 2000]
    assert found.num_tokens == min(1000 // 20, 2000 // 20)
    assert found.headroom_bytes == 3000


def test_of_a_group_with_a_window_the_last_tokens_count_and_a_block_has_as_many_layers_as_the_largest():
    whole = KvPiece(layers=(0,), layer_bytes_per_token=10)
    window = KvPiece(layers=(1, 2, 3), layer_bytes_per_token=10, window=30)

    def kv_bytes_per_token(context_tokens: int | None) -> float:
        found = budget(
            four_layers(whole, window), MeshShape(), DECODE, 9000, lambda mesh, rules: 0, context_tokens, step_tokens=20
        )
        return found.stages[0].kv_bytes_per_token

    assert kv_bytes_per_token(None) == kv_bytes_per_token(50) == 3 * 10 * 2
    assert kv_bytes_per_token(200) == 3 * 10 * (1 + (30 + 20) / 200)


def test_a_pipeline_that_cuts_groups_unevenly_does_not_fit():
    groups = KvPiece(layers=(0, 1, 3), layer_bytes_per_token=10), KvPiece(layers=(2,), layer_bytes_per_token=10)
    found = of(MeshShape(pipe=2), four_layers(*groups), device_bytes=9000)
    assert found.reason == "mesh.pipe = 2: stage 0 has [2, 0] layers of the KV groups, not equally many"
    even = KvPiece(layers=(0, 2), layer_bytes_per_token=10), KvPiece(layers=(1, 3), layer_bytes_per_token=10)
    assert of(MeshShape(pipe=2), four_layers(*even), device_bytes=9000).reason is None


def test_the_workspace_has_room_for_a_panel_of_expanded_keys_where_prompts_are_expanded(monkeypatch):
    config, mesh, num_tokens = KimiConfig.from_hugging_face(KNOWN["kimi-k2"].config), MeshShape(tensor=8), 256
    prompt, few = (StepSize(num_tokens=count, num_logits=1) for count in (num_tokens, 64))
    panel = 256 * 2**20 + 8 * 8192 * 576 * 2  # keys and values of 8 heads, and what they are expanded from
    kept = num_tokens * 8 * (128 * 4 + 2 * 4)  # sums in float32, a peak and a total
    around = num_tokens * 8 * (192 + 128) * 2  # queries and results
    assert workspace_bytes(config, prompt, mesh, PREFILL) < panel
    monkeypatch.setattr(card, "EXPANDS_PROMPTS", True)
    assert workspace_bytes(config, prompt, mesh, PREFILL) == panel + kept + around + 3 * num_tokens * 7168 * 2
    assert workspace_bytes(config, few, mesh, PREFILL) < panel


def test_the_workspace_is_taken_from_the_headroom():
    mesh = MeshShape(tensor=8)
    small = budget(K25, mesh, DECODE, H100_BYTES, lambda mesh, rules: 10**9)
    assert of(mesh).headroom_bytes - small.headroom_bytes == pytest.approx(8e9)
    assert of(mesh).num_tokens - small.num_tokens == pytest.approx(1e9 / (61 * 576 * 2), abs=1)
