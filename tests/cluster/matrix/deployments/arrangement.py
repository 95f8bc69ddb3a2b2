"""What the fault matrix is measured on, all with a spare for every worker.

`GANGS`: two prefill and two decode workers of two processes each. `STORE`: two workers that keep blocks in Mooncake
Store, whose master is elsewhere. `RAY`: two gangs that do both, each on a node of Ray's, with a
node to spare; `serve` has one gateway.
"""

from collections.abc import Mapping

from tests import sizes
from tests.cluster.conftest import BLOCK_BYTES, FIXTURE, NUM_SLAB_SLOTS
from tests.cluster.matrix.deployments.commands import MASTER

GANG_TIMEOUT_S = 2.0
OF_ALL: Mapping[str, object] = {
    "model.path": FIXTURE,
    **sizes.SETTINGS,
    "decode.replicas": 2,
    "worker.gang_timeout_s": GANG_TIMEOUT_S,
    "gateway.worker_silence_s": GANG_TIMEOUT_S,
    "gateway.queue_timeout_s": 50.0,
    "kv.slab_bytes": NUM_SLAB_SLOTS * BLOCK_BYTES,
    "kv.quarantine_s": 1.0,
    "kv.transfer_timeout_s": 2.0,
    "kv.allow_unauthenticated": "true",  # on a bridge of its own
    "routing.ttft_slo_s": "none",
    "routing.local_prefill": "static",  # every prompt is handed over
    "routing.failover_wait_s": 60.0,
}
GANGS: Mapping[str, object] = {
    **OF_ALL,
    "mode": "disaggregated",
    "prefill.replicas": 2,
    "prefill.processes": 2,
    "prefill.mesh.tensor": 2,
    "decode.processes": 2,
    "decode.mesh.data": 2,
}
STORE: Mapping[str, object] = {
    **OF_ALL,
    "mode": "aggregated",
    "kv.store.enabled": "true",
    "kv.store.host_bytes": 0,
    "kv.store.dram_bytes": 64 * 1024**2,
}
RAY: Mapping[str, object] = {**OF_ALL, "mode": "aggregated", "decode.processes": 2, "decode.mesh.data": 2}
# The rows of the matrix, and on which arrangement each is measured.
ROWS: Mapping[str, str] = {
    **dict.fromkeys(("gateway", "prefill 0", "prefill 0.1", "decode 0", "decode 0.1"), "gangs"),
    MASTER: "store",
    "Ray node": "ray",
}
ARRANGEMENTS: Mapping[str, Mapping[str, object]] = {"gangs": GANGS, "store": STORE, "ray": RAY}
