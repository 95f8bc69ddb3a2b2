"""Sizes follow from configuration and model; what does not fit is refused by its key."""

import json
import re
import threading
from dataclasses import replace

import jax
import numpy as np
import pytest

from moonshard.models.experts import moe
from moonshard.models.experts.loads import read_loads, write_loads
from moonshard.models.folder.checkpoint import CheckpointError
from moonshard.models.gpu import card
from moonshard.models.gpu.attention.expanded import expanded_attention
from moonshard.models.gpu.attention.latent import latent_attention
from moonshard.models.kimi.family import Kimi
from moonshard.models.machines import XLA
from moonshard.models.native import library
from moonshard.models.registry import open_model
from moonshard.models.score import score
from moonshard.models.spec import ModelError
from moonshard.serving.config.keys import (
    Config,
    ConfigError,
    DecodeConfig,
    KvConfig,
    ModelConfig,
    PrefillConfig,
)
from moonshard.serving.config.reading import load_config
from moonshard.serving.engine.capacity import memory, sizes
from moonshard.serving.engine.capacity.sizes import DEFAULT_MAX_CONTEXT_TOKENS, resolve_dtype
from moonshard.serving.engine.compiled.preparation import Preparation
from moonshard.serving.engine.loading import model as loading
from moonshard.serving.engine.loading.model import load_model
from moonshard.sharding.experts import place_experts
from moonshard.sharding.rules import DecodeRules, MeshError
from moonshard.sharding.shape import MeshShape
from tests.agreement import FIXTURES

pytestmark = pytest.mark.xdist_group("jax")
FOLDER = FIXTURES / "kimi_k2"
BLOCK_SIZE = 64
BY_TOKENS = DecodeRules(kv_tokens=("tensor",))


def config(*, max_context_tokens: int | None = None, num_blocks: int | None = 64, **options) -> Config:
    return Config(
        model=ModelConfig(path=FOLDER, name="tiny", max_context_tokens=max_context_tokens),
        kv=KvConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks),
        prefill=PrefillConfig(chunk_tokens=100),
        **options,
    )


def size(asked: Config, **changes):
    _, model = open_model(asked.model.path)
    assert isinstance(model, Kimi)
    return sizes.choose_sizes(asked, Kimi(replace(model.config, **changes)), "float32")


def test_the_pool_and_the_steps_have_the_configured_sizes():
    shapes, pool = size(config(num_blocks=64, decode=DecodeConfig(max_slots=6)))
    assert (pool.num_partitions, pool.slots_per_partition, pool.blocks_per_partition) == (1, 6, 64)
    assert (shapes.max_context_tokens, shapes.columns_per_sequence) == (64 * BLOCK_SIZE, 64)
    assert (shapes.prefill_buckets[-3:], shapes.q_tile) == ((32, 64, 128), 32)
    assert shapes.decode_buckets == (1, 2, 4, 6)
    assert (shapes.num_partitions, shapes.slots_per_partition) == (1, 6)


def test_slots_that_no_memory_holds_are_refused_by_name():
    told = r"^decode\.max_slots: 65536 slots of a vocabulary of 16000000 tokens take 8789\.06 GiB, and "
    with pytest.raises(ConfigError, match=told):
        size(config(decode=DecodeConfig(max_slots=65_536)), vocab_size=16_000_000)


def test_partitions_share_the_slots_and_have_a_pool_each():
    shapes, pool = size(config(decode=DecodeConfig(max_slots=6, mesh=MeshShape(expert=2))))
    assert (pool.num_partitions, pool.slots_per_partition, pool.blocks_per_partition) == (2, 3, 64)
    assert (shapes.num_partitions, shapes.slots_per_partition) == (2, 3)
    assert shapes.decode_buckets == (1, 2, 3)
    assert pool.num_slots == 6


def test_a_pool_beyond_the_memory_there_is_is_refused_with_all_its_partitions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sizes, "free_memory_bytes", lambda: 2**30)
    meshes = DecodeConfig(max_slots=6, mesh=MeshShape(expert=2))
    block_bytes = 49152  # 64 tokens of the tiny model in float32
    fitting = 2**30 // block_bytes // 2
    assert size(config(num_blocks=fitting, decode=meshes))[1].blocks_per_partition == fitting
    message = f"kv.num_blocks: {fitting + 1} blocks of {block_bytes} bytes for each of 2 partitions take 1.00 GiB"
    with pytest.raises(ConfigError, match=re.escape(message)):
        size(config(num_blocks=fitting + 1, decode=meshes))


