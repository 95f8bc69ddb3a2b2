"""Collectives are counted where they run: once a turn of a loop, on programs of which it is known."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from moonshard.experiments.bench.meshes.collectives import KEEP_LOOPS
from moonshard.experiments.bench.meshes.hlo import LoopTurn, read_program

pytestmark = pytest.mark.xdist_group("jax")
CUT = PartitionSpec("x")


def compiled(body, *, num_devices: int = 2) -> LoopTurn:
    """A body over [4, 8] of zeros, its rows cut over the devices."""
    mesh = jax.make_mesh((num_devices,), ("x",), devices=jax.devices()[:num_devices], axis_types=(AxisType.Auto,))
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=CUT, out_specs=CUT, check_vma=False))
    return read_program(program.lower(jnp.zeros((4, 8))).compile(compiler_options=KEEP_LOOPS).as_text() or "")


def scanned(body, num_turns: int = 3):
    return lambda x: jax.lax.scan(lambda carry, index: (body(carry), None), x, jnp.arange(num_turns))[0]


def add_up(x: jax.Array) -> jax.Array:
    return jnp.tanh(jax.lax.psum(jnp.sin(x), "x"))


def test_a_sum_in_a_scan_is_counted_once_and_not_outside():
    turn = compiled(scanned(add_up))
    (loop,) = turn.loops
    assert (turn.counts, loop.counts, loop.loops) == (Counter(), Counter({"all-reduce": 1}), ())
    assert turn.total == Counter({"all-reduce": 1})


def test_a_loop_of_a_single_turn_stays_a_loop():
    turn = compiled(scanned(add_up, num_turns=1))
    assert [loop.counts for loop in turn.loops] == [Counter({"all-reduce": 1})]


def test_an_exchange_in_a_loop_in_a_scan_is_counted_once_in_a_round():
    swap = functools.partial(jax.lax.all_to_all, axis_name="x", split_axis=0, concat_axis=0, tiled=True)

    def layer(x: jax.Array) -> jax.Array:
        num_rounds = jnp.int32(add_up(x).sum()) % 3
        return jax.lax.fori_loop(0, num_rounds, lambda index, carry: swap(jnp.cos(carry)), x)

    turn = compiled(lambda x: scanned(layer)(x) + jax.lax.all_gather(x, "x", tiled=True)[:2])
    (loop,) = turn.loops
    (rounds,) = loop.loops
    assert turn.counts == Counter({"all-gather": 1})
    assert loop.counts == Counter({"all-reduce": 1})
    assert rounds.total == Counter({"all-to-all": 1})


def test_scopes_tell_loops_apart_and_the_first_stands_first():
    def scoped(name: str, body):
        def run(x: jax.Array) -> jax.Array:
            with jax.named_scope(name):
                return body(x)

        return scanned(run)

    twice = scoped("second", lambda x: add_up(add_up(x)))
    turn = compiled(lambda x: twice(scoped("first", add_up)(x)))
    found = [
        (name, loop.counts["all-reduce"])
        for loop in turn.loops
        for name in ("first", "second")
        if loop.has_scope(f"/{name}/")
    ]
    assert found == [("first", 1), ("second", 2)]


def test_permutes_and_scattered_sums_have_their_own_names():
    def body(x: jax.Array) -> jax.Array:
        own = jax.lax.psum_scatter(jnp.tile(x, (2, 1)), "x", tiled=True)
        return jax.lax.ppermute(jnp.sin(own), "x", [(0, 1), (1, 0)])

    assert compiled(body).total == Counter({"reduce-scatter": 1, "collective-permute": 1})


def test_a_program_of_one_device_has_none():
    assert compiled(jnp.tanh, num_devices=1).total == Counter()


def test_a_pair_of_start_and_done_is_one_whatever_shape_the_start_has():
    hlo = """HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (p: f32[8]) -> f32[4] {
  %p = f32[8]{0} parameter(0)
  ROOT %rs = f32[4]{0} reduce-scatter(%p), replica_groups={{0,1}}, dimensions={0}, to_apply=%add
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0:T(8)} parameter(0)
  %ar = f32[8]{0} all-reduce-start(%x), replica_groups={{0,1}}, to_apply=%add
  %ar.done = f32[8]{0} all-reduce-done(%ar)
  %ag = (f32[8]{0:T(8)}, f32[16]{0}) all-gather-start(%ar.done), replica_groups={{0,1}}, dimensions={0}
  %ag.done = f32[16]{0} all-gather-done(%ag)
  %rs = ((f32[8]{0}), f32[4]{0}, s32[]) async-start(%x), calls=%wrapped
  %rs.done = f32[4]{0} async-done(%rs), calls=%wrapped
  ROOT %c = f32[8]{0} conditional(%x), branch_computations={%wrapped, %wrapped}
}
"""
    found = read_program(hlo)
    assert found.counts == Counter({"all-reduce": 1, "all-gather": 1, "reduce-scatter": 3})


def test_a_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no entry computation"):
        read_program("HloModule empty")
