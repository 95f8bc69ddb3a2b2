"""Every manifest is one that an API server takes, and the schemas that say so refuse what it would refuse."""

import copy
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.serving.deploy.kubernetes.described import VARIANTS, objects, of_kind
from tests.serving.deploy.kubernetes.schemas import OLDEST, validate

SECURE = VARIANTS["secure"]


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
@pytest.mark.parametrize("name", VARIANTS)
def test_an_api_server_takes_every_manifest(name: str, version: str):
    for manifest in objects(VARIANTS[name]):
        validate(manifest, version)


def test_of_each_kind_there_is_what_a_deployment_needs():
    kinds = sorted(each["kind"] for each in objects(SECURE))
    workers = ["LeaderWorkerSet"] * 2 + ["Service"] * 2 + ["NetworkPolicy"] * 2
    gateway = ["Deployment", "PodDisruptionBudget", "Service", "ServiceMonitor", "NetworkPolicy"]
    assert kinds == sorted(["ConfigMap", *workers, *gateway])


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "restartPolicy"), "Always"),
        ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "size"), 0),
        ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "groupSize"), 2),
        ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "workerTemplate", "spec", "container"), []),
        ("ServiceMonitor", ("spec", "endpoints"), []),
        ("Deployment", ("spec", "replica"), 2),
        ("NetworkPolicy", ("spec", "ingress", 0, "ports", 0, "port"), []),
    ],
)
def test_a_wrong_field_is_refused(kind: str, path: tuple[str | int, ...], value: object):
    manifest = copy.deepcopy(of_kind(SECURE, kind)[0])
    place: Any = manifest
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        validate(manifest, OLDEST)