def test_the_memory_of_a_machine_holds_every_device_s_copy_of_a_block(monkeypatch: pytest.MonkeyPatch):
    def on(**options) -> DecodeConfig:
        return DecodeConfig(max_slots=6, mesh=MeshShape(data=2, tensor=2), **options)

    block_bytes = 49152
    monkeypatch.setattr(sizes, "free_memory_bytes", lambda: 2 * 8 * block_bytes)
    assert size(config(num_blocks=None, decode=on()))[1].blocks_per_partition == 2
    assert size(config(num_blocks=None, decode=on(rules=BY_TOKENS)))[1].blocks_per_partition == 4
    assert size(config(num_blocks=4, decode=on()))[1].blocks_per_partition == 4
    with pytest.raises(ConfigError, match=f"5 blocks of {2 * block_bytes} bytes for each of 2 partitions"):
        size(config(num_blocks=5, decode=on()))
    assert size(config(num_blocks=8, decode=on(rules=BY_TOKENS)))[1].blocks_per_partition == 8


def test_of_a_worker_on_two_machines_each_holds_its_share_and_the_least_of_all_counts(monkeypatch: pytest.MonkeyPatch):
    decode, block_bytes = DecodeConfig(max_slots=6, mesh=MeshShape(data=2, tensor=2)), 49152
    monkeypatch.setattr(sizes, "free_memory_bytes", lambda: 2 * 8 * block_bytes)
    monkeypatch.setattr(sizes, "share_here", lambda timeout_s: 0.5)
    assert size(config(num_blocks=None, decode=decode))[1].blocks_per_partition == 4
    assert size(config(num_blocks=8, decode=decode))[1].blocks_per_partition == 8
    with pytest.raises(ConfigError, match="9 blocks of"):
        size(config(num_blocks=9, decode=decode))
    monkeypatch.setattr(sizes, "told_by_all", lambda what, own, timeout_s: [own, "3"])
    assert size(config(num_blocks=None, decode=decode))[1].blocks_per_partition == 3


def test_a_device_with_memory_of_its_own_holds_only_its_partition_its_layers_and_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
):
    block_bytes = 49152
    monkeypatch.setattr(sizes, "free_device_bytes", lambda num_devices: 2 * 8 * block_bytes)
    for mesh, rules, fitting in (
        (MeshShape(data=2, tensor=2), DecodeRules(), 8),
        (MeshShape(data=2, tensor=2), BY_TOKENS, 16),
        (MeshShape(pipe=2), DecodeRules(), 16),
    ):
        decode = DecodeConfig(max_slots=6, mesh=mesh, rules=rules)
        assert size(config(num_blocks=None, decode=decode))[1].blocks_per_partition == fitting
        assert size(config(num_blocks=2 * fitting, decode=decode))[1].blocks_per_partition == 2 * fitting
        with pytest.raises(ConfigError, match="bytes on a device take"):
            size(config(num_blocks=2 * fitting + 1, decode=decode))


def test_a_context_is_the_least_of_model_pool_and_default_unless_configured():
    assert size(config(num_blocks=10_000))[0].max_context_tokens == DEFAULT_MAX_CONTEXT_TOKENS
    assert size(config(num_blocks=10_000), max_position_embeddings=500)[0].max_context_tokens == 500
    assert size(config(num_blocks=10_000), max_position_embeddings=500)[0].columns_per_sequence == 8
    assert size(config(max_context_tokens=65))[0].columns_per_sequence == 2


def test_a_context_longer_than_model_or_pool_is_refused_by_key():
    with pytest.raises(
        ModelError, match=r"model\.max_context_tokens = 501 is more than max_position_embeddings of 500"
    ):
        size(config(max_context_tokens=501), max_position_embeddings=500)
    with pytest.raises(ModelError, match=r"model\.max_context_tokens = 4097 is more than the KV pool of 4096"):
        size(config(max_context_tokens=4097))


def test_a_context_longer_than_the_pool_is_refused_before_any_weight_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loading, "_load_stages", None)
    with pytest.raises(ModelError, match="is more than the KV pool of 4096"):
        loading.load_model(config(max_context_tokens=4097), "both", lambda told: None)


def test_programs_are_made_while_weights_are_read(monkeypatch: pytest.MonkeyPatch):
    read, prepared = loading._load_stages, threading.Event()

    def read_later(*arguments):
        assert prepared.wait(60)
        return read(*arguments)

    told = list[str]()
    monkeypatch.setattr(loading, "_load_stages", read_later)
    monkeypatch.setattr(Preparation, "prepare", lambda self, wanted, *rest: prepared.set())
    loaded = load_model(config(), "both", told.append)
    assert loaded.programs.stages[0].weights is not None
    assert loaded.preparation is not None
    assert all(one.startswith("loading weights") for one in told)


