"""Compiled programs on disk, whole: one that is found here is neither traced nor lowered nor compiled.

jax's own cache keeps what XLA compiled, and asks for the lowered program as its key: a start that finds everything
there still traces and lowers all of it. Here the key is what a program is made of (`compiled.digest` says what
that is), so that nothing of it needs to be made. Processes share a folder: an entry is written beside its place and
moved there, and one that is being made is claimed by a lock that ends with its process. Whatever is wrong with the
folder or with an entry is said once, and the program is compiled anew. Entries hold machine code, as those of jax's
cache do: a folder or an entry that others may write to is not used. What the bytes mean is `compiled.preparation`'s.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

MAGIC = b"moonshard program 1\n"
DIGEST_BYTES = 32
MAX_BYTES = 4 << 30  # of all entries; the longest unused go first
LEFT_S = 86_400.0  # after which whoever wrote beside an entry, or held its lock, is long gone
SUFFIX, LOCK_SUFFIX = ".program", ".lock"

logger = logging.getLogger(__name__)


class ProgramStore:
    """A folder of entries by key. Any number of threads and processes; no method raises for what is on the disk."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._has_complained = False
        self._is_usable: bool | None = None  # None: nobody has looked yet

    def __repr__(self) -> str:
        return f"ProgramStore({str(self.folder)!r})"

    def load(self, key: str) -> bytes | None:
        """What was saved under `key`. None where there is nothing, or nothing whole."""
        if not self._usable():
            return None
        path = self._path(key)
        try:
            with path.open("rb") as entry:
                fault = _stranger(os.fstat(entry.fileno()))
                content = b"" if fault else entry.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.complain(f"{path}: {error.strerror}")
            return None
        if fault is not None:
            self.complain(f"{path} {fault}")
            return None
        body = content[len(MAGIC) + DIGEST_BYTES :]
        if content != _sealed(body):
            self.complain(f"{path} is damaged")
            return None
        with contextlib.suppress(OSError):  # of a cache that can only be read
            os.utime(path)  # it was of use
        return body

    def save(self, key: str, body: bytes) -> None:
        """Whole or not at all."""
        if not self._usable():
            return
        path, partial = self._path(key), self.folder / f"{key}.{os.getpid()}.{threading.get_ident()}.partial"
        try:
            self._make_folder()  # it may have been wiped
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as entry:
                entry.write(_sealed(body))
            partial.replace(path)
        except OSError as error:
            self.complain(f"{error.filename or path}: {error.strerror}")
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    @contextlib.contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        """Whether this thread is now the one that makes the entry, for as long as the block lasts.

        False where another thread or process is making it. Where no lock can be had, True: it is then made twice.
        """
        descriptor = self._open_lock(key)
        if descriptor is None:
            yield True
            return
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError as error:  # a file system without locks
                self.complain(f"{self.folder}: {error.strerror}")
            yield True
            with contextlib.suppress(OSError):  # whoever has this very file open looks for the entry first
                (self.folder / (key + LOCK_SUFFIX)).unlink()
        finally:
            os.close(descriptor)

    def prune(self, max_bytes: int = MAX_BYTES) -> None:
        """Removes what was unused for longest until the rest takes at most `max_bytes`, and what writers left.

        Others may be pruning too, or may have wiped it all.
        """
        if not self._usable():
            return
        for path, found in (*self._found("*.partial"), *self._found(f"*{LOCK_SUFFIX}")):
            if found.st_mtime < time.time() - LEFT_S:
                _remove(path)
        entries = self._found(f"*{SUFFIX}")
        total = sum(found.st_size for _, found in entries)
        for path, found in sorted(entries, key=lambda entry: entry[1].st_mtime):
            if total <= max_bytes:
                break
            _remove(path)
            total -= found.st_size

    def _found(self, pattern: str) -> list[tuple[Path, os.stat_result]]:
        found: list[tuple[Path, os.stat_result]] = []
        for path in self.folder.glob(pattern):
            with contextlib.suppress(OSError):
                found.append((path, path.stat()))
        return found

    def complain(self, fault: str) -> None:
        """Warns once in a process: the next fault is of the same kind, and costs what the first did."""
        if not self._has_complained:
            self._has_complained = True
            logger.warning("the cache of compiled programs: %s; what is not found is compiled", fault)

    def _make_folder(self) -> None:
        """Makes it for its owner alone, whatever permissions new folders get otherwise."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def _path(self, key: str) -> Path:
        return self.folder / (key + SUFFIX)

    def _open_lock(self, key: str) -> int | None:
        if not self._usable():
            return None
        try:
            self._make_folder()
            return os.open(self.folder / (key + LOCK_SUFFIX), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self.complain(f"{error.filename}: {error.strerror}")
            return None

    def _usable(self) -> bool:
        if self._is_usable is None:
            fault = self._fault()
            self._is_usable = fault is None
            if fault is not None:
                self.complain(fault)
        return self._is_usable

    def _fault(self) -> str | None:
        """Why the folder is neither read nor written; None where it is. A folder that is not there yet is made."""
        try:
            self._make_folder()
            found = self.folder.stat()
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        fault = _stranger(found)
        return fault and f"{self.folder} {fault}"


def _stranger(found: os.stat_result) -> str | None:
    """Why what lies there may be another user's, whose machine code would run with this user's rights; None where it is
    not.
    """
    if found.st_uid != os.geteuid():
        return "belongs to another user"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "can be written by other users"
    return None


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _sealed(body: bytes) -> bytes:
    return MAGIC + hashlib.sha256(body).digest() + body
