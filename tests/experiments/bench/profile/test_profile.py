"""A profile of steps: whose time an operation's is, which part of a step it belongs to, and what a part's floor is."""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from moonshard.experiments.bench.floors.work import Ceilings, Work
from moonshard.experiments.bench.profile.operations import (
    EXPERTS,
    HEAD,
    MLP,
    OTHER,
    PAGES,
    PROJECTIONS,
    ROUTER,
    SAMPLING,
    Operation,
    part_of,
    read_operations,
)
from moonshard.experiments.bench.profile.record import OperationTime, Profile, ProfileJob, StepProfile
from moonshard.experiments.bench.profile.steps import STEPS, UNKNOWN, by_kind, profile_steps
from moonshard.experiments.bench.profile.table import ALL, COLUMNS, WHOLE, profile_grids
from moonshard.experiments.bench.profile.trace import Event, Spent, operation_times, own_times
from moonshard.experiments.common.machine import num_cores
from moonshard.serving.config.reading import load_config

pytestmark = pytest.mark.xdist_group("jax")
TINY = Path(__file__).parents[3] / "fixtures" / "kimi_k2"


def event(name: str, start_ns: float, stop_ns: float) -> Event:
    return Event(program=1, name=name, start_ns=start_ns, duration_ns=stop_ns - start_ns)


def test_what_runs_inside_an_operation_is_not_its_own_time():
    events = [
        event("loop", 0, 100),
        event("a", 10, 40),
        event("inner", 20, 25),
        event("b", 40, 90),
        event("c", 110, 120),
    ]
    own = {each.name: own_ns for each, own_ns in own_times(events[::-1])}
    assert own == {"loop": 20, "a": 25, "inner": 5, "b": 50, "c": 10}


@pytest.mark.parametrize(
    ("op_name", "part"),
    [
        ("jit(_run)/while/body/attention/ntd,rd->ntr/dot_general", PROJECTIONS),
        ("jit(_run)/while/body/attention/pages/ffi_call", PAGES),
        ("jit(_run)/feed_forward/mul", MLP),
        ("jit(_run)/feed_forward/router/top_k", ROUTER),
        ("jit(_run)/feed_forward/experts/ffi_call", EXPERTS),
        ("jit(_run)/head/ffi_call", HEAD),
        ("jit(_run)/cos", OTHER),
        ("", OTHER),
    ],
)
def test_the_innermost_scope_names_the_part(op_name: str, part: str):
    assert part_of(op_name) == part


def test_operations_of_a_compiled_program_have_the_scopes_that_they_were_written_under():
    def run(x):
        with jax.named_scope("attention"):
            x = jnp.tanh(x @ x)
        with jax.named_scope("feed_forward"), jax.named_scope("experts"):
            return jax.lax.fori_loop(0, 3, lambda _, y: y @ x, x)

    compiled = jax.jit(run).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32)).compile()
    operations = read_operations(compiled.as_text() or "")
    products = [one.part for one in operations.values() if one.kind == "dot"]
    assert sorted(products) == sorted([PROJECTIONS, EXPERTS])
    assert any(one.is_container for one in operations.values())


def test_the_profile_has_each_operation_as_often_as_it_ran():
    def run(x):
        return jax.lax.fori_loop(0, 5, lambda _, y: y @ x, x)

    x = jnp.ones((128, 128))
    compiled = jax.jit(run).lower(x).compile()
    jax.block_until_ready(compiled(x))
    found = operation_times(lambda: [jax.block_until_ready(compiled(x)) for _ in range(2)])
    operations = read_operations(compiled.as_text() or "")
    assert {name for _, name in found} <= operations.keys()
    assert {spent.count for spent in found.values()} == {2, 2 * 5}  # outside the loop and inside
    assert all(spent.ns > 0 for spent in found.values())


