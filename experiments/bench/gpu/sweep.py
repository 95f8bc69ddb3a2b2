"""Which tiles suit a card: times the MoE layer under a handful of cuts, for the day a new card or compiler comes."""

import functools
from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np

from moonshard.experiments.bench.floors.work import routed_work
from moonshard.experiments.bench.gpu.rows import Bench, Row, draw_tokens, moe_call
from moonshard.experiments.bench.gpu.slice import ITEM_BYTES
from moonshard.experiments.bench.gpu.timing import measure
from moonshard.models.experts.grouped import Tiles, grouped, tiles_for


def neighbours(chosen: Tiles) -> Iterator[Tiles]:
    """The chosen tiles, then tiles with one of their numbers changed at a time."""
    yield chosen
    if chosen.rows > 16:
        yield replace(chosen, rows=chosen.rows // 2)
    if chosen.rows < 128:
        yield replace(chosen, rows=chosen.rows * 2)
    yield replace(chosen, columns=chosen.columns // 2)
    yield replace(chosen, columns=chosen.columns * 2)
    yield replace(chosen, depth_bytes=chosen.depth_bytes // 2)
    yield replace(chosen, num_warps=12 - chosen.num_warps)  # 4 and 8 change places
    yield replace(chosen, num_stages=chosen.num_stages - 1)
    yield replace(chosen, num_stages=chosen.num_stages + 1)


def sweep_rows(bench: Bench, num_tokens: int, *, interpret: bool) -> Iterator[Row]:
    """A row for every tiling that the card accepts; one that needs too much shared memory is named and skipped."""
    model = bench.model
    x, routing = draw_tokens(model, num_tokens, bench.seed)
    hit = len(np.unique(np.asarray(routing.experts)))
    floor_s = routed_work(model, num_tokens, hit, ITEM_BYTES).floor_s(bench.ceilings)
    for tiles in neighbours(tiles_for(num_tokens * model.config.num_experts_per_tok, model.config.n_routed_experts)):
        backend = functools.partial(grouped, tiles=tiles, interpret=interpret)
        name = f"{num_tokens} tokens, {_spell(tiles)}"
        try:
            timing = measure(moe_call(bench, backend, x, routing), bench.effort)
        except jax.errors.JaxRuntimeError as error:
            print(f"  {name}: not taken ({str(error).splitlines()[0][:80]})", flush=True)
            continue
        yield Row(name=name, timing=timing, floor_s=floor_s)


def _spell(tiles: Tiles) -> str:
    return f"{tiles.rows}x{tiles.columns}x{tiles.depth_bytes}B, {tiles.num_warps} warps, {tiles.num_stages} stages"
