"""A slab that cannot be is refused by its key, before a transport is started."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from moonshard.serving.config.keys import Config, ConfigError, KvConfig, ModelConfig
from moonshard.serving.config.reading import load_config
from moonshard.serving.engine.loading.model import LoadedModel
from moonshard.serving.transfer import transports as kv_transports
from moonshard.serving.transfer.grpc_stream import SESSION
from moonshard.serving.transfer.transports import KvTransports
from moonshard.sharding.layout import BlockShape, Layout, tile_group

BLOCK = BlockShape(name="kv", dtype="float32", itemsize_bytes=4, block_size=16, num_layers=64, num_features=256)
MODEL = cast(
    LoadedModel,
    SimpleNamespace(
        pool=SimpleNamespace(num_partitions=2),
        block_bytes=1024**2,
        layout=Layout(version=1, groups=(tile_group(BLOCK),)),
        held=({0}, {0}),
    ),
)


def refusal(slab_bytes: int) -> str:
    config = Config(model=ModelConfig(path=Path("kimi"), name="kimi"), kv=KvConfig(slab_bytes=slab_bytes))
    with pytest.raises(ConfigError) as raised:
        KvTransports(config, bytes(32)).open_plane(MODEL, port=0)
    (fault,) = raised.value.faults
    return fault


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "127.0.0.1:7"), ("::1", "[::1]:7")])
def test_peers_find_a_stream_at_an_address_that_they_can_call(host: str, address: str):
    config = load_config(None, ["kv.transport=grpc", f"worker.host={host}"])
    transport = KvTransports(config, bytes(32))._start(7)
    assert SESSION.fullmatch(transport.session)
    assert transport.session.startswith(f"grpc://{address}/")
    transport.close()


def test_a_slab_below_a_block_per_partition_is_refused_by_its_key():
    below = 2 * MODEL.block_bytes - 1
    assert (
        refusal(below)
        == f"kv.slab_bytes: {below} bytes are less than a block of 1048576 bytes for each of 2 partitions"
    )


def test_a_slab_beyond_the_memory_there_is_is_refused_by_its_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kv_transports, "free_memory_bytes", lambda: 1024**3)
    assert refusal(2 * 1024**3).startswith(
        "kv.slab_bytes: a slab of 1024 slots of 2097152 bytes takes 2.00 GiB, and 1.00"
    )
