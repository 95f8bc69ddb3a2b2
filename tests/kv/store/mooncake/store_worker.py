"""Another worker's process in the tests of Mooncake Store, told through lines of JSON on stdin, answered on stdout."""

import json
import sys

from moonshard.kv.store.mooncake.tier import MooncakeStoreConfig, MooncakeStoreTier
from tests.kv.store.mooncake.store_blocks import BLOCK_BYTES, LAYOUT, are_right, await_on, blocks_of, names_of


class Worker:
    def __init__(self, address: str, timeout_s: float):
        config = MooncakeStoreConfig(address=address, timeout_s=timeout_s, rest_s=0.1)
        self.tier = MooncakeStoreTier.start(layout=LAYOUT, block_bytes=BLOCK_BYTES, config=config)

    def await_on(self) -> None:
        await_on(self.tier)

    def find(self, chain: str, num_blocks: int) -> list[bool]:
        return self.tier.find(names_of(chain, num_blocks))

    def fetch(self, chain: str, num_blocks: int) -> list[bool]:
        return are_right(self.tier, names_of(chain, num_blocks))

    def keep(self, chain: str, num_blocks: int) -> list[bool]:
        names = names_of(chain, num_blocks)
        return self.tier.keep(names, blocks_of(names))

    def close(self) -> None:
        self.tier.close()


def main() -> None:
    worker = Worker(sys.argv[1], float(sys.argv[2]))
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        sys.stdout.write(json.dumps(getattr(worker, verb)(*arguments)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
