"""Which cuts suit a card: times the MoE layer under a handful of them, for the day a new card or compiler comes."""

import functools
from collections.abc import Iterator

import numpy as np

from moonshard.experiments.bench.floors.work import routed_work
from moonshard.experiments.bench.gpu.rows import Bench, Row, draw_tokens, moe_call
from moonshard.experiments.bench.gpu.slice import ITEM_BYTES
from moonshard.experiments.bench.gpu.timing import measure
from moonshard.models.gpu.experts.backend import MIN_ROWS, multiply, rows_for
from moonshard.models.gpu.experts.grouped_product import CUT, CUT_OF_MANY_ROWS
from moonshard.models.gpu.experts.tiles import LEAST_ROWS, MAX_ROWS, Cut

CUTS = (CUT, CUT_OF_MANY_ROWS, Cut(128, 64, 4), Cut(128, 128, 2), Cut(64, 256, 2), Cut(64, 64, 6))


def variants(num_rows: int) -> Iterator[tuple[int, Cut]]:
    """Rows of a block and a cut: the chosen rows with every cut, then half and twice as many rows."""
    for cut in CUTS:
        yield num_rows, cut
    for other in (num_rows // 2, 2 * num_rows):
        if MIN_ROWS <= other <= MAX_ROWS:
            yield other, CUT if other <= LEAST_ROWS else CUT_OF_MANY_ROWS


def sweep_rows(bench: Bench, num_tokens: int) -> Iterator[Row]:
    """A row for every cut that the card accepts; one that needs too much shared memory is named and skipped."""
    config = bench.model.config
    x, routing = draw_tokens(bench.model, num_tokens, bench.seed)
    hit = len(np.unique(np.asarray(routing.experts)))
    floor_s = routed_work(bench.model, num_tokens, hit, ITEM_BYTES).floor_s(bench.ceilings)
    for num_rows, cut in variants(rows_for(num_tokens * config.num_experts_per_tok, config.n_routed_experts)):
        backend = functools.partial(multiply, num_rows=num_rows, cut=cut)
        name = f"{num_tokens} tokens, blocks of {num_rows}, {cut.columns}x{cut.depth}, {cut.num_stages} stages"
        try:
            timing = measure(moe_call(bench, backend, x, routing), bench.effort)
        except ValueError as error:
            print(f"  {name}: not taken ({str(error).splitlines()[0][:80]})", flush=True)
            continue
        yield Row(name=name, timing=timing, floor_s=floor_s)
