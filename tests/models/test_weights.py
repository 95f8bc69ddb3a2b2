"""Weights read onto a mesh compute what Hugging Face computed; tensors that do not fit are refused by name."""

import functools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.kv.pages import allocate_pages
from moonshard.models import weights
from moonshard.models.folder.checkpoint import Checkpoint, CheckpointError
from moonshard.models.folder.writing import write_checkpoint
from moonshard.models.kimi.forward import forward, unembed
from moonshard.models.kimi.weights import declare
from moonshard.models.model import Batch
from moonshard.models.registry import open_model
from moonshard.models.spec import ModelError, Param
from moonshard.sharding.mesh import build_mesh, replicated
from moonshard.sharding.rules import MeshError
from moonshard.sharding.shape import MeshShape
from tests.agreement import FIXTURES, LOGIT_TOLERANCE, reference

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised]
FOLDER = FIXTURES / "kimi_k2"
CONFIG = reference().config
PARAMS = declare(CONFIG)
ONE_DEVICE = MeshShape()


class Changed:
    """A checkpoint with one tensor replaced; it keeps what was asked of it."""

    def __init__(self, name: str = "", tensor: np.ndarray | None = None, checkpoint: Checkpoint | None = None):
        self._checkpoint, self._name, self._tensor = checkpoint or Checkpoint.open(FOLDER), name, tensor
        self.asked: list[str] = []
        self.expected: list[str] = []
        self.released: list[str] = []

    def tensor(self, name: str) -> np.ndarray:
        self.asked.append(name)
        if name == self._name and self._tensor is not None:
            return self._tensor
        return self._checkpoint.tensor(name)

    def has(self, name: str) -> bool:
        return self._checkpoint.has(name)

    def where(self, name: str) -> str:
        return self._checkpoint.where(name)

    def expect(self, name: str) -> None:
        self.expected.append(name)
        self._checkpoint.expect(name)

    def release(self, name: str) -> None:
        self.released.append(name)
        self._checkpoint.release(name)


MESHES = [MeshShape(data=2), MeshShape(tensor=2), MeshShape(expert=2, tensor=2)]


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_weights_on_a_mesh_are_those_of_one_device_and_each_device_holds_its_share_of_the_experts(shape):
    loaded = weights.load(PARAMS, Checkpoint.open(FOLDER), "float32", build_mesh(shape))
    jax.tree.map(np.testing.assert_array_equal, loaded, reference().weights)
    experts = loaded.experts.gate_up
    assert experts.addressable_shards[0].data.size * shape.expert * shape.tensor == experts.size


@pytest.mark.parametrize(
    "shape", [*(pytest.param(each, marks=pytest.mark.slow) for each in MESHES[:2]), MESHES[2]], ids=str
)
def test_a_sharded_forward_gives_the_logits_of_hugging_face(shape):
    ref, mesh = np.load(FOLDER / "ref.npz"), build_mesh(shape)
    loaded = weights.load(PARAMS, Checkpoint.open(FOLDER), "float32", mesh)
    pages = allocate_pages(
        2, CONFIG.num_hidden_layers, 16, CONFIG.latent_size, dtype="float32", sharding=replicated(mesh)
    )

    @jax.jit
    def run(loaded, pages, batch):
        with jax.default_matmul_precision("highest"):
            hidden, _, _ = forward(CONFIG, loaded, pages, batch)
            return unembed(loaded, hidden[0])

    ids = jnp.asarray(ref["ids1"], jnp.int32)[None]
    batch = Batch(tokens=ids, positions=jnp.asarray(np.arange(ids.size)[None]), block_tables=jnp.asarray([[[1, 0]]]))
    np.testing.assert_allclose(run(loaded, pages, batch), ref["logits1"], atol=LOGIT_TOLERANCE)


def test_every_tensor_of_the_folder_is_read_and_no_other():
    source = Changed()
    weights.check_shapes(PARAMS, source)
    assert set(source.asked) == set(Checkpoint.open(FOLDER).names)