def test_operations_of_a_kind_are_added_up_by_step_and_loops_left_out():
    step = {
        "ffi_call.1": Operation(part=EXPERTS, kind="a_kernel"),
        "ffi_call.2": Operation(part=EXPERTS, kind="a_kernel"),
        "while.3": Operation(part=OTHER, kind="while"),
        "add.4": Operation(part=OTHER, kind="add"),
    }
    drawing = {"add.4": Operation(part=SAMPLING, kind="add"), "sort.1": Operation(part=SAMPLING, kind="sort")}
    spent = {
        (7, "ffi_call.1"): Spent(ns=6e6, count=4),
        (7, "ffi_call.2"): Spent(ns=2e6, count=4),
        (7, "while.3"): Spent(ns=9e9, count=4),
        (7, "add.4"): Spent(ns=1e6, count=8),
        (8, "add.4"): Spent(ns=3e6, count=4),
        (8, "sort.1"): Spent(ns=2e6, count=4),
        (8, "nobody.9"): Spent(ns=4e5, count=4),
    }
    found = by_kind(spent, [step, drawing], num_steps=4)
    assert [(one.part, one.kind, one.ms, one.count) for one in found] == [
        (EXPERTS, "a_kernel", 2.0, 2.0),
        (SAMPLING, "add", 0.75, 1.0),
        (SAMPLING, "sort", 0.5, 1.0),
        (OTHER, "add", 0.25, 2.0),
        (UNKNOWN, "nobody.9", 0.1, 1.0),
    ]


@pytest.mark.unoptimised
def test_a_models_steps_are_profiled_part_by_part():
    settings = (f"model.path={TINY}", "model.max_context_tokens=128", "kv.num_blocks=64", "kv.block_size=16")
    config = load_config(None, (*settings, "prefill.chunk_tokens=32", "decode.max_slots=2"))
    job = ProfileJob(overrides=(), batches=(1, 2), context_tokens=24, repeats=2, seed=0)
    begun_s = time.perf_counter()
    steps = profile_steps(config, job)
    elapsed_ms = (time.perf_counter() - begun_s) * 1e3
    assert [step.name for step in steps] == [
        *("decode, batch 1, context 24", "decode, batch 2, context 24", "prefill, chunk of 32"),
    ]
    for step in steps:
        parts = {one.part for one in step.operations}
        assert {PROJECTIONS, PAGES, ROUTER, EXPERTS, MLP, HEAD, SAMPLING} <= parts
        assert UNKNOWN not in parts
        assert set(step.least) == {PROJECTIONS, PAGES, ROUTER, EXPERTS, MLP, HEAD}
        num_steps = 2 if step.name.startswith("prefill") else 2 * STEPS
        assert 0 < step.operations_ms * num_steps < elapsed_ms * 2 * num_cores()
        assert step.step_ms > 0


def test_a_part_stands_beside_the_slower_of_moving_and_computing():
    step = StepProfile(
        name="decode",
        step_ms=10.0,
        operations=(
            OperationTime(part=EXPERTS, kind="a_kernel", ms=4.0, count=7),
            OperationTime(part=EXPERTS, kind="copy", ms=0.05, count=1),
            OperationTime(part=OTHER, kind="add", ms=1.0, count=1),
            OperationTime(part=ROUTER, kind="sort", ms=0.05, count=1),
        ),
        least={EXPERTS: Work(num_bytes=2e6, num_flops=1e6)},
    )
    ceilings = Ceilings(bytes_per_s=1e9, matmul_flops_per_s=1e9)  # 2 ms to move, 1 ms to compute
    (grid,) = profile_grids(Profile(ceilings=ceilings, steps=(step,)))
    assert {len(row) for row in grid.rows} == {len(COLUMNS)}
    least, nothing = ("2.00", "1.00"), ("",) * 5
    assert grid.rows == (
        (WHOLE, "", "10.0", "100%", *least, "20%", "10%", "20%"),
        (ALL, "", "5.10", "51%", *nothing),
        (EXPERTS, "", "4.05", "40%", *least, "49%", "25%", "49%"),
        ("· a_kernel", "7.00", "4.00", "40%", *nothing),
        ("· 1 others", "1.00", "0.050", "0%", *nothing),
        (OTHER, "", "1.00", "10%", *nothing),
        ("· add", "1.00", "1.00", "10%", *nothing),
        (ROUTER, "", "0.050", "0%", *nothing),
    )
    assert profile_grids(None) == []
