"""What is computed from the meshes' figures, and how it is laid out: bars, bubbles, pairs of meshes."""

from collections import Counter
from dataclasses import replace

import pytest

from moonshard.experiments.bench.meshes.handoff import on_pair
from moonshard.experiments.bench.meshes.hlo import COLLECTIVES
from moonshard.experiments.bench.meshes.measure import ONE_THREAD, with_one_thread
from moonshard.experiments.bench.meshes.tables import (
    CASES,
    KINDS,
    LAYOUT_PAIRS,
    LAYOUTS,
    MESH_PAIRS,
    NUM_OWNERS,
    ORDERS,
    ROLES,
    WHERES,
    Where,
    bubble,
    bubble_at_best,
    bubble_grid,
    bubble_name,
    busy_name,
    collective_name,
    collectives_grid,
    expand_name,
    mesh_handoff_grid,
    of_pair,
    pair_name,
    plan_name,
    reshard_grid,
    step_name,
    transfers_name,
)
from moonshard.experiments.bench.serving.handoff import of_requests
from moonshard.experiments.common.running.measurement import Measurement, Plan, Unit
from moonshard.serving.config.reading import as_overrides, load_config
from tests.experiments.bench.test_apart import TIMING


def measured(name: str, *samples: float, unit: Unit = "ms") -> Measurement:
    return Measurement(level="meshes", name=name, unit=unit, samples=samples)


class TestReshard:
    @pytest.mark.parametrize(
        ("plan_ms", "scattered_ms", "said"),
        [(1.9, 0.9, "held"), (2.1, 0.9, "missed"), (1.9, 1.1, "missed")],
    )
    def test_both_bars_are_to_be_held(self, plan_ms: float, scattered_ms: float, said: str):
        pair = pair_name("pipe 8", "tensor 8 by tokens")
        found = [
            measured(plan_name(pair), plan_ms, 0.1, 9.0),
            *(measured(expand_name(order, pair), scattered_ms) for order in ORDERS),
            *(measured(transfers_name(order, pair), 31232.0, unit="count") for order in ORDERS),
        ]
        ((name, *_, scattered, consecutive, verdict),) = reshard_grid(found, Plan()).rows
        assert (name, scattered, consecutive, verdict) == (pair, "31,232", "31,232", said)

    def test_every_layout_has_eight_owners_and_is_on_either_side(self):
        assert {mesh.num_devices for mesh, _ in LAYOUTS.values()} == {NUM_OWNERS}
        assert {name for pair in LAYOUT_PAIRS for name in pair} == set(LAYOUTS)


class TestCollectives:
    def found(self, mesh: str, role: str, counts: dict[Where, Counter[str]]) -> list[Measurement]:
        return [
            measured(collective_name(kind, where, role, mesh), float(counts.get(where, Counter())[kind]), unit="count")
            for where in WHERES
            for kind in KINDS
        ]

    @pytest.mark.parametrize(
        ("dense", "sparse", "said"),
        [
            (Counter({"all-reduce": 2}), Counter({"all-reduce": 2}), "held"),
            (Counter({"all-reduce": 2}), Counter({"all-reduce": 3}), "missed"),
            (Counter({"all-reduce": 2}), Counter({"all-reduce": 2, "all-gather": 1}), "missed"),
        ],
    )
    def test_the_bar_of_a_decode_step_is_two_all_reduces_and_nothing_else(self, dense, sparse, said: str):
        found = self.found("tensor 2", "decode", {"a dense layer": dense, "a sparse layer": sparse})
        ((*_, verdict),) = collectives_grid(found, Plan()).rows
        assert verdict == said

    def test_a_cell_names_what_there_is(self):
        layer = Counter({"all-reduce": 1, "all-gather": 2})
        ((mesh, role, dense, sparse, *_, verdict),) = collectives_grid(
            self.found("expert 4", "prefill", {"a sparse layer": layer}), Plan()
        ).rows
        assert (mesh, role, dense, sparse) == ("expert 4", "prefill", "none", "1 all-reduce, 2 all-gather")
        assert verdict == ""  # no bar

    def test_what_is_counted_is_what_is_printed(self):
        assert KINDS == COLLECTIVES
        assert len({collective_name(k, w, r, c.name) for k in KINDS for w in WHERES for r in ROLES for c in CASES}) == (
            len(KINDS) * len(WHERES) * len(ROLES) * len(CASES)
        )


class TestBubbles:
    def test_stages_in_turn_leave_all_but_one_without_work(self):
        assert bubble([1.0, 1.0], 2.0) == 0.5
        assert bubble([1.0] * 4, 4.0) == 0.75
        assert bubble([1.0, 3.0], 4.0) == 0.5

    def test_stages_that_never_wait_leave_none(self):
        assert bubble([2.0, 2.0, 2.0], 2.0) == 0.0

    @pytest.mark.parametrize(
        ("busy_ms", "num_microbatches", "expected"),
        [([1.0, 1.0], 1, 0.5), ([1.0, 1.0], 2, 0.0), ([1.0, 3.0], 2, 1 / 3), ([1.0] * 4, 2, 0.5)],
    )
    def test_at_best_the_slowest_stage_or_the_way_of_a_microbatch_sets_the_pace(
        self, busy_ms: list[float], num_microbatches: int, expected: float
    ):
        assert bubble_at_best(busy_ms, num_microbatches) == pytest.approx(expected)

    def test_a_row_has_the_stages_side_by_side(self):
        found = [
            measured(bubble_name(2, 2), 0.25, 0.5, 0.3, unit="share"),
            measured(step_name(2, 2), 2.0),
            measured(busy_name(0, 2, 2), 1.0),
            measured(busy_name(1, 2, 2), 1.5),
        ]
        rows = bubble_grid(found, Plan(pipeline_rows=16)).rows
        assert rows == (("2", "2", "8", "1.00 + 1.50", "2.00", "0.300", "0.250 to 0.500", "0.167", "3"),)

    def test_a_process_of_one_thread_keeps_what_it_was_told_before(self):
        told = with_one_thread({"XLA_FLAGS": "--a=1", "HOME": "/"})
        assert told == {"XLA_FLAGS": f"--a=1 {ONE_THREAD}", "HOME": "/"}
        assert with_one_thread({}) == {"XLA_FLAGS": ONE_THREAD}


class TestMeshHandoffs:
    def test_each_pair_of_meshes_has_its_rows(self):
        pairs = MESH_PAIRS[:2]
        found = [
            replace(one, level="meshes", name=of_pair(one.name, pair.name))
            for pair, timing in zip(pairs, (TIMING, replace(TIMING, land_ms=9.0)), strict=True)
            for num_tokens in (512, 2048)
            for one in of_requests(num_tokens, [timing] * 3)
        ]
        rows = mesh_handoff_grid(found, Plan()).rows
        assert [(row[0], row[1], row[-1]) for row in rows] == [
            *((pairs[0].name, length, "held") for length in ("512", "2,048")),
            *((pairs[1].name, length, "missed") for length in ("512", "2,048")),
        ]

    @pytest.mark.parametrize("pair", MESH_PAIRS, ids=lambda pair: pair.name)
    def test_a_pair_is_a_configuration_whatever_meshes_there_were(self, pair):
        config = on_pair(load_config(None, ["prefill.mesh.data=4", "decode.mesh.expert=2"]), pair)
        assert (config.prefill.mesh, config.decode.mesh) == (pair.prefill, pair.decode)
        assert load_config(None, as_overrides(config)) == config