@pytest.mark.parametrize("folder", [FOLDER, FIXTURES / "kimi_k25_int4"], ids=lambda each: each.name)
def test_a_tensor_is_read_once_for_all_leaves_and_devices_that_have_parts_of_it(folder: Path):
    checkpoint, model = open_model(folder)
    source = Changed(checkpoint=checkpoint)
    weights.load(model.declare(), source, "float32", build_mesh(MeshShape(data=2, expert=2)), holding="native")
    read = {name for name in checkpoint.names if not name.endswith(".weight_shape")}
    assert sorted(source.expected) == sorted(source.released) == sorted(read)


def test_a_process_reads_the_tensors_of_its_own_devices_alone(monkeypatch: pytest.MonkeyPatch):
    mesh, source = build_mesh(MeshShape(expert=4)), Changed()
    first, everywhere = mesh.devices.flat[0], jax.sharding.NamedSharding.addressable_devices_indices_map

    def own(self: jax.sharding.NamedSharding, shape: tuple[int, ...]) -> dict:
        return {first: everywhere(self, shape)[first]}

    monkeypatch.setattr(jax.sharding.NamedSharding, "addressable_devices_indices_map", own)
    monkeypatch.setattr(jax, "make_array_from_callback", lambda *given: jnp.zeros(()))  # of a part alone there is none
    weights.load(PARAMS, source, "float32", mesh)
    experts = {int(name.split(".experts.")[1].split(".")[0]) for name in source.expected if ".experts." in name}
    assert experts == set(range(CONFIG.n_routed_experts // 4))
    assert len([name for name in source.expected if ".experts." not in name]) > 20


def test_values_are_converted_except_where_a_parameter_has_a_dtype_of_its_own():
    loaded = weights.load(PARAMS, Checkpoint.open(FOLDER), "bfloat16", build_mesh(ONE_DEVICE))
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(loaded)}
    assert dtypes == {"bfloat16", "float32"}
    assert loaded.sparse.router.bias.dtype == jnp.float32
    raw = Checkpoint.open(FOLDER).tensor("model.layers.2.mlp.experts.5.up_proj.weight")
    np.testing.assert_array_equal(loaded.experts.gate_up[1, 5, 1], raw)


def test_the_abstract_tree_is_that_of_the_loaded_weights():
    mesh = build_mesh(MeshShape(expert=2))
    abstract = weights.abstract(PARAMS, "float32", mesh)
    progress: list[tuple[int, int]] = []
    loaded = weights.load(
        PARAMS, Checkpoint.open(FOLDER), "float32", mesh, progress=lambda *done: progress.append(done)
    )
    same = jax.tree.map(
        lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype) and a.sharding.is_equivalent_to(b.sharding, b.ndim),
        abstract,
        loaded,
    )
    assert all(jax.tree.leaves(same))
    count = len(weights.tensors_of(PARAMS))
    assert progress == [(done, count) for done in range(1, count + 1)]


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.self_attn.q_b_proj.weight",
        "model.layers.2.self_attn.kv_b_proj.weight",
        "model.layers.3.self_attn.o_proj.weight",
        "model.layers.3.mlp.experts.7.down_proj.weight",
    ],
)
@pytest.mark.parametrize("how", ["transposed", "cut"])
def test_a_tensor_of_another_shape_is_refused_by_name(name, how):
    tensor = Checkpoint.open(FOLDER).tensor(name)
    changed = (
        tensor[None] if tensor.ndim == 1 and how == "transposed" else tensor.T if how == "transposed" else tensor[1:]
    )
    if changed.shape == tensor.shape:
        pytest.skip("square")
    for read in (
        lambda source: weights.check_shapes(PARAMS, source),
        lambda source: weights.load(PARAMS, source, "float32", build_mesh(ONE_DEVICE)),
    ):
        with pytest.raises(ModelError) as error:
            read(Changed(name, changed))
        where = f"{FOLDER}/model.safetensors: tensor {name!r}"
        assert str(error.value) == f"{where} has shape {list(changed.shape)}; config.json asks for {list(tensor.shape)}"


