"""Large JSON bodies, decoded in a process of their own: msgspec keeps Python's lock, and every stream would wait.

A process for each such body, since they are few: it reads the body to its end, writes what it found and is gone, with
its memory, also where the gateway was killed. It adds its start, some 0.2 s, to a request that has at least a megabyte
to tokenise. Pickled, since what was found is our own structs and is taken over fast: 30 MB of escapes take 213 ms to
decode, and the 15 MB that they are 25 ms to take over (two cores beside other work).

    python -m moonshard.serving.gateway.intake.large_bodies MODULE STRUCT < BODY > PICKLE
"""

import asyncio
import importlib
import logging
import pickle
import subprocess
import sys
from typing import Any

import msgspec

from moonshard.rpc.status import InternalError, InvalidArgument
from moonshard.serving.gateway.openai.body import BodyDecoder

LARGE_BYTES = 1 << 20  # of text; less holds the loop for 1 ms
LARGE_CONTENTS_BYTES = 1 << 22  # of what is made of it: that of 5,400 messages, which hold the loop for 8 ms
MAX_AT_ONCE = 2  # as many as texts are tokenised at once: more would only wait there

logger = logging.getLogger(__name__)


class LargeBodies:
    """Decodes large bodies, a few at once. Belongs to one event loop."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(MAX_AT_ONCE)

    async def decode[T: msgspec.Struct](self, decoder: BodyDecoder[T], body: bytes) -> tuple[T, list[str]]:
        """As `BodyDecoder.decode`. InternalError where the process came to nothing: there may be no memory for it.

        Cancelled before there is room for it, it never begins; later, it takes its room to its end.
        """
        await self._room.acquire()
        running = asyncio.ensure_future(asyncio.to_thread(_decode_apart, decoder.struct, body))
        running.add_done_callback(self._give_room)
        found = await asyncio.shield(running)
        if isinstance(found, InvalidArgument):
            raise found
        return found

    def _give_room(self, done: asyncio.Future[Any]) -> None:
        self._room.release()
        if not done.cancelled():
            done.exception()  # seen, also where nobody waits for it any more


def _decode_apart(struct: type[Any], body: bytes) -> Any:
    """Runs on a thread, which waits in the kernel. Ctrl-C at a terminal is for the gateway, which drains, and not for
    the child.
    """
    argv = [sys.executable, "-m", __name__, struct.__module__, struct.__qualname__]
    done = subprocess.run(argv, input=body, capture_output=True, check=False, start_new_session=True)
    if done.returncode:
        logger.error("decoding a body of %d bytes ended with %d: %s", len(body), done.returncode, done.stderr[-500:])
        raise InternalError(f"a body of {len(body)} bytes could not be decoded")
    return pickle.loads(done.stdout)  # from a process of our own


def main() -> None:
    module, name = sys.argv[1:]
    decoder = BodyDecoder(getattr(importlib.import_module(module), name))
    try:
        found: object = decoder.decode(sys.stdin.buffer.read())
    except InvalidArgument as error:
        found = InvalidArgument(error.message, field=error.field)  # without what caused it
    pickle.dump(found, sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)


if __name__ == "__main__":
    main()
