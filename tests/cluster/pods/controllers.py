"""What a cluster's controllers make of manifests: which pods there are, and by which names its DNS finds them.

LeaderWorkerSet's adds three variables to each container: where the leader is, how many pods a group has, and which of
them this is. Source: leaderworkerset.x-k8s.io/v1 and its webhook for pods.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

type Object = dict[str, Any]

SET_LABEL = "leaderworkerset.sigs.k8s.io/name"


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A pod that is to be there."""

    name: str
    group: str  # of those that are made anew together; of a pod alone its own name
    spec: Object
    labels: Mapping[str, str]
    subdomain: str = ""  # the headless Service under which it has a name
    variables: Mapping[str, str] = field(default_factory=dict[str, str])


def planned(objects: Iterable[Object]) -> Iterator[Planned]:
    for each in objects:
        if each["kind"] == "LeaderWorkerSet":
            yield from _groups(each)
        elif each["kind"] == "Deployment":
            yield from _replicas(each)


def names(objects: Iterable[Object], pods: Sequence[tuple[Planned, str]]) -> list[str]:
    """Rows of /etc/hosts, for pods and their addresses: a headless Service is all of its pods, others the first one."""
    rows = list[str]()
    for each in objects:
        if each["kind"] != "Service":
            continue
        service, spec = each["metadata"]["name"], each["spec"]
        domain = f"{service}.{each['metadata']['namespace']}.svc"
        own = [(pod, at) for pod, at in pods if spec["selector"].items() <= pod.labels.items()]
        if spec.get("clusterIP") != "None":
            rows.append(f"{own[0][1]} {domain}")
            continue
        assert spec["publishNotReadyAddresses"]  # else there would be no row before a pod is ready
        rows += [f"{at} {domain}" for _, at in own]
        rows += [f"{at} {pod.name}.{domain}" for pod, at in own if pod.subdomain == service]
    return rows


def _groups(workers: Object) -> Iterator[Planned]:
    name, spec = workers["metadata"]["name"], workers["spec"]
    group = spec["leaderWorkerTemplate"]
    for index in range(spec["replicas"]):
        leader = f"{name}-{index}"
        for member in range(group["size"]):
            template = group["workerTemplate"] if member else group.get("leaderTemplate", group["workerTemplate"])
            own = f"{leader}-{member}" if member else leader
            yield Planned(
                name=own,
                group=leader if group["restartPolicy"] == "RecreateGroupOnPodRestart" else own,
                spec=template["spec"],
                labels={**template["metadata"]["labels"], SET_LABEL: name},
                subdomain=name,
                variables={
                    "LWS_LEADER_ADDRESS": f"{leader}.{name}.{workers['metadata']['namespace']}",
                    "LWS_GROUP_SIZE": str(group["size"]),
                    "LWS_WORKER_INDEX": str(member),
                },
            )


def _replicas(deployment: Object) -> Iterator[Planned]:
    template = deployment["spec"]["template"]
    for index in range(deployment["spec"]["replicas"]):
        name = f"{deployment['metadata']['name']}-{index:x}"
        yield Planned(name=name, group=name, spec=template["spec"], labels=template["metadata"]["labels"])
