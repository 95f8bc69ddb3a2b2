"""Workers of one role: a LeaderWorkerSet, and the headless Service under which each of them has a name that stays.

A LeaderWorkerSet names its pods `NAME-0`, `NAME-1`, ... and those that follow in a gang `NAME-0-1`, ...; without a
Service of its own name it makes one, which has no ports. It tells every container of a gang where the leader is and
which pod this is, and makes all pods of a gang anew when a container of one has ended: by then the processes of the
others have ended too (`gang.watch`), and none of them could join a gang that is there. Followers are not to wait for a
leader that is ready, for that one waits for them. Source: leaderworkerset.x-k8s.io/v1.

Health is gRPC's own service, which asks for no key of the cluster: SERVING once all is there that a request needs. An
open port says less, since it opens before the model is read. A kubelet speaks gRPC without TLS only; with [tls] the
worker lets in whom the authority has signed, so the probe is a process of the pod that shows the pod's certificate.
A follower is asked nothing: its leader serves once all have loaded, and ends with one that is silent or stuck, sooner
than a kubelet would ask again. A follower that is told to end tells its leader, and all of them drain.
"""

from dataclasses import replace

from moonshard.rpc.addresses import host_port
from moonshard.serving.config.faults import has_kv_stream
from moonshard.serving.config.keys import WorkerRole, command_of, mesh_of, port_of, processes_of
from moonshard.serving.deploy.children.limits import limits_of
from moonshard.serving.deploy.kubernetes.configuration import worker_overrides
from moonshard.serving.deploy.kubernetes.deployment import Deployment, Manifest
from moonshard.serving.deploy.kubernetes.pods import Program, configured, pod_template
from moonshard.serving.deploy.kubernetes.secrets import TLS, used

LINK = "link"  # the port at which gateways, and of a KV stream other workers, call
SET_LABEL = "leaderworkerset.sigs.k8s.io/name"
MEMBER = "$(LWS_WORKER_INDEX)"  # which pod of its gang; 0 leads
LEADER = "$(LWS_LEADER_ADDRESS).svc"  # the pod's name, without the cluster's domain: as certificates have it
PERIOD_S = 10
PROBE_TIMEOUT_S = 5
LOADS_WITHIN_S = 3600
MAX_SILENCE_S = 120  # of a process that has been serving; then it is started again


def worker_manifests(deployment: Deployment, role: WorkerRole) -> list[Manifest]:
    return [_headless_service(deployment, role), _worker_set(deployment, role)]


def _worker_set(deployment: Deployment, role: WorkerRole) -> Manifest:
    """A process that ends takes its gang along; alone it is started in its pod."""
    component, size = command_of(role), processes_of(deployment.config, role)
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": deployment.metadata(deployment.named(component), component),
        "spec": {
            "replicas": deployment.num_workers(role),
            "startupPolicy": "LeaderCreated",
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0},  # gateways know their names
            },
            "leaderWorkerTemplate": {
                "size": size,
                "restartPolicy": "None" if size == 1 else "RecreateGroupOnPodRestart",
                **_templates(deployment, role, size),
            },
        },
    }


def _templates(deployment: Deployment, role: WorkerRole, size: int) -> Manifest:
    """One of them is every pod's."""
    leader = pod_template(deployment, _program(deployment, role))
    if size == 1:
        return {"workerTemplate": leader}
    return {"leaderTemplate": leader, "workerTemplate": pod_template(deployment, _follower(deployment, role))}


def _headless_service(deployment: Deployment, role: WorkerRole) -> Manifest:
    component = command_of(role)
    name = deployment.named(component)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": deployment.metadata(name, component),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # gateways wait at a worker that loads, and hear of its drain
            "selector": {SET_LABEL: name},
            "ports": [{"name": LINK, "port": port_of(deployment.config, role), "appProtocol": "kubernetes.io/h2c"}],
        },
    }


def _program(deployment: Deployment, role: WorkerRole) -> Program:
    config, component = deployment.config, command_of(role)
    return Program(
        component=component,
        command=[*configured(component), *worker_overrides(deployment, role)],
        ports={LINK: port_of(config, role)},
        probes=_probes(deployment, role),
        secrets=used(config, TLS),
        ends_within_s=limits_of(config).drain_s,
        devices=_devices(deployment, role),
    )


def _follower(deployment: Deployment, role: WorkerRole) -> Program:
    """It ends with its leader, which may drain for as long as if it were alone. It listens where KV comes by gRPC."""
    leads = _program(deployment, role)
    leader = host_port(LEADER, port_of(deployment.config, role))
    ports = leads.ports if has_kv_stream(deployment.config) else {}
    return replace(leads, command=[*leads.command, "--member", MEMBER, "--leader", leader], ports=ports, probes={})


def _devices(deployment: Deployment, role: WorkerRole) -> dict[str, int]:
    """Of each pod: a gang shares the mesh out equally."""
    if deployment.device is None:
        return {}
    return {deployment.device: mesh_of(deployment.config, role).num_devices // processes_of(deployment.config, role)}


def _probes(deployment: Deployment, role: WorkerRole) -> Manifest:
    asked: Manifest = {**_health(deployment, role), "periodSeconds": PERIOD_S, "timeoutSeconds": PROBE_TIMEOUT_S}
    return {
        "startupProbe": {**asked, "failureThreshold": LOADS_WITHIN_S // PERIOD_S},
        "readinessProbe": {**asked, "failureThreshold": 2},
        "livenessProbe": {**asked, "failureThreshold": MAX_SILENCE_S // PERIOD_S},
    }


def _health(deployment: Deployment, role: WorkerRole) -> Manifest:
    """Who asks. In a probe's command only a shell fills in variables."""
    port = port_of(deployment.config, role)
    if not deployment.config.tls.is_complete:
        return {"grpc": {"port": port}}
    address = host_port(f"$POD_NAME.{deployment.domain(role)}", port)  # what the certificate names
    command = " ".join(configured("probe", f'"{address}"'))
    return {"exec": {"command": ["sh", "-c", f"exec {command}"]}}
