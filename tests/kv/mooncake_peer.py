"""The receiving process of the Mooncake tests: a slab, told through lines of JSON on stdin, answered on stdout."""

import hashlib
import json
import sys

import numpy as np

from moonshard.kv.mooncake import MooncakeConfig, MooncakeTransport
from moonshard.kv.slab import Bytes, Slab
from moonshard.kv.transfer import ChecksumMismatch, copy_verified


class Peer:
    def __init__(self, num_cells: int, cell_bytes: int):
        self.slab = Slab(num_cells, cell_bytes)
        self.private: Bytes = np.empty((0, cell_bytes), np.uint8)
        self.transport = MooncakeTransport.start("127.0.0.1", config=MooncakeConfig())
        self.transport.register(self.slab)

    def where(self) -> list[str | int]:
        return [self.transport.session, self.slab.address]

    def digest(self) -> str:
        return hashlib.sha256(self.slab.bytes.data).hexdigest()

    def private_digests(self) -> list[str]:
        return [hashlib.sha256(copy.data).hexdigest() for copy in self.private]

    def verify(self, cells: list[int], checksums: list[int]) -> int | None:
        """The cell that does not match, or None, and then the copy is kept."""
        try:
            self.private = copy_verified(self.slab, cells, checksums)
        except ChecksumMismatch as mismatch:
            return mismatch.cell
        return None


def main() -> None:
    peer = Peer(int(sys.argv[1]), int(sys.argv[2]))
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        sys.stdout.write(json.dumps(getattr(peer, verb)(*arguments)) + "\n")
        sys.stdout.flush()
    peer.transport.close()


if __name__ == "__main__":
    main()
