"""The cluster's key: made once, for its owner alone, and refused where it is no secret."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moonshard.serving.config.cluster_key import MIN_BYTES, cluster_key, key_file_of, key_of, load_key
from moonshard.serving.config.keys import ClusterConfig, Config, ConfigError, ModelConfig

NUM_AT_ONCE = 16


def a_config(key_file: Path | None = None) -> Config:
    return Config(model=ModelConfig(path=Path(), name="any"), cluster=ClusterConfig(key_file=key_file))


def test_it_is_made_on_first_use_for_its_owner_alone_and_then_stays(tmp_path: Path):
    path = tmp_path / "state" / "moonshard" / "cluster.key"
    key = load_key(path)
    assert len(key) >= MIN_BYTES
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert load_key(path) == key != load_key(tmp_path / "other.key")
    assert [entry.name for entry in path.parent.iterdir()] == ["cluster.key"]


def test_those_who_make_it_at_once_share_one(tmp_path: Path):
    path, barrier = tmp_path / "new" / "cluster.key", threading.Barrier(NUM_AT_ONCE)

    def load() -> bytes:
        barrier.wait()
        return load_key(path)

    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        keys = {future.result() for future in [threads.submit(load) for _ in range(NUM_AT_ONCE)]}
    assert keys == {load_key(path)}


def test_by_default_it_is_in_the_users_state_folder(tmp_path: Path):
    home = {"HOME": str(tmp_path)}
    usual = tmp_path / ".local" / "state" / "moonshard" / "cluster.key"
    assert key_file_of(a_config(), home) == usual
    assert key_file_of(a_config(), home | {"XDG_STATE_HOME": "relative"}) == usual
    assert key_file_of(a_config(), home | {"XDG_STATE_HOME": "/s"}) == Path("/s/moonshard/cluster.key")
    assert key_file_of(a_config(Path("/k")), home) == Path("/k")
    assert cluster_key(a_config(), home) == key_of(usual)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o660, 0o666, 0o610])
def test_one_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int):
    path = tmp_path / "cluster.key"
    load_key(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"cluster\.key_file: .*open to others \(mode {mode:04o}"):
        load_key(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_one_that_belongs_to_another_user_is_refused(tmp_path: Path):
    path = tmp_path / "cluster.key"
    load_key(path)
    os.chown(path, 12_345, -1)
    with pytest.raises(ConfigError, match="owner 12345"):
        load_key(path)


@pytest.mark.parametrize(
    ("text", "said"), [(b"", "holds 0"), (b"k" * 31 + b"\n \n", "holds 31"), (b"k" * 5000, "too long")]
)
def test_one_of_another_size_is_refused(tmp_path: Path, text: bytes, said: str):
    path = tmp_path / "cluster.key"
    path.write_bytes(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=rf"cluster\.key_file: .*{said}"):
        load_key(path)


def test_one_that_cannot_be_made_or_read_is_refused_by_its_name(tmp_path: Path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "cluster.key", tmp_path):
        with pytest.raises(ConfigError, match=r"cluster\.key_file: "):
            load_key(path)


def test_what_is_derived_from_it_differs_by_purpose_and_is_not_shown(tmp_path: Path):
    key = key_of(tmp_path / "cluster.key")
    assert len({key.proofs, key.salts, load_key(tmp_path / "cluster.key")}) == 3
    assert key.proofs.hex() not in repr(key)
    assert "salts" not in repr(key)
