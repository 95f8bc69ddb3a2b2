"""A scripted worker in a process of its own, for tests that stop the process or want to be alone in theirs.

Its arguments: role and epoch (hex), and if wanted the context in tokens and what a step takes in seconds. Its first
line of output is the port.
"""

import asyncio
import sys

from tests.serving.gateway.fake_worker import FakeWorker, serving


async def main(role: str, epoch: str, context_tokens: str = "", pace_s: str = "") -> None:
    """Serve until the process is killed."""
    worker = FakeWorker(role=role, epoch=bytes.fromhex(epoch))
    worker.welcome.max_context_tokens = int(context_tokens or worker.welcome.max_context_tokens)
    worker.script.pace_s = float(pace_s or 0)
    async with serving(worker) as port:
        sys.stdout.write(f"{port}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
