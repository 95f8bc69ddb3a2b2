"""The key that the gateways and workers of one cluster share: they prove themselves by it, and tenants' blocks are
named by it.

It is a file that only its owner may read, made on first use by whichever process comes first. So processes that one
user starts on one machine share a key without any configuration; other machines are given a copy. Only keys derived
from it are used, one for each purpose, so that none of them reveals another. It cannot be changed while processes run.
"""

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from moonshard.serving.config.keys import Config, ConfigError

MIN_BYTES = 32
MAX_BYTES = 4096
KEY = "cluster.key_file"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterKey:
    """The keys that are derived from the cluster's key, 32 bytes each."""

    proofs: bytes = field(repr=False)  # with which the ends of a call know each other
    salts: bytes = field(repr=False)  # for the names of tenants' blocks
    seeds: bytes = field(repr=False)  # for the draws of requests that may be asked again


def cluster_key(config: Config, environ: Mapping[str, str]) -> ClusterKey:
    """The keys of the configured file, or of the one in the user's state folder. ConfigError for a file that others may
    read.
    """
    return key_of(key_file_of(config, environ))


def key_of(path: Path) -> ClusterKey:
    """ConfigError as above."""
    key = load_key(path)
    return ClusterKey(proofs=_derived(key, "proofs"), salts=_derived(key, "salts"), seeds=_derived(key, "seeds"))


def key_file_of(config: Config, environ: Mapping[str, str]) -> Path:
    """Source of the default: XDG Base Directory Specification, which ignores relative paths."""
    if config.cluster.key_file is not None:
        return config.cluster.key_file
    folder = Path(environ.get("XDG_STATE_HOME", ""))
    if not folder.is_absolute():
        folder = Path(environ.get("HOME") or Path.home()) / ".local" / "state"
    return folder / "moonshard" / "cluster.key"


def load_key(path: Path) -> bytes:
    """What the file holds, without white space at its ends; made with a random key where it is missing.

    Raises:
        ConfigError: it cannot be read or made, is no secret, or holds too little or too much for a key.
    """
    try:
        if not path.exists():
            _make(path)
        text = _read_secret(path)
    except OSError as error:
        raise ConfigError([f"{KEY}: {path}: {error.strerror}; name a file that can be read and made"]) from error
    key = text.strip()
    if not MIN_BYTES <= len(key) <= MAX_BYTES:
        size = f"holds {len(key)} bytes" if len(key) < MIN_BYTES else "is too long"
        raise ConfigError([f"{KEY}: {path} {size}; a key has {MIN_BYTES} to {MAX_BYTES} (`openssl rand -hex 32`)"])
    return key


def _derived(key: bytes, purpose: str) -> bytes:
    return hmac.digest(key, b"moonshard " + purpose.encode(), hashlib.sha256)


def _make(path: Path) -> None:
    """All of it or nothing, and only one of several processes: the others find the first one's."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_hex(MIN_BYTES).encode() + b"\n")
            file.flush()
            os.fsync(handle)
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def _read_secret(path: Path) -> bytes:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or status.st_uid not in (os.geteuid(), 0):
            mode = f"{stat.S_IMODE(status.st_mode):04o}"
            raise ConfigError(
                [f"{KEY}: {path} is open to others (mode {mode}, owner {status.st_uid}): chmod 600, or another file"]
            )
        return file.read(MAX_BYTES + 2)
