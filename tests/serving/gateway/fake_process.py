"""A scripted worker in a process of its own, for tests that stop the process: role and epoch (hex) are its arguments.

Its first line of output is the port.
"""

import asyncio
import sys

from tests.serving.gateway.fake_worker import FakeWorker, serving


async def main(role: str, epoch: bytes) -> None:
    """Serve until the process is killed."""
    async with serving(FakeWorker(role=role, epoch=epoch)) as port:
        sys.stdout.write(f"{port}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], bytes.fromhex(sys.argv[2])))
