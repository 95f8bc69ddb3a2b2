"""A Ray cluster of logical nodes on this machine, as a process: `python ray_nodes.py FOLDER ADDRESS=CPUS...`.

The first node is the head. It says where Ray is, and then does what it is told: `remove ADDRESS` removes a node, by
SIGKILL, as when a machine is lost; `objects` tells what lies in the nodes' object stores. Each node has an address of
loopback of its own, since a worker is where its node is.
"""

import sys

from ray._private.internal_api import memory_summary  # pyright: ignore[reportMissingImports]
from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

SOON = {  # a lost node is noticed in a second, and not in half a minute
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 2,
}


def main(folder: str, *nodes: str) -> None:
    head, *others = (node.split("=") for node in nodes)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "node_ip_address": head[0],
            "num_cpus": int(head[1]),
            "include_dashboard": False,
            "temp_dir": folder,
            "_system_config": SOON,
        },
    )
    there = {address: cluster.add_node(node_ip_address=address, num_cpus=int(cpus)) for address, cpus in others}
    print(cluster.address, flush=True)  # noqa: T201
    for line in sys.stdin:
        match line.split():
            case ["remove", address]:
                cluster.remove_node(there.pop(address), allow_graceful=False)
                print("removed", flush=True)  # noqa: T201
            case _:
                stats = memory_summary(cluster.address, stats_only=True).splitlines()
                [used] = [text for text in stats if text.startswith("Plasma memory usage")]
                print(used, flush=True)  # noqa: T201
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
