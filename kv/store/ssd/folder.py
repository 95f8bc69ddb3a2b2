"""A store's folder on a disk: whose it is, of which version and layout, and that one process has it.

    <path>/moonshard-kv             says that all in here is of KV stores, and may be deleted while none runs
    <path>/<digest of a layout>/    one store: identity.json, lock, table and payload

Two models, or one with two layouts, can be given one path: each has its own sub-folder, with a limit of its own, and
the disk has to have room for all of them. What no store put there is never touched: then the path is refused. The lock
is the kernel's (flock), so it ends with its process however that ends; it means little on a network file system.
What is in the table and the payload is known in `extents` and `disk`.
"""

import fcntl
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from moonshard.kv.store.ssd.extents import VERSION
from moonshard.kv.store.ssd.faults import (
    AnotherLayout,
    AnotherVersion,
    FolderInUse,
    FolderUnusable,
    ForeignFolder,
    NotAFolder,
    StoreError,
)

MARKER, IDENTITY, LOCK, TABLE, PAYLOAD = "moonshard-kv", "identity.json", "lock", "table", "payload"

_MARKER_TEXT = b"KV blocks of moonshard. This folder may be deleted while no worker uses it; nothing else is lost.\n"
_UNFINISHED = ".moonshard-"  # how names of files begin that were being written
_BESIDE = "lost+found"  # in the root of many a disk


class _Version(msgspec.Struct, frozen=True):
    version: int


class _Identity(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    layout: str
    block_bytes: int


class Folder:
    """One store's folder, locked by this process until it is closed."""

    def __init__(self, path: Path, lock: int):
        self.path = path
        self._lock: int | None = lock

    def open_file(self, name: str, flags: int = 0) -> int:
        """A descriptor to read and write; OSError."""
        return os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)

    def held_bytes(self) -> int:
        """What the disk has of this store; OSError."""
        return held_bytes(self.path)

    def free_bytes(self) -> int:
        """What the disk has free for this process; OSError."""
        return 0 if self._lock is None else free_bytes(self._lock)

    def is_deleted(self) -> bool:
        """Whether somebody removed its files, or put others there; OSError."""
        return self._lock is not None and os.fstat(self._lock).st_nlink == 0

    def close(self) -> None:
        """Whoever asks next may have it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def free_bytes(of: Path | int) -> int:
    """What the disk of a path, or of an open file, has free for this process; OSError."""
    disk = os.statvfs(of)
    return disk.f_bavail * disk.f_frsize


def held_bytes(path: Path) -> int:
    """What the disk has of all stores under a path; OSError."""
    files = [file for name in (TABLE, PAYLOAD) for file in path.rglob(name)]
    return sum(file.stat().st_blocks * 512 for file in files)


def claim_folder(path: Path) -> None:
    """Makes a path one for stores, where it is none yet. Raises StoreError."""
    try:
        _claim(path)
    except (FileExistsError, NotADirectoryError):
        raise NotAFolder(path) from None
    except OSError as error:
        raise FolderUnusable(path, error) from error


def open_folder(path: Path, *, layout: bytes, block_bytes: int) -> Folder:
    """The folder of one layout's store, made where it is not there yet. Raises StoreError."""
    identity = _Identity(version=VERSION, layout=layout.hex(), block_bytes=block_bytes)
    claim_folder(path)
    try:
        return _open(path / identity.layout, identity)
    except (FileExistsError, NotADirectoryError):
        raise NotAFolder(path) from None
    except OSError as error:
        raise FolderUnusable(path, error) from error


def _claim(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    if MARKER not in (names := os.listdir(path)):
        _check_no_others(path, names, {_BESIDE})
        _write_whole(path / MARKER, _MARKER_TEXT)
    elif (path / MARKER).read_bytes() != _MARKER_TEXT:
        raise ForeignFolder(path, MARKER)


def _open(path: Path, identity: _Identity) -> Folder:
    path.mkdir(exist_ok=True)
    if IDENTITY not in (names := os.listdir(path)):
        _check_no_others(path, names, {LOCK})
    folder = Folder(path, _take_lock(path))
    try:
        if IDENTITY not in os.listdir(path):
            _write_whole(path / IDENTITY, msgspec.json.encode(identity))
        _check_identity(path, identity)
    except (StoreError, OSError):
        folder.close()
        raise
    return folder


def _check_no_others(path: Path, names: Sequence[str], known: set[str]) -> None:
    """`names` are of one look: another process may be claiming the folder, too."""
    found = [name for name in names if name not in known and not name.startswith(_UNFINISHED)]
    if found:
        raise ForeignFolder(path, min(found))


def _check_identity(path: Path, expected: _Identity) -> None:
    text = (path / IDENTITY).read_bytes()
    try:
        version = msgspec.json.decode(text, type=_Version).version
        if version != expected.version:
            raise AnotherVersion(path, found=version, known=expected.version)
        found = msgspec.json.decode(text, type=_Identity)
    except msgspec.DecodeError:
        raise ForeignFolder(path, IDENTITY) from None
    if found != expected:
        raise AnotherLayout(path, found=_in_words(found), expected=_in_words(expected))


def _in_words(identity: _Identity) -> str:
    return f"blocks of {identity.block_bytes} bytes in layout {identity.layout}"


def _take_lock(path: Path) -> int:
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        owner = os.pread(lock, 20, 0).decode(errors="replace")
        os.close(lock)
        raise FolderInUse(path, owner) from None
    except OSError:
        os.close(lock)
        raise
    return lock


def _write_whole(path: Path, text: bytes) -> None:
    """All of it is there, or no file of that name, whenever the process or the machine stops."""
    descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=_UNFINISHED)
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    Path(unfinished).rename(path)
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
