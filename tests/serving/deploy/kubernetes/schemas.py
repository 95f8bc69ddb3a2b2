"""Whether an API server would take a manifest: Kubernetes' own schemas for its kinds, ours for those of others.

Strict: a field that is not known is a fault. Ours have the fields that manifests of ours use, and every constraint that
the definitions have on these. Sources: leaderworkerset.x-k8s.io/v1 (LWS, api/leaderworkerset/v1),
monitoring.coreos.com/v1 (prometheus-operator, ServiceMonitor and Endpoint).
"""

from typing import Any

import jsonschema
import kubernetes_validate

OLDEST = "1.30"  # the first that knows `sleep` before it is asked to


def _closed(required: list[str], **properties: object) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


TEXT: dict[str, object] = {"type": "string"}
TEXTS: dict[str, object] = {"type": "object", "additionalProperties": TEXT}
COUNT: dict[str, object] = {"type": "integer", "minimum": 0}
NAME: dict[str, object] = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
METADATA = _closed(["name", "namespace"], name=NAME, namespace=NAME, labels=TEXTS, annotations=TEXTS)
DURATION: dict[str, object] = {"type": "string", "pattern": "^([0-9]+(y|w|d|h|m|s|ms))+$"}

ROLLING = _closed([], partition=COUNT, maxUnavailable=COUNT, maxSurge=COUNT)
ROLLOUT = _closed(["type"], type={"enum": ["RollingUpdate"]}, rollingUpdateConfiguration=ROLLING)
GROUP = _closed(
    ["workerTemplate"],
    size={"type": "integer", "minimum": 1},
    restartPolicy={"enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
    leaderTemplate={"type": "object"},  # checked as a PodTemplate
    workerTemplate={"type": "object"},
)
LEADER_WORKER_SET = _closed(
    ["leaderWorkerTemplate"],
    replicas=COUNT,
    startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
    rolloutStrategy=ROLLOUT,
    leaderWorkerTemplate=GROUP,
)
ENDPOINT = _closed(["port"], port=TEXT, path=TEXT, interval=DURATION)
SERVICE_MONITOR = _closed(
    ["selector", "endpoints"],
    selector=_closed(["matchLabels"], matchLabels=TEXTS),
    endpoints={"type": "array", "items": ENDPOINT, "minItems": 1},
)
OTHERS = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): LEADER_WORKER_SET,
    ("monitoring.coreos.com/v1", "ServiceMonitor"): SERVICE_MONITOR,
}


def validate(manifest: dict[str, Any], version: str) -> None:
    """jsonschema.ValidationError says what is wrong with it."""
    spec = OTHERS.get((manifest["apiVersion"], manifest["kind"]))
    if spec is None:
        kubernetes_validate.validate(manifest, version, strict=True)
        return
    whole = _closed(
        ["apiVersion", "kind", "metadata", "spec"], apiVersion=TEXT, kind=TEXT, metadata=METADATA, spec=spec
    )
    jsonschema.validate(manifest, whole)
    group = manifest["spec"].get("leaderWorkerTemplate", {})
    for template in (group[name] for name in ("leaderTemplate", "workerTemplate") if name in group):
        pods = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pods"}, "template": template}
        kubernetes_validate.validate(pods, version, strict=True)
