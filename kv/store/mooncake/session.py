"""The library, set up for one worker, and the memory through which blocks go."""

import ctypes
import mmap

import numpy as np

from moonshard.kv.slab import Bytes
from moonshard.kv.store.mooncake.answers import answers, is_client_here
from moonshard.kv.store.mooncake.faults import StoreUnavailable
from moonshard.kv.store.mooncake.library import Library, new_library, silence

PROBE_TIMEOUT_S = 0.5  # of a client that is well, on a busy machine


class Session:
    """The library, set up, and the memory that the client maps too."""

    def __init__(self, library: Library, client: str, memory: int, num_rows: int, row_bytes: int):
        """`client`: its host:port. `memory`: where that begins."""
        self.library = library
        self._client = client
        self._memory = memory
        self.lost_since_s: float | None = None  # when it first seemed that the client does not know the memory
        mapped = (ctypes.c_uint8 * (num_rows * row_bytes)).from_address(memory)
        self.rows: Bytes = np.frombuffer(mapped, np.uint8).reshape(num_rows, row_bytes)

    @classmethod
    def open(cls, client: str, *, num_rows: int, row_bytes: int) -> "Session":
        """StoreUnavailable where there is no client, or no memory."""
        if not answers(client, timeout_s=PROBE_TIMEOUT_S):
            raise StoreUnavailable(f"nothing answers at {client}")
        if not is_client_here(client):  # the library would ask whoever it is, with Python's lock held
            raise StoreUnavailable(f"what answers at {client} is no mooncake_client of this machine")
        library = new_library()
        if (code := library.setup_dummy(0, 0, client)) != 0:
            raise StoreUnavailable(f"mooncake_client at {client} refuses: setup returned {code}")
        memory = library.alloc_from_mem_pool(num_rows * row_bytes)
        if memory == 0 or library.register_buffer(memory, num_rows * row_bytes) != 0:
            library.close()
            raise StoreUnavailable(f"mooncake_client at {client} takes no {num_rows * row_bytes} bytes of memory")
        silence()
        return cls(library, client, memory, num_rows, row_bytes)

    def row_address(self, row: int) -> int:
        return self._memory + row * self.rows.shape[1]

    def close(self) -> None:
        """Only where the client answers: with Python's lock held, the library would wait for it for 30 s."""
        if not answers(self._client, timeout_s=PROBE_TIMEOUT_S):
            self.abandon()
            return
        self.library.close()
        self._give_pages_back()

    def abandon(self) -> None:
        """Leaves the library to itself until the process ends, for not even its destructor may run."""
        self._give_pages_back()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.library))

    def _give_pages_back(self) -> None:
        """What is read here from now on is zero."""
        ctypes.CDLL(None).madvise(ctypes.c_void_p(self._memory), ctypes.c_size_t(self.rows.nbytes), mmap.MADV_REMOVE)
