"""A stored program is found if and only if it is the one that would be compiled."""

import hashlib
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jaxtyping
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from moonshard.models.attention import latent_attention
from moonshard.models.expanded_attention import expanded_attention
from moonshard.models.kimi.family import Kimi
from moonshard.models.machines import XLA
from moonshard.serving.deploy.timings import Timings
from moonshard.serving.engine.compiled import digest as program_digest
from moonshard.serving.engine.compiled.blueprint import Blueprint
from moonshard.serving.engine.compiled.digest import digest_of, source_files
from moonshard.serving.engine.compiled.preparation import Preparation
from moonshard.serving.engine.compiled.prepared import MIN_ASKED, PreparedPrograms
from moonshard.serving.engine.compiled.store import ProgramStore
from moonshard.serving.engine.programs import Drawn, Programs
from moonshard.serving.engine.steps import ProgramKey, Step, StepKind
from moonshard.sharding.experts import place_experts
from moonshard.sharding.rules import DECODE, PREFILL, DecodeRules
from moonshard.sharding.shape import MeshShape
from moonshard.sharding.shard import Shard
from tests.engine_room import Q_TILE, uncompiled_programs
from tests.sizes import BLOCK_SIZE, CHUNK_TOKENS, NUM_BLOCKS, NUM_SLOTS

pytestmark = pytest.mark.xdist_group("jax")
SMALL = ((StepKind.LOAD, 0), (StepKind.COPY, 0), (StepKind.EXPORT, 4))  # that compile soon


@pytest.fixture
def store(tmp_path: Path) -> ProgramStore:
    return ProgramStore(tmp_path)


