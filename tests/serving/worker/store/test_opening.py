"""A worker that comes back to less room than it was given serves with smaller tiers, or without, and says so."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moonshard.kv.store.host import HostTier
from moonshard.kv.store.ssd.files import FileTier
from moonshard.kv.store.tier import Tier
from moonshard.serving.config.keys import ConfigError, StoreConfig
from moonshard.serving.worker.store import opening
from tests.kv.store.ssd.blocks_on_disk import BLOCK_BYTES, blocks, chain, fetch, keep
from tests.kv.store.ssd.mounts import mounted

ROOM = 100  # blocks, of a disk of 1 MiB


def a_model() -> Any:
    """What `open_tiers` asks of one."""
    block = SimpleNamespace(dtype="uint8", block_size=4, num_layers=1, num_features=1250)
    return SimpleNamespace(
        shapes=SimpleNamespace(groups=SimpleNamespace(is_plain=True)),
        block_bytes=BLOCK_BYTES,
        layout=SimpleNamespace(groups=[SimpleNamespace(block=block)]),
        draft_fingerprint="",
    )


def opened(config: StoreConfig) -> list[Tier]:
    stack = opening.open_tiers(config, "both", a_model())
    return [] if stack is None else list(stack._tiers)


def with_files(path: Path, ssd_bytes: int = ROOM * 8192) -> StoreConfig:
    return StoreConfig(enabled=True, host_bytes=0, ssd_path=path / "kv", ssd_bytes=ssd_bytes)


def files_in(path: Path) -> FileTier:
    [tier] = opened(with_files(path))
    assert isinstance(tier, FileTier)
    return tier


def leave(disk: Path, num_bytes: int) -> None:
    """Others take all of a disk but that."""
    free = os.statvfs(disk)
    (disk / "others").write_bytes(bytes(free.f_bavail * free.f_frsize - num_bytes))


def test_a_disk_that_others_filled_makes_the_files_fewer_and_loses_none(tmp_path: Path, caplog):
    with mounted(tmp_path, "size=1m"):
        tier, names = files_in(tmp_path), chain(0, 40)
        max_blocks = tier.max_blocks
        assert all(keep(tier, names))
        tier.close()
        leave(tmp_path, 160 * 1024)
        tier = files_in(tmp_path)
        assert 45 <= tier.max_blocks <= 50 < max_blocks  # those that are there, and half of what is left
        assert all(fetch(tier, names))
        tier.close()
        assert "kv.store.ssd_bytes" in caplog.text


def test_a_disk_without_room_for_a_block_makes_it_no_tier(tmp_path: Path, caplog):
    with mounted(tmp_path, "size=1m"):
        files_in(tmp_path).close()
        (tmp_path / "kv/prefill-0").rename(tmp_path / "gone")
        leave(tmp_path, 8 * 1024)
        assert opened(with_files(tmp_path)) == []
        assert "there is no tier of files until the next start" in caplog.text


@pytest.mark.parametrize("prepare", ["read-only", "full"])
def test_a_disk_that_says_no_makes_it_no_tier(tmp_path: Path, caplog, prepare: str):
    with mounted(tmp_path, "size=1m" if prepare == "full" else "size=1m,ro"):
        if prepare == "full":
            leave(tmp_path, 0)
        assert opened(with_files(tmp_path)) == []
    assert "kv.store.ssd_path" in caplog.text


def test_what_is_not_for_room_is_refused_by_its_key(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"kv\.store\.ssd_bytes: .* holds no block"):
        opened(with_files(tmp_path, ssd_bytes=100))
    with pytest.raises(ConfigError, match=r"kv\.store\.host_bytes: 100 bytes hold no block"):
        opened(StoreConfig(enabled=True, host_bytes=100))
    (tmp_path / "theirs/kv/prefill-0/thesis").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"kv\.store\.ssd_path: .*thesis"):
        opened(with_files(tmp_path / "theirs"))


@pytest.mark.parametrize(("free_blocks", "num_blocks"), [(100, 50), (60, 30), (1, None)])
def test_a_machine_with_less_memory_makes_the_host_tier_smaller(
    monkeypatch: pytest.MonkeyPatch, free_blocks: int, num_blocks: int | None
):
    monkeypatch.setattr(opening, "free_memory_bytes", lambda: free_blocks * BLOCK_BYTES)
    tiers = opened(StoreConfig(enabled=True, host_bytes=101 * BLOCK_BYTES))
    if num_blocks is None:
        assert tiers == []
        return
    [tier] = tiers
    assert isinstance(tier, HostTier)
    names = chain(0, 101)
    assert sum(tier.keep(names, blocks(names))) == num_blocks
