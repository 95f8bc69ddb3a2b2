"""Whom the selectors of a deployment's manifests find, and who gets in by its NetworkPolicies, by component."""

from moonshard.serving.deploy.kubernetes.deployment import GATEWAY, Deployment
from tests.serving.deploy.kubernetes.described import Object, of_kind, template_of

SET_LABEL = "leaderworkerset.sigs.k8s.io/name"


def labels_of(deployment: Deployment, component: str) -> dict[str, str]:
    """Of its pods: a LeaderWorkerSet's have one more, with its name."""
    own = template_of(deployment, component)["metadata"]["labels"]
    return own if component == GATEWAY else {**own, SET_LABEL: deployment.named(component)}


def selected(deployment: Deployment, labels: dict[str, str]) -> set[str]:
    """The components whose pods have these labels."""
    return {each for each in deployment.components if labels.items() <= labels_of(deployment, each).items()}


def reaches(deployment: Deployment, caller: str | None, callee: str, port: int) -> bool:
    """Whether NetworkPolicies let in a pod of `caller` (None: of nobody here) at a port of `callee`."""
    pods = labels_of(deployment, callee)
    policies = [each["spec"] for each in of_kind(deployment, "NetworkPolicy")]
    binding = [each for each in policies if each["podSelector"]["matchLabels"].items() <= pods.items()]
    assert all(each["policyTypes"] == ["Ingress"] for each in binding)
    rules = [rule for each in binding for rule in each["ingress"]]
    return not binding or any(_lets_in(deployment, rule, caller, port) for rule in rules)


def _lets_in(deployment: Deployment, rule: Object, caller: str | None, port: int) -> bool:
    calling = {} if caller is None else labels_of(deployment, caller)
    froms = [each["podSelector"]["matchLabels"] for each in rule.get("from", [])]
    is_from = not froms or any(labels.items() <= calling.items() for labels in froms)
    ports = rule.get("ports", [{"port": 1, "endPort": 65535}])
    return is_from and any(each["port"] <= port <= each.get("endPort", each["port"]) for each in ports)