@pytest.fixture(autouse=True)
def no_cache_of_jax() -> Iterator[None]:
    """What came out of it could not be kept."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def prepare(programs: Programs, store: ProgramStore, keys: tuple[ProgramKey, ...]) -> Counter[str]:
    """How often each phase was passed through."""
    timings = Timings()
    wanted = [one for one in (*programs.prepared.needed, *programs.prepared.others) if one.key in keys]
    Preparation(programs.prepared, store, timings).prepare(wanted)
    return Counter(phase.name for phase in timings.phases)


def decoded(programs: Programs) -> Drawn:
    packed, fields = programs.shapes.layout(StepKind.DECODE, NUM_SLOTS).blank()
    fields["slot"][0], fields["positions"][0] = range(NUM_SLOTS), 0
    sampling, draws = programs.shapes.layout(StepKind.DRAW).blank()
    draws["sample_slot"][0], draws["num_rows"][0] = range(NUM_SLOTS), NUM_SLOTS
    draws["wants_logprobs"][...] = 1
    step = Step(-1, StepKind.DECODE, NUM_SLOTS, packed, sampling, draws=tuple(range(NUM_SLOTS)))
    drawn = programs.fetch(programs.launch(step))
    assert isinstance(drawn, Drawn)
    return drawn


def test_what_one_has_compiled_another_finds_and_it_computes_the_same(store: ProgramStore):
    keys = ((StepKind.DECODE, NUM_SLOTS), (StepKind.DRAW, 0))
    first, second = uncompiled_programs(), uncompiled_programs()
    assert prepare(first, store, keys)["compile"] == 2
    found = prepare(second, store, keys)
    assert found == {"load": 2}
    one, other = decoded(first), decoded(second)
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.logprobs, other.logprobs)
    assert one.logprobs.any()


def test_on_a_mesh_of_several_stages_too(store: ProgramStore):
    shard = Shard(mesh=MeshShape(tensor=2, pipe=2), rules=DecodeRules())
    keys = (*((kind, 0) for kind in (StepKind.DRAW, StepKind.NOTE, StepKind.LOAD)), (StepKind.LAND, 4))
    num_programs = sum(one.key in keys for one in uncompiled_programs(shard=shard).prepared.needed)
    assert num_programs == 6
    assert prepare(uncompiled_programs(shard=shard), store, keys)["compile"] == num_programs
    assert prepare(uncompiled_programs(shard=shard), store, keys) == {"load": num_programs}


def test_a_short_first_request_has_a_prefill_of_one_row_and_not_of_one_token():
    blueprint = uncompiled_programs().stages[0].blueprint
    shapes = replace(blueprint.shapes, prefill_buckets=(1, 8, *blueprint.shapes.prefill_buckets))
    prepared = PreparedPrograms(shapes, [_like(blueprint, shapes=shapes)])
    assert {wanted.key for wanted in prepared.firsts} == {(StepKind.PREFILL, Q_TILE), (StepKind.DECODE, 1)}


def test_two_who_start_together_compile_each_program_once(store: ProgramStore):
    counts: list[Counter[str]] = []
    workers = [uncompiled_programs(), uncompiled_programs()]
    threads = [threading.Thread(target=lambda p=p: counts.append(prepare(p, store, SMALL))) for p in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    both = counts[0] + counts[1]
    assert (both["compile"], both["load"]) == (len(SMALL), len(SMALL))


def test_bytes_that_are_no_program_are_said_once_and_replaced(store: ProgramStore, caplog: pytest.LogCaptureFixture):
    programs = uncompiled_programs()
    for key in SMALL:
        store.save(digest_of(programs.stages[0].blueprint, key), b"no program")
    assert prepare(programs, store, SMALL)["compile"] == len(SMALL)
    assert len([text for text in caplog.messages if "cannot be loaded" in text]) == 1
    assert prepare(uncompiled_programs(), store, SMALL)["compile"] == 0


def test_what_came_out_of_jaxs_own_cache_is_not_kept(store: ProgramStore, tmp_path: Path):
    """What it serialises to fails when it is run."""
    own = tmp_path / "jax"
    jax.config.update("jax_enable_compilation_cache", True)
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", str(own))
        compilation_cache.reset_cache()
        first, second = ProgramStore(tmp_path / "first"), ProgramStore(tmp_path / "second")
        assert prepare(uncompiled_programs(), first, SMALL)["save"] == len(SMALL)
        jax.clear_caches()
        again = prepare(uncompiled_programs(), second, SMALL)
        assert (again["compile"], again["save"]) == (len(SMALL), 0)
        assert not list(second.folder.glob("*.program"))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


def test_steps_take_the_largest_program_until_smaller_ones_are_there(store: ProgramStore):
    programs = uncompiled_programs()
    kinds = {StepKind.PREFILL: Q_TILE, StepKind.DECODE: 1, StepKind.EXPORT: 1, StepKind.LAND: 1}
    programs.prepared.only_needed()
    assert {kind: programs.prepared.bucket_for(kind, size) for kind, size in kinds.items()} == {
        kind: programs.shapes.buckets[kind][-1] for kind in kinds
    }
    (export,) = [one for one in programs.prepared.others if one.key == (StepKind.EXPORT, 1)]
    programs.prepared.take(export, export.blueprint.program(export.key))
    assert programs.prepared.bucket_for(StepKind.EXPORT, 1) == 1
    assert programs.prepared.bucket_for(StepKind.EXPORT, 2) == 4
    assert programs.prepared.bucket_for(StepKind.LAND, 1) == 4


def test_a_bucket_is_there_once_every_stage_has_its_program():
    programs = uncompiled_programs(shard=Shard(mesh=MeshShape(pipe=2), rules=DecodeRules()))
    exports = [one for one in programs.prepared.others if one.key == (StepKind.EXPORT, 1)]
    assert [one.stage for one in exports] == [0, 1]
    programs.prepared.only_needed()
    for one, bucket in zip(exports, (4, 1), strict=True):
        programs.prepared.take(one, one.blueprint.program(one.key))
        assert programs.prepared.bucket_for(StepKind.EXPORT, 1) == bucket


def test_while_weights_are_read_what_a_first_request_asks_for_is_made_and_no_more(store: ProgramStore):
    own, is_read, told = uncompiled_programs().prepared, iter((False, True)), set[int]()
    own.only_needed()
    ahead = Preparation(own, store, Timings())
    thread = ahead.start_ahead(lambda: told.add(threading.get_ident()), lambda: next(is_read))
    thread.join(60)
    assert told == {thread.ident}
    assert [one for one in own.others if own.has(one)] == [own.firsts[0]]


def test_behind_the_serving_what_is_stored_is_taken_and_what_is_asked_for_is_made(store: ProgramStore):
    programs, told, failed = (
        uncompiled_programs(shard=Shard(mesh=MeshShape(tensor=2))),
        set[int](),
        list[BaseException](),
    )
    prepare(uncompiled_programs(shard=Shard(mesh=MeshShape(tensor=2))), store, ((StepKind.EXPORT, 2),))
    own = programs.prepared
    own.only_needed()
    behind = Preparation(own, store, Timings())
    thread = behind.start_behind(lambda: told.add(threading.get_ident()), failed.append)
    for _ in range(MIN_ASKED):
        assert own.bucket_for(StepKind.LAND, 1) == 4
    behind.finish()
    thread.join(60)
    assert not failed
    assert told == {thread.ident}
    assert [own.bucket_for(StepKind.EXPORT, size) for size in (1, 2, 4)] == [
        2,
        2,
        4,
    ]  # one was in the store
    assert [own.bucket_for(StepKind.LAND, size) for size in (1, 2, 4)] == [1, 4, 4]  # one was asked for


CHANGES = {
    "block size": lambda b: Blueprint(b.part, b.shapes, blocks_per_partition=NUM_BLOCKS, block_size=8, dtype="float32"),
    "pool": lambda b: Blueprint(b.part, b.shapes, blocks_per_partition=7, block_size=BLOCK_SIZE, dtype="float32"),
    "dtype": lambda b: _like(b, dtype="bfloat16"),
    "context": lambda b: _like(b, shapes=replace(b.shapes, columns_per_sequence=9)),
    "slots": lambda b: _like(b, shapes=replace(b.shapes, slots_per_partition=3)),
    "a number of the model": lambda b: _like(
        b, part=replace(b.part, model=Kimi(replace(b.part.model.config, routed_scaling_factor=2.0)))
    ),
    "backend": lambda b: _like(b, part=replace(b.part, backend=print)),
    "what attends over pages": lambda b: _like(b, part=replace(b.part, attention=latent_attention)),
    "what attends to long prompts": lambda b: _like(b, part=replace(b.part, expanded=expanded_attention)),
    "what is computed at once": lambda b: _like(b, part=replace(b.part, machine=replace(XLA, keys=XLA.keys + 1))),
    "where weights are read": lambda b: _like(b, part=replace(b.part, machine=replace(XLA, kernel_rows=1))),
    "layers": lambda b: _like(b, part=replace(b.part, layers=range(len(b.part.layers) - 1))),
    "where experts lie": lambda b: _like(
        b, part=replace(b.part, placement=place_experts(np.ones((3, 16)), num_places=16, num_devices=1))
    ),
}


def _like(blueprint: Blueprint, **changes) -> Blueprint:
    sizes = {"blocks_per_partition": NUM_BLOCKS, "block_size": BLOCK_SIZE, "dtype": "float32"}
    made = {"part": blueprint.part, "shapes": blueprint.shapes, **sizes} | changes
    return Blueprint(made.pop("part"), made.pop("shapes"), **made)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_another_program_has_another_key(change, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    blueprint, key = uncompiled_programs().stages[0].blueprint, (StepKind.PREFILL, 64)
    assert digest_of(_like(blueprint), key) == digest_of(blueprint, key)
    assert digest_of(change(blueprint), key) != digest_of(blueprint, key)


def test_another_mesh_has_another_key():
    key = (StepKind.PREFILL, CHUNK_TOKENS)
    meshes = (MeshShape(), MeshShape(tensor=2), MeshShape(data=2), MeshShape(expert=2))
    blueprints = [uncompiled_programs(shard=Shard(mesh=mesh)).stages[0].blueprint for mesh in meshes]
    assert len({digest_of(blueprint, key) for blueprint in blueprints}) == len(meshes)


@pytest.mark.parametrize(("mesh", "is_same"), [(MeshShape(), True), (MeshShape(tensor=2), False)])
def test_of_the_rules_what_they_cut_on_the_mesh_is_in_the_key(mesh: MeshShape, is_same: bool):
    """So that on one device prefill and decode share what is the same for both."""
    key = (StepKind.PREFILL, CHUNK_TOKENS)
    blueprints = [
        uncompiled_programs("kimi_k2", shard=Shard(mesh=mesh, rules=rules)).stages[0].blueprint
        for rules in (PREFILL, DECODE)
    ]
    assert (digest_of(blueprints[0], key) == digest_of(blueprints[1], key)) is is_same


def test_values_that_are_spelt_alike_are_told_apart():
    alike = ("1", 1, 1.0, True, b"1", b"str '1'", ("1",), ["1"], {"1": 1}, [("1", 1)], {"1"}, None, "None")
    alike += (StepKind.LOAD, ("StepKind", "LOAD"), len, ("builtins", "len"))

    def digest(value: object) -> str:
        found = hashlib.sha256()
        program_digest._feed(found, value)
        return found.hexdigest()

    assert len({digest(value) for value in alike}) == len(alike)


def test_other_code_has_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = program_digest.source_digest.__wrapped__()
    assert program_digest.source_digest.__wrapped__() == before
    changed = tmp_path / source_files()[0].parent.name / source_files()[0].name
    changed.parent.mkdir()
    changed.write_bytes(source_files()[0].read_bytes() + b"\n")
    files = [changed, *source_files()[1:]]
    monkeypatch.setattr(program_digest, "source_files", lambda: files)
    assert program_digest.source_digest.__wrapped__() != before


@pytest.mark.parametrize(
    ("name", "value", "is_same"),
    [
        ("XLA_FLAGS", "--xla_cpu_enable_fast_math=true", False),
        ("JAX_DEFAULT_MATMUL_PRECISION", "bfloat16", False),
        ("JAX_COMPILATION_CACHE_DIR", "/elsewhere", True),
        ("HOME", "/elsewhere", True),
    ],
)
def test_settings_of_the_compiler_are_part_of_the_key_and_where_things_lie_is_not(name, value, is_same, monkeypatch):
    program_digest._surroundings.cache_clear()
    before = program_digest._surroundings()
    program_digest._surroundings.cache_clear()
    monkeypatch.setenv(name, value)
    after = program_digest._surroundings()
    program_digest._surroundings.cache_clear()
    assert (before == after) is is_same


def test_the_key_knows_every_file_of_ours_that_a_blueprint_imports():
    listing = """
import sys, moonshard.serving.engine.compiled.blueprint
print(*(m.__file__ for name, m in sys.modules.items() if name.startswith("moonshard.") and m.__file__))
"""
    done = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True, env=os.environ)
    imported = {Path(path).resolve() for path in done.stdout.split()}
    assert len(imported) > 10
    assert imported <= {path.resolve() for path in source_files()} | {
        path for path in imported if path.name == "__init__.py"
    }
