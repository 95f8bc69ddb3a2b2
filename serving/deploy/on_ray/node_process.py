"""One process of ours on a node: what the actor is that Ray places there. Needs no Ray.

It starts the very command that `moonshard serve` starts on its own machine, with this node's Python, and hands on what
that says, batch by batch, to whoever asks. The process dies with the actor, by SIGKILL: by then Ray has given its
devices to others. The cluster's key lies in memory of the actor's, under a name that its user alone can open.
"""

import asyncio
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from moonshard.serving.deploy.children.child import Child, start_child
from moonshard.serving.deploy.children.tether import tethered
from moonshard.serving.deploy.on_ray.orders import KEY_FILE

MAX_BATCH_BYTES = 64 * 1024  # Ray sends results below 100 KB in its answer, and puts larger ones into its object store
MAX_LINE = 8 * 1024  # characters; the rest of a longer one is lost
MAX_KEPT = 10_000  # that nobody has fetched; then lines are lost

# ("event", event, fields), ("line", text) or, at last, ("ended", exit code)
News = tuple[str, str, Mapping[str, object]] | tuple[str, str] | tuple[str, int]


class NodeProcess:
    """Its methods are called by the driver, over Ray."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._key_file: int | None = None
        self._signal: int | None = None  # the last one sent
        self._kept: deque[tuple[News, int]] = deque()  # with its size in bytes
        self._num_lost = 0
        self._has_news = asyncio.Event()

    async def start(self, argv: Sequence[str], environment: Mapping[str, str], key: str) -> None:
        """`argv`: without its Python. `environment`: beside the node's own. `key`: in hex.

        OSError where it cannot be started.
        """
        self._key_file = _in_memory(bytes.fromhex(key))
        path = f"/proc/{os.getpid()}/fd/{self._key_file}"
        command = [sys.executable, *(word.replace(KEY_FILE, path) for word in argv)]
        self._child = await start_child(
            tethered(command), on_event=self._on_event, on_line=self._on_line, environment=environment
        )
        if self._signal is not None:
            self._child.signal(self._signal)
        self._waiting = asyncio.create_task(self._wait(self._child))

    async def news(self) -> list[News]:
        """What was said since the last call, as soon as there is something; ("ended", code) is the last there is."""
        await self._has_news.wait()
        batch, num_bytes = list[News](), 0
        while self._kept and (not batch or num_bytes + self._kept[0][1] <= MAX_BATCH_BYTES):
            said, size = self._kept.popleft()
            batch.append(said)
            num_bytes += size
        if not self._kept:
            self._has_news.clear()
        return batch

    async def signal(self, number: int) -> None:
        """Also to a process that is just being started."""
        self._signal = number
        if self._child is not None:
            self._child.signal(number)

    async def _wait(self, child: Child) -> None:
        code = await child.wait()
        self._keep(("ended", code))

    def _on_event(self, event: str, fields: dict[str, object]) -> None:
        self._keep(("event", event, fields))

    def _on_line(self, text: str) -> None:
        if len(self._kept) >= MAX_KEPT:
            self._num_lost += 1
            return
        if self._num_lost:
            self._keep(("line", f"moonshard: {self._num_lost} lines of output were not fetched and are lost"))
            self._num_lost = 0
        self._keep(("line", text[:MAX_LINE]))

    def _keep(self, news: News) -> None:
        self._kept.append((news, len(msgspec.json.encode(news))))
        self._has_news.set()


def _in_memory(secret: bytes) -> int:
    """A file without a place on disk, for its owner alone. Linux only."""
    fd = os.memfd_create("cluster.key", os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    os.write(fd, secret)
    return fd
