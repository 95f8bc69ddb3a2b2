"""What the manifests of a deployment say holds together: names, addresses, ports, files, times, who reaches whom."""

import math
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from moonshard.serving.config.faults import has_kv_stream, has_mooncake
from moonshard.serving.config.keys import command_of, roles_of
from moonshard.serving.config.reading import load_config_for_others
from moonshard.serving.deploy.children.limits import limits_of
from moonshard.serving.deploy.kubernetes.configuration import file_of, pods_config
from moonshard.serving.deploy.kubernetes.deployment import GATEWAY, Deployment
from moonshard.serving.deploy.kubernetes.paths import read_paths, written_paths
from tests.serving.deploy.kubernetes.described import (
    MODEL,
    NAMESPACE,
    PLAIN,
    SECURE,
    VARIANTS,
    container_of,
    described,
    file_in,
    group_of,
    named,
    objects,
    of_kind,
    template_of,
)
from tests.serving.deploy.kubernetes.reach import reaches, selected

each_variant = pytest.mark.parametrize("deployment", VARIANTS.values(), ids=VARIANTS)


@each_variant
def test_pods_read_the_configuration_that_was_meant(deployment: Deployment, tmp_path: Path):
    read = load_config_for_others(file_in(tmp_path, file_of(deployment)), here=()).config
    assert read == pods_config(deployment)
    [config] = of_kind(deployment, "ConfigMap")
    assert config["data"] == {"moonshard.toml": file_of(deployment)}
    for component in deployment.components:
        spec, container = template_of(deployment, component)["spec"], container_of(deployment, component)
        [name] = [each["name"] for each in spec["volumes"] if each.get("configMap", {}).get("name") == "kimi-config"]
        [mount] = [each for each in container["volumeMounts"] if each["name"] == name]
        assert container["command"][:4] == ["moonshard", component, "--config", f"{mount['mountPath']}/moonshard.toml"]


def test_of_the_users_file_only_addresses_and_paths_of_secrets_change():
    deployment = VARIANTS["secure"]
    config, ours = deployment.config, pods_config(deployment)
    same = ("mode", "model", "routing", "prefill", "decode", "kv", "worker", "trace", "speculation", "batches")
    assert [getattr(ours, name) for name in same] == [getattr(config, name) for name in same]
    assert ours.gateway.host == "0.0.0.0"
    assert "model.path" not in file_of(VARIANTS["plain"])  # the image has the embedded one at a place of its own


@each_variant
def test_gateways_call_each_worker_by_a_name_that_its_pod_has_and_at_the_port_where_it_listens(deployment: Deployment):
    found = set()
    for role in roles_of(deployment.config):
        workers = named(deployment, "LeaderWorkerSet", deployment.named(command_of(role)))
        service = named(deployment, "Service", workers["metadata"]["name"])  # of the same name, else LWS makes another
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is True
        assert selected(deployment, service["spec"]["selector"]) == {command_of(role)}
        [port] = service["spec"]["ports"]
        [open_port] = container_of(deployment, command_of(role))["ports"]
        assert port["port"] == open_port["containerPort"]
        names = (f"{workers['metadata']['name']}-{index}" for index in range(workers["spec"]["replicas"]))
        found |= {f"{name}.{service['metadata']['name']}.{NAMESPACE}.svc:{port['port']}" for name in names}
    assert set(pods_config(deployment).gateway.workers) == (set() if deployment.has_registry else found)


@each_variant
def test_a_worker_is_told_its_pods_address_and_has_it_from_kubernetes(deployment: Deployment):
    for role in roles_of(deployment.config):
        container = container_of(deployment, command_of(role))
        told = container["command"][4:]
        assert told[:2] == ["--set", 'worker.host="$(POD_IP)"']
        fields = {
            each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in container["env"] if "value" not in each
        }
        assert fields == {"POD_IP": "status.podIP", "POD_NAME": "metadata.name"}
        by_name = f'kv.host="$(POD_NAME).{deployment.domain(role)}"'
        assert (by_name in told) == has_kv_stream(deployment.config)


