"""The table beside peers: the best of them, shares of the machine, and cells that stay empty."""

from pathlib import Path

import pytest

from moonshard.experiments.bench.floors.work import Ceilings, ItemBytes, Work
from moonshard.experiments.bench.peers.beside import AGGREGATED, APART, IN_FLOAT32, OURS, Beside, Least
from moonshard.experiments.bench.peers.compare import Comparison, Figure
from moonshard.experiments.bench.peers.rows import Decoding, Prefilling
from moonshard.experiments.bench.peers.table import as_cells, beside_grids, times_better
from moonshard.experiments.common.grid import Grid

DECODE = Decoding(batch=8, prompt_tokens=1, completion_tokens=2)
PREFILL = Prefilling(prompt_tokens=500)


def ms(*values: float, **counts: int) -> Figure:
    return Figure(unit="ms", values=values, **counts)


def rate(*values: float) -> Figure:
    return Figure(unit="tokens/s", values=values)


def least(weights: float) -> Least:
    """So many bytes of weights a value: what a row needs at the least grows with them."""
    return Least(
        work={
            DECODE.name: Work(num_bytes=5e6 * weights, num_flops=1e9),
            PREFILL.name: Work(num_bytes=5e7 * weights, num_flops=2e11),
        },
        item_bytes=ItemBytes(weights=weights, kv=4),
        weights_mib=100 * weights,
        pool_mib=1000,
    )


def beside(figures: dict[tuple[str, str], Figure], *servers: str, notes: tuple[str, ...] = ()) -> Beside:
    return Beside(
        rows=(DECODE, PREFILL),
        comparison=Comparison(servers=(*OURS, *servers), figures=figures, notes=list(notes)),
        ceilings=Ceilings(bytes_per_s=1e9, matmul_flops_per_s=1e12),
        folder=Path("a-model"),
        least={AGGREGATED: least(2), IN_FLOAT32: least(4)},
    )


def stored(beside: Beside) -> Grid:
    """The table of our weights as the configuration has them."""
    return beside_grids(beside)[0]


def test_the_best_median_and_the_best_request_may_be_of_different_peers():
    figures = {
        (DECODE.name, AGGREGATED): ms(20, 10, 40),
        (DECODE.name, "a"): ms(30, 5, 50),
        (DECODE.name, "b"): ms(25, 24, 26),
        (PREFILL.name, AGGREGATED): rate(1000, 1500, 900),
        (PREFILL.name, "a"): rate(400, 2000, 300),
        (PREFILL.name, "b"): rate(500, 500, 500),
        (DECODE.name, APART): ms(1),
    }
    found = Comparison(servers=(AGGREGATED, APART, "a", "b"), figures=figures)
    assert times_better(found, DECODE.name) == (25 / 20, 5 / 10)
    assert times_better(found, PREFILL.name) == (1000 / 500, 1500 / 2000)


def test_shares_are_of_the_time_that_ours_took():
    figures = {(DECODE.name, AGGREGATED): ms(20.0, 16.0, 30.0), (PREFILL.name, AGGREGATED): rate(1000.0)}
    decode, prefill = stored(beside(figures)).rows
    assert decode == (DECODE.name, "ms", "20.0 (16.0)", "", "", "10.0", "1.00", "50% (62%)", "5% (6%)")
    assert prefill == (PREFILL.name, "tokens/s", "1,000", "", "", "100", "200", "20%", "40%")


def test_each_of_ours_stands_in_its_table_beside_all_peers():
    values = {AGGREGATED: 20.0, IN_FLOAT32: 40.0, APART: 30.0, "a": 10.0}
    figures = {(DECODE.name, server): ms(value) for server, value in values.items()}
    of_stored, of_float32 = beside_grids(beside(figures, "a", notes=("said once",)))
    assert of_stored.columns[2:5] == (AGGREGATED, APART, "a")
    assert of_float32.columns[2:4] == (IN_FLOAT32, "a")
    assert of_stored.rows[0][2:] == ("20.0", "30.0", "10.0", "0.50", "10.0", "1.00", "50%", "5%")
    assert of_float32.rows[0][2:] == ("40.0", "10.0", "0.25", "20.0", "1.00", "50%", "2%")
    assert [note for grid in (of_stored, of_float32) for note in grid.notes if note == "said once"] == ["said once"]
    assert beside_grids(None) == []


def test_a_server_without_a_figure_has_an_empty_cell_and_its_note():
    figures = {(DECODE.name, AGGREGATED): ms(20.0), (DECODE.name, "a"): ms(10.0), ("peak memory", "a"): ms(3.0)}
    grid = stored(beside(figures, "a", "gone", notes=("gone: nothing was measured",)))
    by_name = {row[0]: row for row in grid.rows}
    assert by_name[DECODE.name][2:7] == ("20.0", "", "10.0", "", "0.50")
    assert by_name[PREFILL.name][2:7] == ("", "", "", "", "")
    assert by_name["peak memory"][2:7] == ("", "", "3.00", "", "")
    assert grid.notes[-1] == "gone: nothing was measured"
    assert {len(row) for row in grid.rows} == {len(grid.columns)}


def test_samples_that_were_disturbed_are_told():
    figures = {(DECODE.name, AGGREGATED): ms(20.0, num_repeated=3, num_disturbed=1), (DECODE.name, "a"): ms(1.0)}
    notes = stored(beside(figures, "a")).notes
    assert any(note.startswith("3 samples of all servers were taken again") for note in notes)
    assert any(f"{DECODE.name}, {AGGREGATED}: 1" in note for note in notes)


def test_the_file_has_every_sample():
    figures = {(DECODE.name, AGGREGATED): ms(20.0, 10.0)}
    (cell,) = as_cells(beside(figures))
    assert (cell["what"], cell["server"], cell["values"]) == (DECODE.name, AGGREGATED, (20.0, 10.0))
    assert as_cells(None) == []


@pytest.mark.parametrize("figures", [{}, {(DECODE.name, AGGREGATED): ms(1.0)}, {(DECODE.name, "a"): ms(1.0)}])
def test_without_both_sides_nobody_is_better(figures):
    assert times_better(Comparison(servers=(AGGREGATED, APART, "a"), figures=figures), DECODE.name) is None