def test_a_fault_that_reading_finds_ends_the_making_of_programs(monkeypatch: pytest.MonkeyPatch):
    def fails(*arguments):
        raise CheckpointError("a fault")

    def never_done(self, wanted, progress, *rest):
        while True:
            progress(0, len(wanted))

    monkeypatch.setattr(loading, "_load_stages", fails)
    monkeypatch.setattr(Preparation, "prepare", never_done)
    with pytest.raises(CheckpointError, match="a fault"):
        load_model(config(), "both", lambda told: None)


def test_a_fault_of_a_program_ends_the_reading(monkeypatch: pytest.MonkeyPatch):
    ended = threading.Event()

    def reads_for_ever(checkpoint, prepared, dtype, holding, draft, progress, timings):
        try:
            while True:
                progress("loading weights 1/2")
        finally:
            ended.set()

    def fails(self, wanted, progress, *rest):
        raise RuntimeError("XLA")

    monkeypatch.setattr(loading, "_load_stages", reads_for_ever)
    monkeypatch.setattr(Preparation, "prepare", fails)
    with pytest.raises(RuntimeError, match="XLA"):
        load_model(config(), "both", lambda told: None)
    assert ended.wait(60)


def test_a_pool_is_sized_in_what_the_weights_will_leave(monkeypatch: pytest.MonkeyPatch):
    block_bytes = 49152
    taken = sizes.WeightBytes(everywhere=3 * block_bytes, on_a_device=block_bytes)
    _, model = open_model(FOLDER)
    monkeypatch.setattr(sizes, "free_memory_bytes", lambda: 9 * block_bytes)
    chosen = sizes.choose_sizes(config(num_blocks=None), model, "float32", weights=taken)[1]
    assert chosen.blocks_per_partition == 3
    with pytest.raises(ConfigError, match=r"7 blocks .* GiB are available"):
        sizes.choose_sizes(config(num_blocks=7), model, "float32", weights=taken)
    monkeypatch.setattr(sizes, "free_device_bytes", lambda num_devices: 9 * block_bytes)
    chosen = sizes.choose_sizes(config(num_blocks=None), model, "float32", weights=taken)[1]
    assert chosen.blocks_per_partition == 4


def test_without_a_number_the_pool_takes_half_of_the_free_memory(monkeypatch):
    tokens_bytes = 4 * (32 + 16) * 4  # layers, features, float32
    monkeypatch.setattr(sizes, "free_memory_bytes", lambda: 2 * 7 * BLOCK_SIZE * tokens_bytes + 1)
    assert size(config(num_blocks=None))[1].blocks_per_partition == 7
    halved = DecodeConfig(mesh=MeshShape(expert=2))
    assert size(config(num_blocks=None, decode=halved))[1].blocks_per_partition == 3
    monkeypatch.setattr(sizes, "free_memory_bytes", lambda: 1 << 50)
    assert size(config(num_blocks=None))[1].blocks_per_partition == 16 * 8192 // BLOCK_SIZE  # every slot full
    many = DecodeConfig(max_slots=512)
    most = memory.MAX_AUTO_POOL_BYTES // (BLOCK_SIZE * tokens_bytes)
    assert size(config(num_blocks=None, decode=many))[1].blocks_per_partition == most
    monkeypatch.setattr(sizes, "free_memory_bytes", lambda: 0)
    assert size(config(num_blocks=None, decode=halved))[1].blocks_per_partition == 1


def test_the_machine_tells_its_free_memory():
    assert 1 << 20 < memory.free_memory_bytes() < 1 << 50


def test_auto_is_float32_on_cpu_and_a_named_dtype_is_kept():
    assert [resolve_dtype(name) for name in ("auto", "float32", "bfloat16")] == ["float32", "float32", "bfloat16"]


def test_a_start_that_cannot_succeed_fails_with_one_message():
    with pytest.raises(MeshError, match=r"^decode\.mesh\.pipe = 8: 4 layers cannot make 8 stages"):
        load_model(config(decode=DecodeConfig(mesh=MeshShape(pipe=8))), "both", print)
    with pytest.raises(MeshError, match=r"^decode\.mesh\.tensor = 3 does not divide"):
        load_model(config(decode=DecodeConfig(mesh=MeshShape(tensor=3))), "decode", print)
    with pytest.raises(MeshError, match=r"^decode\.mesh \(.*expert=1000.*\) needs 1000 devices"):
        load_model(config(decode=DecodeConfig(mesh=MeshShape(expert=1000))), "both", print)
    missing = replace(config(), model=ModelConfig(path=FOLDER / "nowhere", name="tiny"))
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        load_model(missing, "both", print)