@each_variant
def test_selectors_find_the_pods_they_are_for_and_no_others(deployment: Deployment):
    service = named(deployment, "Service", "kimi-gateway")
    [budget] = of_kind(deployment, "PodDisruptionBudget")
    [processes] = of_kind(deployment, "Deployment")
    for labels in (
        service["spec"]["selector"],
        *(each["spec"]["selector"]["matchLabels"] for each in (budget, processes)),
    ):
        assert selected(deployment, labels) == {GATEWAY}
    [monitor] = of_kind(deployment, "ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    services = of_kind(deployment, "Service")
    assert [each for each in services if wanted <= each["metadata"]["labels"].items()] == [service]
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    ports = {port["name"]: port["containerPort"] for port in container_of(deployment, GATEWAY)["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == ports.keys() - {"registry"}
    gateway = deployment.config.gateway
    registry = {"registry": gateway.registry_port} if deployment.has_registry else {}
    assert ports == {"http": gateway.port, "grpc": gateway.grpc_port, **registry}


def test_two_deployments_of_one_namespace_have_nothing_in_common():
    one, other = described(*PLAIN), described(*PLAIN, name="qwen")
    assert selected(other, one.labels()) == set()
    keys = [{(each["kind"], each["metadata"]["name"]) for each in objects(each)} for each in (one, other)]
    assert not keys[0] & keys[1]


@each_variant
def test_kv_and_links_are_fenced(deployment: Deployment):
    config = deployment.config
    workers = [command_of(role) for role in roles_of(config)]
    kv = (16000, 16003, 16007) if has_mooncake(config) else ()
    for callee in workers:
        link = container_of(deployment, callee)["ports"][0]["containerPort"]
        for port in (*kv, link):
            assert not reaches(deployment, None, callee, port)
            assert all(reaches(deployment, caller, callee, port) for caller in workers)
        assert reaches(deployment, GATEWAY, callee, link)
        assert not any(reaches(deployment, GATEWAY, callee, port) for port in (*kv, 15999, 16008))
        strangers = [each for each in workers if each != callee or group_of(deployment, callee)["size"] == 1]
        assert not any(reaches(deployment, each, callee, port) for each in strangers for port in (15999, 16008, 22))


@each_variant
def test_clients_reach_the_gateway_at_its_ports_and_nothing_else(deployment: Deployment):
    gateway = deployment.config.gateway
    assert all(reaches(deployment, None, GATEWAY, port) for port in (gateway.port, gateway.grpc_port))
    assert not any(reaches(deployment, None, GATEWAY, port) for port in (22, gateway.registry_port))


@pytest.mark.parametrize("drain_s", [0.5, 20.0, 600.0])
def test_a_pod_is_given_the_time_that_its_drain_may_take(drain_s: float):
    deployment = described(*PLAIN, f"gateway.drain_timeout_s={drain_s}")
    limits = limits_of(deployment.config)
    gateway, worker = (template_of(deployment, each)["spec"] for each in (GATEWAY, "decode"))
    withdrawn_s = container_of(deployment, GATEWAY)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert withdrawn_s > 0
    assert gateway["terminationGracePeriodSeconds"] == withdrawn_s + math.ceil(limits.gateway_drain_s)
    assert worker["terminationGracePeriodSeconds"] == math.ceil(limits.drain_s) > drain_s


def test_a_gateway_lives_by_its_health_and_takes_requests_by_its_readiness():
    container = container_of(described(*PLAIN, "gateway.port=80"), GATEWAY)
    asked = {name: probe["httpGet"]["path"] for name, probe in container.items() if name.endswith("Probe")}
    assert asked == {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}
    assert container["readinessProbe"]["httpGet"]["port"] == "http"


def test_workers_are_asked_by_the_kubelet_or_by_themselves_where_they_ask_for_a_certificate():
    plain, secure = (container_of(VARIANTS[name], "decode")["readinessProbe"] for name in ("plain", "secure"))
    assert plain["grpc"] == {"port": 50072}
    [*shell, command] = secure["exec"]["command"]
    assert shell == ["sh", "-c"]
    assert '"$POD_NAME.kimi-decode.models.svc:50072"' in command


def test_a_worker_has_an_hour_to_load_and_is_not_given_up_meanwhile():
    probe = container_of(VARIANTS["plain"], "prefill")["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 3600


@each_variant
def test_whatever_is_mounted_is_there_and_whatever_comes_from_files_is_mounted(deployment: Deployment):
    for component in deployment.components:
        spec = template_of(deployment, component)["spec"]
        volumes = {each["name"] for each in spec["volumes"]}
        for container in (*spec["containers"], *spec["initContainers"]):
            assert {each["name"] for each in container["volumeMounts"]} <= volumes
        mounts = {
            PurePosixPath(each["mountPath"]): each for each in container_of(deployment, component)["volumeMounts"]
        }
        for path in written_paths(deployment.config, component).values():
            [mount] = [mount for folder, mount in mounts.items() if PurePosixPath(path).is_relative_to(folder)]
            assert not mount.get("readOnly")
        for path in read_paths(deployment.config, component).values():
            assert any(PurePosixPath(path).is_relative_to(folder) for folder in mounts)


def test_a_claim_is_mounted_where_something_in_it_is_used_and_for_writing_where_it_is_written():
    deployment = VARIANTS["files"]
    found: dict[str, dict[str, bool]] = {}
    for component in deployment.components:
        volumes: list[Any] = template_of(deployment, component)["spec"]["volumes"]
        claims = [each["persistentVolumeClaim"] for each in volumes if "persistentVolumeClaim" in each]
        found[component] = {each["claimName"]: each.get("readOnly", False) for each in claims}
    worker = {"models": True, "rows": False, "blocks": False}
    assert found == {GATEWAY: {"models": True, "data": False, "rows": False}, "prefill": worker, "decode": worker}


def test_a_gateway_with_files_of_its_own_ends_before_the_next_begins():
    of = {name: named(VARIANTS[name], "Deployment", "kimi-gateway")["spec"]["strategy"] for name in ("files", "plain")}
    assert of["files"] == {"type": "Recreate"}
    assert of["plain"]["rollingUpdate"]["maxUnavailable"] == 0


def test_pods_of_another_configuration_are_others():
    digests = {
        template_of(each, "decode")["metadata"]["annotations"]["moonshard/configuration"]
        for each in (described(*PLAIN), described(*PLAIN, "decode.max_slots=32"), described(*PLAIN))
    }
    assert len(digests) == 2


def test_a_worker_takes_a_device_for_each_place_of_its_mesh():
    deployment = VARIANTS["secure"]
    limits = {each: container_of(deployment, each).get("resources", {}).get("limits") for each in deployment.components}
    assert limits == {GATEWAY: None, "prefill": {"nvidia.com/gpu": 4}, "decode": {"nvidia.com/gpu": 4}}
    assert "resources" not in container_of(VARIANTS["plain"], "decode")


def test_replicas_are_those_of_the_configuration():
    deployment = described(*SECURE, *MODEL, "prefill.replicas=2")
    found = {each["metadata"]["name"]: each["spec"]["replicas"] for each in of_kind(deployment, "LeaderWorkerSet")}
    assert found == {"kimi-prefill": 2, "kimi-decode": 3}
