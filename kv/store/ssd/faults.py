"""Why a store's folder cannot be used: found when it is opened, each with the path and what to do about it.

Later nothing is raised any more: a tier turns what a disk does into misses. Apart, so that whoever reads a
configuration can catch `StoreError` without the rest.
"""

from pathlib import Path


class StoreError(ValueError):
    """A start-up error: the folder at `path` cannot be used as it was asked for."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"{path}: {reason}")
        self.path = path


class FolderUnusable(StoreError):
    """The operating system said no: no permission, a file system that is read-only, a disk that fails."""

    def __init__(self, path: Path, error: OSError):
        super().__init__(path, f"cannot be used as a KV store: {error.strerror or error}")


class NotAFolder(StoreError):
    def __init__(self, path: Path):
        super().__init__(path, "is no folder; name one for the KV store, new or empty")


class ForeignFolder(StoreError):
    """Something is in it that no store put there. It is left as it is."""

    def __init__(self, path: Path, found: str):
        super().__init__(path, f"holds {found!r}, which is not of a KV store: name a new or empty folder")


class AnotherVersion(StoreError):
    def __init__(self, path: Path, *, found: int, known: int):
        super().__init__(
            path, f"has format {found}, this is a moonshard for format {known}: delete it, or name another"
        )


class AnotherLayout(StoreError):
    """A digest of a layout that does not say all of it, or a folder that was renamed."""

    def __init__(self, path: Path, *, found: str, expected: str):
        super().__init__(path, f"holds {found}, expected {expected}: delete it, or name another")


class FolderInUse(StoreError):
    """A folder has one owner at a time."""

    def __init__(self, path: Path, owner: str):
        super().__init__(path, f"is in use by process {owner or 'unknown'}: each worker needs a folder of its own")


class LimitTooSmall(StoreError):
    def __init__(self, path: Path, *, max_bytes: int, least_bytes: int):
        super().__init__(path, f"a limit of {max_bytes} bytes holds no block, the least is {least_bytes}")


class LimitTooLarge(StoreError):
    """`held_bytes` are in these stores already, `free_bytes` has the disk besides."""

    def __init__(self, path: Path, *, max_bytes: int, held_bytes: int, free_bytes: int):
        super().__init__(
            path,
            f"a limit of {max_bytes / 1024**3:.2f} GiB, where the disk has {free_bytes / 1024**3:.2f} GiB free and "
            f"{held_bytes / 1024**3:.2f} GiB are in this store already",
        )
        self.held_bytes = held_bytes
        self.free_bytes = free_bytes


class NoDirectIo(StoreError):
    def __init__(self, path: Path):
        super().__init__(path, "its file system has no direct I/O (O_DIRECT): switch it off")
