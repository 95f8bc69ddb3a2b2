"""Limits that a machine has no room for are refused before anything loads; what was kept there before is free."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from moonshard.serving.commands.checks.tiers import check_tiers_fit
from moonshard.serving.config.keys import Config, ConfigError, KvConfig, ModelConfig, StoreConfig, WorkerRole
from moonshard.serving.engine.capacity import memory
from tests.kv.store.ssd.blocks_on_disk import chain, keep, open_tier
from tests.kv.store.ssd.mounts import mounted

KIB = 1024
MODEL = ModelConfig(path=Path("m"), name="m")


def faults(roles: Sequence[WorkerRole], **store: object) -> tuple[str, ...]:
    config = Config(model=MODEL, kv=KvConfig(store=StoreConfig(enabled=True, **store)))  # pyright: ignore[reportArgumentType]
    try:
        check_tiers_fit(config, roles)
    except ConfigError as error:
        return error.faults
    return ()


@pytest.mark.parametrize(("num_workers", "fits"), [(1, True), (2, True), (3, False)])
def test_workers_need_memory_for_all_of_them(monkeypatch: pytest.MonkeyPatch, num_workers: int, fits: bool):
    monkeypatch.setattr(memory, "free_memory_bytes", lambda: 25 * 1024**2)
    found = faults(("both",) * num_workers, host_bytes=10 * 1024**2)
    assert [fault.split(":")[0] for fault in found] == ([] if fits else ["kv.store.host_bytes"])


@pytest.mark.parametrize(
    ("roles", "fits"), [(["both"], True), (["prefill", "decode"], True), (["prefill", "prefill", "decode"], False)]
)
def test_workers_need_a_disk_for_all_of_them(tmp_path: Path, roles: list[WorkerRole], fits: bool):
    with mounted(tmp_path, "size=1m"):
        found = faults(roles, host_bytes=0, ssd_path=tmp_path / "kv", ssd_bytes=450 * KIB)
    assert [fault.split(":")[0] for fault in found] == ([] if fits else ["kv.store.ssd_bytes"])


def test_what_they_kept_before_counts_as_free(tmp_path: Path):
    with mounted(tmp_path, "size=1m"):
        for index in range(2):
            tier = open_tier(tmp_path / f"kv/prefill-{index}", 50)
            keep(tier, chain(index, 50))
            tier.close()
        free = os.statvfs(tmp_path)
        assert free.f_bavail * free.f_frsize < 450 * KIB
        assert not faults(["both", "both"], host_bytes=0, ssd_path=tmp_path / "kv", ssd_bytes=450 * KIB)
        assert faults(["both", "both"], host_bytes=0, ssd_path=tmp_path / "kv", ssd_bytes=600 * KIB)


def test_folders_of_others_are_told_by_their_key_and_all_faults_at_once(tmp_path: Path):
    (tmp_path / "kv/prefill-1/thesis").mkdir(parents=True)
    found = faults(["both", "both"], host_bytes=2**50, ssd_path=tmp_path / "kv")
    assert [fault.split(":")[0] for fault in found] == ["kv.store.host_bytes", "kv.store.ssd_path"]
    assert not faults(["both"], host_bytes=0, ssd_path=tmp_path / "kv", ssd_bytes=KIB)
    (tmp_path / "file").write_text("")
    assert "ssd_path" in faults(["both"], host_bytes=0, ssd_path=tmp_path / "file")[0]


def test_nothing_is_asked_of_tiers_that_are_off(tmp_path: Path):
    store = StoreConfig(enabled=False, host_bytes=2**50, ssd_path=tmp_path / "kv", ssd_bytes=2**50)
    check_tiers_fit(Config(model=MODEL, kv=KvConfig(store=store)), ["both"])
    assert not (tmp_path / "kv").exists()
