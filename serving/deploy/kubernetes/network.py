"""Who reaches whom: clients the gateway alone, the gateway workers' links, and workers each other, at links and KV;
and its registry, where it has one, workers alone.

Mooncake's ports ask nobody who they are. These NetworkPolicies close them to all but workers of the same deployment, in
a cluster whose network enforces policies: elsewhere they are words. So `kv.network_fence` is still the user's to say. A
kubelet reaches the pods of its node whatever policies say, and so do its probes.

The members of a gang meet at a port that their leader takes as it comes, jax's coordination service, and their
collectives, gloo's and NCCL's, listen at what the kernel gives them. So pods of a role that has gangs reach each other
at all ports, also those of different gangs: which pods are of one no policy can say for groups that come and go.
"""

from moonshard.serving.config.faults import has_mooncake
from moonshard.serving.config.keys import WorkerRole, command_of, port_of, processes_of, roles_of
from moonshard.serving.deploy.kubernetes.deployment import GATEWAY, Deployment, Manifest


def network_policies(deployment: Deployment) -> list[Manifest]:
    roles = roles_of(deployment.config)
    return [_gateway_policy(deployment), *(_worker_policy(deployment, role) for role in roles)]


def _gateway_policy(deployment: Deployment) -> Manifest:
    gateway = deployment.config.gateway
    from_clients: Manifest = {"ports": [_port(gateway.port), _port(gateway.grpc_port)]}
    from_workers: Manifest = {"from": _workers(deployment), "ports": [_port(gateway.registry_port)]}
    return _policy(deployment, GATEWAY, [from_clients, from_workers] if deployment.has_registry else [from_clients])


def _worker_policy(deployment: Deployment, role: WorkerRole) -> Manifest:
    config = deployment.config
    link = _port(port_of(config, role))
    from_gateway: Manifest = {"from": [_pods(deployment, GATEWAY)], "ports": [link]}
    kv = [_port(*config.kv.ports)] if has_mooncake(config) and config.kv.ports is not None else []
    from_workers: Manifest = {"from": _workers(deployment), "ports": [link, *kv]}
    from_gang: Manifest = {"from": [_pods(deployment, command_of(role))]}
    rules = [from_gateway, from_workers]
    return _policy(deployment, command_of(role), [*rules, from_gang] if processes_of(config, role) > 1 else rules)


def _policy(deployment: Deployment, component: str, rules: list[Manifest]) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": deployment.metadata(deployment.named(component), component),
        "spec": {
            "podSelector": {"matchLabels": deployment.labels(component)},
            "policyTypes": ["Ingress"],
            "ingress": rules,
        },
    }


def _workers(deployment: Deployment) -> list[Manifest]:
    return [_pods(deployment, command_of(role)) for role in roles_of(deployment.config)]


def _pods(deployment: Deployment, component: str) -> Manifest:
    """Of the same namespace."""
    return {"podSelector": {"matchLabels": deployment.labels(component)}}


def _port(first: int, last: int | None = None) -> Manifest:
    port: Manifest = {"protocol": "TCP", "port": first}
    return port if last is None else {**port, "endPort": last}
