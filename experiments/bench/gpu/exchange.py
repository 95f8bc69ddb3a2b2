"""What the GPU bench times of a handoff: blocks out of the pages and to the host, and from the host back into pages.

The floor of each row is the device's own memory: reading the blocks once and writing them once. What the rows show
beyond it is the way over the bus. Staging, checksums and the network are not measured: no GPU takes part in them.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from moonshard.experiments.bench.gpu.checks import Check
from moonshard.experiments.bench.gpu.rows import Bench, Row
from moonshard.experiments.bench.gpu.timing import measure
from moonshard.kv.pages import Pages, gather_blocks, scatter_blocks

NUM_BLOCKS = (1, 8, 32)  # of one export or land: up to 2,048 tokens at 64 a block


def check_exchange(pages: Pages) -> Check:
    """Bytes that differ between blocks gathered from one array of pages and the same blocks landed in another."""
    blocks = jnp.arange(min(8, len(pages)))
    sent = np.asarray(jax.jit(gather_blocks)(pages, blocks))
    landed = jax.jit(scatter_blocks)(jnp.zeros_like(pages), blocks, sent)
    differing = np.asarray(landed[: len(blocks)]).view(np.uint8) != sent.view(np.uint8)
    return Check(name="bytes that a handoff changes", error=float(differing.sum()), tolerance=0)


def exchange_rows(bench: Bench, pages: Pages) -> Iterator[Row]:
    """Times gathering on the device, gathering with a fetch, and the way back: put and scatter. Uses up `pages`."""
    gather = jax.jit(gather_blocks)
    scatter = jax.jit(scatter_blocks, donate_argnums=0)
    for num_blocks in (num for num in NUM_BLOCKS if num <= len(pages)):
        blocks = jnp.arange(num_blocks)
        host = np.asarray(gather(pages, blocks))
        floor_s = 2 * host.nbytes / bench.ceilings.bytes_per_s
        note = f"{host.nbytes / 1e6:.1f} MB"
        gathered = measure(lambda blocks=blocks: gather(pages, blocks), bench.effort)
        yield Row(name=f"export, {num_blocks} blocks, on the device", timing=gathered, floor_s=floor_s, note=note)
        fetched = measure(lambda blocks=blocks: np.asarray(gather(pages, blocks)), bench.effort)
        yield Row(name=f"export, {num_blocks} blocks, to the host", timing=fetched, floor_s=floor_s, note=note)

        def land(blocks: jax.Array = blocks, host: np.ndarray = host) -> Pages:
            nonlocal pages
            pages = scatter(pages, blocks, host)
            return pages

        landed = measure(land, bench.effort)
        yield Row(name=f"land, {num_blocks} blocks, from the host", timing=landed, floor_s=floor_s, note=note)
