"""The table of number formats: each beside the first, and by the bytes that it holds."""

from dataclasses import replace

from moonshard.experiments.bench.floors.work import Ceilings
from moonshard.experiments.bench.formats.record import Formats, FormatTimes, KernelTimes
from moonshard.experiments.bench.formats.table import formats_grid, kernels_grid


def times(name: str, ms: float, num_bytes: int) -> FormatTimes:
    return FormatTimes(
        name=name, held_bytes=num_bytes, decode_ms={8: ms}, decode_bytes={8: num_bytes}, prefill_ms={512: 2 * ms}
    )


def test_a_format_stands_beside_the_first_and_beside_what_its_own_bytes_need():
    ceilings = Ceilings(bytes_per_s=2**30, matmul_flops_per_s=1.0)
    wide, narrow = times("float32", 500.0, 2**28), times("int4", 250.0, 2**26)
    grid = formats_grid(Formats(ceilings=ceilings, context_tokens=192, times=(wide, narrow)))
    assert grid.columns == ("weights", "held, MiB", "decode, batch 8, ms", "prefill, 512 tokens, tokens/s")
    assert grid.rows[0] == ("float32", "256", "500 (1.00 x, 50%)", "512")
    assert grid.rows[1] == ("int4", "64.0", "250 (2.00 x, 25%)", "1,024")


def test_a_kernel_s_share_is_of_the_bandwidth_that_its_own_weights_come_to():
    kernels = tuple(KernelTimes(kernel="experts", batch=batch, call_us=500.0, call_bytes=2**18) for batch in (1, 8))
    ceilings = Ceilings(bytes_per_s=2**30, matmul_flops_per_s=1.0)
    own = replace(times("int4", 250.0, 2**26), kernels=kernels)
    grid = kernels_grid(Formats(ceilings=ceilings, context_tokens=192, times=(own, times("fp8", 1.0, 1))))
    assert grid.columns == ("weights, kernel", "batch 1, µs a layer", "batch 8, µs a layer")
    assert grid.rows == (("int4, experts", "500 (49%)", "500 (49%)"),)


def test_no_table_where_nothing_was_measured():
    assert not formats_grid(None).rows
    assert not kernels_grid(None).rows