def test_experts_lie_by_their_measured_load_with_copies_in_every_stage(tmp_path):
    checkpoint, model = open_model(FOLDER)
    assert isinstance(model, Kimi)
    random = np.random.default_rng(0).pareto(1.0, (model.config.num_moe_layers, model.config.n_routed_experts))
    write_loads(tmp_path / "loads.json", random, checkpoint.fingerprint)
    loads = read_loads(tmp_path / "loads.json", checkpoint.fingerprint, random.shape)
    mesh = MeshShape(expert=2, pipe=2)
    decode = DecodeConfig(max_slots=2, mesh=mesh, expert_loads=tmp_path / "loads.json", redundant_experts=4)
    asked = replace(config(decode=decode), prefill=PrefillConfig(chunk_tokens=32))
    expected = place_experts(loads, model.config.n_routed_experts + 4, 2).expert_of
    loaded = load_model(asked, "both", lambda text: None, prepares="none")
    stages = loaded.programs.stages
    assert len(stages) == 2
    placed = np.concatenate([np.asarray(stage.weights.experts.down) for stage in stages])
    for layer, experts in enumerate(expected):
        for place, expert in enumerate(experts):
            name = f"model.layers.{layer + model.config.num_dense_layers}.mlp.experts.{expert}.down_proj.weight"
            assert (placed[layer, place] == checkpoint.tensor(name)).all()
    refused = replace(asked, decode=replace(asked.decode, redundant_experts=3))
    with pytest.raises(MeshError, match=r"^decode\.redundant_experts = 3: 19 places on 2 devices for 16 experts"):
        load_model(refused, "both", lambda text: None)


def test_a_faulty_configuration_is_named_by_the_path_of_its_file(tmp_path):
    for file in FOLDER.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    raw = json.loads((FOLDER / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"hidden_size": 0}))
    for read in (open_model, lambda folder: score(folder, [1])):
        with pytest.raises(ModelError, match=f"^{re.escape(str(tmp_path))}/config.json: hidden_size is 0"):
            read(tmp_path)


def test_each_platform_gets_its_kernels_and_without_any_the_portable_loop(monkeypatch: pytest.MonkeyPatch):
    on_cpu = "blocks" if library.chosen() is None else "grouped_experts"
    monkeypatch.setattr(card, "runs_kernels", lambda: True)
    found = [loading.backend_for(platform).__name__ for platform in ("gpu", "cpu", "tpu")]
    assert found == ["grouped_experts", on_cpu, "blocks"]
    assert [loading.attention_for(platform) for platform in ("gpu", "cpu")] == [latent_attention, None]
    assert [loading.expanded_for(platform) for platform in ("gpu", "cpu")] == [None, None]
    monkeypatch.setattr(card, "EXPANDS_PROMPTS", True)
    assert [loading.expanded_for(platform) for platform in ("gpu", "cpu")] == [expanded_attention, None]
    assert loading.kernels_of("gpu") == "pallas"
    monkeypatch.setattr(card, "runs_kernels", lambda: False)
    assert loading.backend_for("gpu") is moe.blocks
    assert loading.attention_for("gpu") is None
    assert loading.expanded_for("gpu") is None
    assert loading.kernels_of("gpu") == "xla"
    monkeypatch.setattr(library, "chosen", lambda: None)
    assert loading.backend_for("cpu").__name__ == "blocks"
    monkeypatch.undo()
    assert loading.backend_for("cpu", XLA) is moe.blocks
    assert loading.holding_of(load_config(None, ()), XLA) is None
    monkeypatch.setattr(library, "chosen", lambda: None)
    assert not loading.machine_for("cpu").reads_in_place


@pytest.mark.parametrize(
    ("asked", "dtype", "is_said"),
    [
        ("bf16", "float32", True),
        ("float32", "bfloat16", True),
        ("float32", "float32", False),
        ("native", "auto", False),
    ],
)
def test_weights_that_no_kernel_reads_as_asked_are_said_once(asked, dtype, is_said, monkeypatch, caplog):
    monkeypatch.setattr(library, "chosen", lambda: None)
    model = ModelConfig(path=FOLDER, name="tiny", weights=asked, dtype=dtype)
    loaded = load_model(replace(config(), model=model), "both", lambda message: None, prepares="none")
    said = [each.getMessage() for each in caplog.records if each.getMessage().startswith("model.weights: ")]
    held = {str(leaf.dtype) for leaf in jax.tree.leaves(loaded.programs.stages[0].weights) if leaf.ndim > 2}
    assert held == {loaded.dtype}
    computed_in = f"but as they are computed in, {loaded.dtype}: without kernels for CPUs"
    assert said == [f"model.weights: not held as {asked}, {computed_in}"] * is_said
