"""`-m moonshard.serving.deploy.on_ray.driver`: drives Ray for a launcher, which tells it what to start; see `orders`.

Whatever becomes of the cluster, only this process waits for it or ends by it. It ends when its orders do; then Ray ends
all that it has placed, and a Ray that was started here ends too.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonshard.serving.deploy.children.child import hear
from moonshard.serving.deploy.on_ray.orders import Signal, Start, order_of
from moonshard.serving.deploy.startup import STARTUP_EXIT_CODE
from moonshard.serving.deploy.status_pipe import Status, open_status_pipe

if TYPE_CHECKING:
    from moonshard.serving.deploy.on_ray.placed import Placed

ADDRESS = "--ray-address"
REACH_S = 5.0  # for Ray's port to take a connection; what follows is bounded by the launcher
OBJECT_STORE_BYTES = 80 * 1024**2  # about the least that Ray takes; nothing of ours goes there


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    status = open_status_pipe(options.status_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        connect(options.address, options.folder)
    except (OSError, RuntimeError, ValueError) as error:
        status("failed", {"message": _unreachable(options.address, error), "exit_code": STARTUP_EXIT_CODE})
        return STARTUP_EXIT_CODE
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # there Ray tells what nodes log
            asyncio.run(_drive(options.orders_fd, status))
    finally:
        disconnect()
        if options.address is None:
            shutil.rmtree(options.folder, ignore_errors=True)
    return 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--orders-fd", type=int)
    parser.add_argument("--status-fd", type=int)
    return parser.parse_args(argv)


def connect(address: str | None, folder: Path) -> None:
    """To the Ray at `address`, else to one that is started for this process: on loopback alone, with its files in
    `folder`.

    OSError where nothing listens there; RuntimeError or ValueError with Ray's own words.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if address is None:
        _keep_to_loopback()
        ours: dict[str, Any] = {
            "address": "local",
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_temp_dir": str(folder),
            "_node_ip_address": "127.0.0.1",
        }
    else:
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
        ours = {"address": address}
    import ray  # pyright: ignore[reportMissingImports]

    ray.init(log_to_driver=False, logging_level="ERROR", **ours)


def _keep_to_loopback() -> None:
    """Ray replaces 127.0.0.1 by the machine's own address, and listens on all interfaces at any other, loopback's too;
    unless it is told that it is on a machine that is no cluster's. Those on this machine need a token that is written
    nowhere.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def disconnect() -> None:
    import ray  # pyright: ignore[reportMissingImports]

    ray.shutdown()


async def _drive(orders_fd: int, status: Status) -> None:
    """Until there are no more orders."""
    from moonshard.serving.deploy.on_ray.cluster import Cluster
    from moonshard.serving.deploy.on_ray.placed import Placed

    cluster = Cluster()
    placed: dict[int, Placed] = {}

    def on_order(event: str, fields: dict[str, object]) -> None:
        match order_of(event, fields):
            case Start() as start:
                placed[start.number] = Placed(start, cluster, status)
                placed[start.number].task.add_done_callback(lambda _: placed.pop(start.number))
            case Signal(number=number, signal=sent):
                if number in placed:
                    placed[number].signal(sent)

    status("connected", {"nodes": [dict(node.resources) for node in cluster.nodes()]})
    await hear(orders_fd, on_event=on_order, on_line=lambda _: None)
    await _end_all(list(placed.values()))


async def _end_all(placed: "Sequence[Placed]") -> None:
    for process in placed:
        process.task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*(process.task for process in placed), return_exceptions=True)


def _unreachable(address: str | None, error: Exception) -> str:
    reason = "; ".join(line.strip() for line in str(error).splitlines() if line.strip()) or type(error).__name__
    if address is None:
        return f"--launcher ray: no Ray could be started here: {reason}"
    if isinstance(error, OSError):
        return f"{ADDRESS}: no Ray is reached at {address}: {reason}"
    return f"{ADDRESS}: the Ray at {address} cannot be used: {reason}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
