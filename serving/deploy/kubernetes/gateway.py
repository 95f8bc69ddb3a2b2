"""The gateway: a Deployment, which any number of clients reach by one Service, and what Prometheus asks.

Workers that register reach every gateway by another one, which is headless: its name stands for the addresses of all
pods, those that are not ready too, since a gateway becomes ready by the workers that it hears of.

`/health` is 200 as long as the process lives, `/ready` only while some worker can serve and nothing is drained. A pod
that is to end waits first, until it is no longer an endpoint of the Service; then SIGTERM begins the drain, in which
new requests are refused. Host: probes call it localhost, which it always is.
"""

from moonshard.serving.deploy.children.limits import limits_of
from moonshard.serving.deploy.kubernetes.deployment import GATEWAY, REGISTRY, Deployment, Manifest
from moonshard.serving.deploy.kubernetes.paths import written_paths
from moonshard.serving.deploy.kubernetes.pods import Program, configured, pod_template
from moonshard.serving.deploy.kubernetes.secrets import TENANT_KEYS, TLS, used

HTTP, GRPC = "http", "grpc"
WITHDRAWN_WITHIN_S = 5  # of a pod that ends, from what sends requests to it
SCRAPED_EVERY = "15s"


def gateway_manifests(deployment: Deployment) -> list[Manifest]:
    registry = [_registry(deployment)] if deployment.has_registry else []
    return [_service(deployment), *registry, _disruption_budget(deployment), _processes(deployment)]


def service_monitor(deployment: Deployment) -> Manifest:
    """Workers have no metrics of their own: what they tell is in their gateway's. Source: monitoring.coreos.com/v1."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": deployment.metadata(deployment.named(GATEWAY), GATEWAY),
        "spec": {
            "selector": {"matchLabels": deployment.labels(GATEWAY)},
            "endpoints": [{"port": HTTP, "path": "/metrics", "interval": SCRAPED_EVERY}],
        },
    }


def _processes(deployment: Deployment) -> Manifest:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": deployment.metadata(deployment.named(GATEWAY), GATEWAY),
        "spec": {
            "replicas": deployment.num_gateways,
            "selector": {"matchLabels": deployment.labels(GATEWAY)},
            "strategy": _strategy(deployment),
            "template": pod_template(deployment, _program(deployment)),
        },
    }


def _strategy(deployment: Deployment) -> Manifest:
    """A ledger or a folder of batches is one process's: the next one begins when the last has ended."""
    if written_paths(deployment.config, GATEWAY).keys() - {"trace.path"}:
        return {"type": "Recreate"}
    return {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}


def _program(deployment: Deployment) -> Program:
    config = deployment.config
    registry = {REGISTRY: config.gateway.registry_port} if deployment.has_registry else {}
    return Program(
        component=GATEWAY,
        command=configured(GATEWAY),
        ports={HTTP: config.gateway.port, GRPC: config.gateway.grpc_port, **registry},
        probes={
            "startupProbe": {**_asked("/health"), "periodSeconds": 2, "failureThreshold": 60},
            "readinessProbe": {**_asked("/ready"), "periodSeconds": 5, "failureThreshold": 2},
            "livenessProbe": {**_asked("/health"), "periodSeconds": 10, "failureThreshold": 6},
        },
        secrets=used(config, TLS, TENANT_KEYS),
        ends_within_s=limits_of(config).gateway_drain_s,
        waits_s=WITHDRAWN_WITHIN_S,
        devices={},
    )


def _asked(path: str) -> Manifest:
    host = [{"name": "Host", "value": "localhost"}]
    return {"httpGet": {"path": path, "port": HTTP, "httpHeaders": host}, "timeoutSeconds": 5}


def _service(deployment: Deployment) -> Manifest:
    gateway = deployment.config.gateway
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": deployment.metadata(deployment.named(GATEWAY), GATEWAY),
        "spec": {
            "selector": deployment.labels(GATEWAY),
            "ports": [
                {"name": HTTP, "port": gateway.port, "targetPort": HTTP},
                {"name": GRPC, "port": gateway.grpc_port, "targetPort": GRPC, "appProtocol": "kubernetes.io/h2c"},
            ],
        },
    }


def _registry(deployment: Deployment) -> Manifest:
    port = {"name": REGISTRY, "port": deployment.config.gateway.registry_port, "appProtocol": "kubernetes.io/h2c"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": deployment.metadata(deployment.named(REGISTRY), REGISTRY),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": deployment.labels(GATEWAY),
            "ports": [port],
        },
    }


def _disruption_budget(deployment: Deployment) -> Manifest:
    """One at a time: a node can be emptied whatever their number is."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": deployment.metadata(deployment.named(GATEWAY), GATEWAY),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": deployment.labels(GATEWAY)}},
    }
