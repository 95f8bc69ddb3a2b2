"""What is used of the library, and the codes that it answers with.

The only import of it in `kv.store`. What it does is told in the package's docstring.
"""

import contextlib
import ctypes
import importlib
from typing import Protocol, runtime_checkable

from moonshard.kv.mooncake import INSTALL
from moonshard.kv.store.mooncake.faults import StoreUnavailable

HEALTHY = 0  # the client answered when the library last asked, which it does once a second; not so at first
FAILED = -1  # `batch_is_exist`, for every reason
BAD_PARAMETERS = -600
NOT_FOUND = -704
RPC_FAILED = -900  # or less
LOG_THRESHOLD = "_ZN3fLI17FLAGS_minloglevelE"  # glog's variable, as its compiler names it
FATAL = 3  # glog's level of a line behind which the process ends


@runtime_checkable
class Library(Protocol):
    """What is used of mooncake.store.MooncakeDistributedStore; addresses are plain integers."""

    def setup_dummy(self, pool_bytes: int, buffer_bytes: int, address: str, /) -> int: ...
    def alloc_from_mem_pool(self, num_bytes: int, /) -> int: ...
    def register_buffer(self, address: int, num_bytes: int, /) -> int: ...
    def batch_is_exist(self, keys: list[str], /) -> list[int]: ...
    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int], /) -> list[int]: ...
    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int], /) -> list[int]: ...
    def batch_remove(self, keys: list[str], is_forced: bool, /) -> list[int]: ...
    def get_size(self, key: str, /) -> int: ...
    def health_check(self) -> int: ...
    def close(self) -> int: ...


def new_library() -> Library:
    """It logs nothing. StoreUnavailable where it cannot be loaded."""
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise StoreUnavailable(INSTALL.format(error=error)) from error
    silence()
    return MooncakeDistributedStore()


def silence() -> None:
    """Whatever it logs its codes say too, once and not for every key. Its environment can ask for errors or more alone,
    and each part of the library that loads takes that from there anew: those that fail say so by exceptions of ours.
    """
    path = str(importlib.import_module("mooncake.store").__file__)
    with contextlib.suppress(OSError, ValueError):  # another glog
        ctypes.c_int.in_dll(ctypes.CDLL(path), LOG_THRESHOLD).value = FATAL