def test_a_missing_tensor_is_refused_by_name():
    deeper = declare(replace(CONFIG, num_hidden_layers=CONFIG.num_hidden_layers + 1))
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.layers\.4\."):
        weights.check_shapes(deeper, Checkpoint.open(FOLDER))


def test_a_model_that_the_mesh_does_not_divide_is_refused_before_anything_is_read():
    source = Changed()
    with pytest.raises(MeshError, match=r"mesh\.tensor = 3"):
        weights.load(PARAMS, source, "float32", build_mesh(MeshShape(tensor=3)))
    assert source.asked == []


def test_random_weights_do_not_depend_on_the_mesh():
    params = {
        "drawn": Param(shape=(4, 50, 100), axes=("experts", "ffw", "embed"), source=str),
        "constant": Param(shape=(6,), axes=("heads",), source=str, dtype="float32", initial=1.5),
    }
    one, two = (
        weights.initialise(params, 7, "bfloat16", build_mesh(shape)) for shape in (ONE_DEVICE, MeshShape(expert=2))
    )
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert two["drawn"].addressable_shards[0].data.shape == (2, 50, 100)
    assert one["drawn"].dtype == jnp.bfloat16
    assert np.asarray(one["drawn"], np.float32).std() == pytest.approx(100**-0.5, rel=0.03)
    assert (np.asarray(one["constant"]) == 1.5).all()


def test_reading_is_told_apart_from_placing():
    parts: list[float] = []
    mesh = build_mesh(MeshShape(expert=2))
    weights.load(PARAMS, Checkpoint.open(FOLDER), "float32", mesh, on_read=parts.append)
    params = jax.tree.leaves(PARAMS, is_leaf=weights.is_param)
    assert len(parts) == len({tuple(param.tensors()) for param in params})
    assert min(parts) > 0


PEAK = """
import sys, jax
from moonshard.models import weights
from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.spec import Param
from moonshard.sharding.mesh import build_mesh
from moonshard.sharding.shape import MeshShape
def told(name):
    return next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith(name))
params = {"all": Param(shape=(64, 1024, 1024), axes=("layers", None, None), source="{}".format, stacked=1)}
mesh = build_mesh(MeshShape())
before = told("VmRSS")
loaded = jax.block_until_ready(weights.load(params, Checkpoint.open(sys.argv[1]), "bfloat16", mesh))
print(told("VmHWM") - before, told("VmRSS") - before)
"""


def test_weights_are_in_memory_once_also_while_they_are_read(tmp_path: Path):
    """Neither the file's pages nor a second copy on the way to the device count beside them."""
    num_mib = 128
    tensor = np.ones((1024, 1024), jnp.bfloat16)
    write_checkpoint(tmp_path, {}, {str(index): tensor for index in range(num_mib // 2)})
    done = subprocess.run([sys.executable, "-c", PEAK, tmp_path], capture_output=True, text=True, check=True)
    peak_mib, held_mib = map(int, done.stdout.split())
    assert num_mib <= held_mib <= peak_mib < 1.25 * num_mib


def advice(address: int) -> list[str]:
    """What the kernel was told of the mapping that an address lies in (proc(5), VmFlags)."""
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            first, beyond = (int(end, 16) for end in name.split("-"))
            within = first <= address < beyond
        elif within and name == "VmFlags:":
            return rest
    return []


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="there are no large pages here")
def test_weights_lie_in_large_pages_however_small_each_is(tmp_path: Path):
    """Each of these is smaller than what numpy asks large pages for; a page of 4 KiB is walked to far more often."""
    num_weights = 16
    tensor = np.ones((512, 1024), np.float32)
    write_checkpoint(tmp_path, {}, {str(index): tensor for index in range(num_weights)})
    params = [
        Param(shape=tensor.shape, axes=(None, None), source=functools.partial(str, index))
        for index in range(num_weights)
    ]
    loaded = weights.load(params, Checkpoint.open(tmp_path), "float32", build_mesh(ONE_DEVICE))
    assert all("hg" in advice(each.unsafe_buffer_pointer() + each.nbytes // 2) for each in loaded)
