"""A trial of sizes: every entry is one of the table's, candidates are timed, and the best is told."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from moonshard.experiments.bench.sizes import candidates
from moonshard.experiments.bench.sizes.entries import Entry, Probe, entries_of, longest_tokens
from moonshard.experiments.bench.sizes.record import SizesJob, Tried, TriedSizes
from moonshard.experiments.bench.sizes.table import BEST, BETTER, COLUMNS, TABLE, sizes_grid
from moonshard.models.machines import MACHINES, XLA, Machine
from moonshard.serving.config.reading import load_config
from moonshard.serving.engine.loading.model import machine_for

pytestmark = pytest.mark.xdist_group("jax")
TINY = Path(__file__).parents[3] / "fixtures" / "kimi_k2"


@pytest.mark.parametrize("kind", MACHINES)
def test_every_entry_of_the_table_is_tried_where_it_makes_a_difference(kind: str):
    machine = MACHINES[kind]
    tried = {entry.name for entry in entries_of(machine)}
    of_kernels, of_xla = {"kernel_rows"}, {"keys", "expanded_keys", "expanded_queries"}
    assert tried == {field.name for field in fields(Machine)} - (of_xla if machine.reads_in_place else of_kernels)
    assert all(
        probe.cached_tokens + probe.num_tokens <= longest_tokens() for e in entries_of(machine) for probe in e.probes
    )


def test_each_candidate_is_loaded_and_timed_beside_the_table_s(monkeypatch: pytest.MonkeyPatch):
    probes = (Probe(num_tokens=70), Probe(num_tokens=5, cached_tokens=20), Probe(cached_tokens=16, batch=2))
    monkeypatch.setattr(
        candidates, "entries_of", lambda machine: (Entry(name="chunk_tokens", candidates=(64,), probes=probes),)
    )
    machine = replace(machine_for("cpu"), chunk_tokens=128)
    monkeypatch.setattr(candidates, "machine_for", lambda platform: machine)
    loaded, load = [], candidates.load_model
    monkeypatch.setattr(candidates, "load_model", lambda *args, **kw: loaded.append(load(*args, **kw)) or loaded[-1])
    config = load_config(None, (f"model.path={TINY}", "decode.max_slots=2"))
    found = candidates.try_sizes(config, SizesJob(overrides=(), repeats=1, seed=0), lambda name: None)
    assert [(one.candidate, one.is_current) for one in found.tried] == [(64, False), (128, True)]
    assert [model.shapes.prefill_buckets[-1] for model in loaded] == [64, 128]
    for one in found.tried:
        assert list(one.ms) == [probe.name for probe in probes]
        assert min(one.ms.values()) > 0
        assert one.longest_step_ms <= one.total_ms


def tried(candidate: float, *ms: float, is_current: bool = False) -> Tried:
    times = {f"probe {index}": each for index, each in enumerate(ms)}
    return Tried(entry="keys", candidate=candidate, is_current=is_current, ms=times, longest_step_ms=max(ms))


@pytest.mark.parametrize(
    ("other", "verdicts"),
    [(7.0, (f"{TABLE}, {BEST}", "")), (5.9, (TABLE, BEST)), (4.0, (TABLE, BETTER))],
)
def test_a_candidate_is_better_only_where_all_probes_together_are_clearly_quicker(other: float, verdicts):
    found = TriedSizes(kind="xla", tried=(tried(1, 4.0, 6.0, is_current=True), tried(2, 4.0, other)))
    grid = sizes_grid(found)
    assert tuple(dict(zip(COLUMNS, row, strict=True))[""] for row in grid.rows) == verdicts
    assert "xla" in grid.title


def test_nothing_tried_is_no_table():
    assert sizes_grid(None).rows == ()
    assert XLA is MACHINES["xla"]
