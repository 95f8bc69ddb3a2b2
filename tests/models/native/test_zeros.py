"""Zeros that a kernel makes are zeros, of any size and in memory that was used before; and take none until written."""

import resource
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moonshard.kv.pages import allocate_pages
from moonshard.models.native import library
from moonshard.models.native.zeros import zeros
from moonshard.sharding.mesh import BY_PARTITION, build_mesh
from moonshard.sharding.shape import MeshShape

pytestmark = [
    pytest.mark.xdist_group("jax"),
    pytest.mark.skipif(library.chosen() is None, reason="no kernels here"),
]
PAGE = resource.getpagesize()


@pytest.mark.parametrize("num_bytes", [1, 63, PAGE - 1, PAGE, 3 * PAGE + 5, 33 * PAGE, (4 << 20) + 17])
def test_all_is_zero_in_memory_that_was_used_before(num_bytes: int):
    made = jax.jit(lambda: zeros((num_bytes,), jnp.uint8))
    for _ in range(3):
        full = jax.block_until_ready(jnp.full(num_bytes, 255, jnp.uint8))
        del full
        found = np.asarray(made())
        assert found.shape == (num_bytes,)
        assert not found.any()


def test_pages_of_every_device_are_zero_and_are_written_in_place():
    mesh = build_mesh(MeshShape(data=2, tensor=2))
    sharding = jax.sharding.NamedSharding(mesh, BY_PARTITION)
    pages = allocate_pages(64, 2, 16, 8, dtype="bfloat16", sharding=sharding, zeros=zeros)
    assert (pages.shape, pages.dtype, pages.sharding) == ((64, 2, 16, 8), jnp.bfloat16, sharding)
    assert not np.asarray(pages, np.float32).any()
    places = [shard.data.unsafe_buffer_pointer() for shard in pages.addressable_shards]
    written = jax.jit(lambda p: p.at[5].set(1), donate_argnums=0, out_shardings=sharding)(pages)
    assert [shard.data.unsafe_buffer_pointer() for shard in written.addressable_shards] == places
    assert np.asarray(written, np.float32).sum() == 2 * 16 * 8


HELD = """
import jax, jax.numpy as jnp
from moonshard.models.native.zeros import zeros
def held():
    return next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("VmRSS"))
jax.block_until_ready(jax.jit(lambda: zeros((1024,), jnp.float32))())
before = held()
made = jax.block_until_ready(jax.jit(lambda: zeros((1 << 28,), jnp.float32))())
print(held() - before)
"""


def test_what_is_not_written_takes_no_memory():
    done = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64  # MiB, of 1024
