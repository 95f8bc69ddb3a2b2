"""With `gateway.registry = "grpc"` nobody is told of workers: they find all gateways by one name, and come and go."""

import itertools
from pathlib import Path

import pytest

from moonshard.serving.config.keys import command_of, roles_of
from moonshard.serving.config.reading import load_config_for_others
from moonshard.serving.deploy.kubernetes.configuration import file_of, pods_config
from tests.serving.deploy.kubernetes.described import (
    PLAIN,
    VARIANTS,
    container_of,
    described,
    file_in,
    named,
    of_kind,
)
from tests.serving.deploy.kubernetes.reach import reaches, selected

REGISTERED = VARIANTS["registered"]
COMPONENTS = [command_of(role) for role in roles_of(REGISTERED.config)]


def overrides_of(command: list[str]) -> list[str]:
    return [word for flag, word in itertools.pairwise(command) if flag == "--set"]


def test_a_gateway_listens_for_workers_where_other_pods_reach_it(tmp_path: Path):
    read = load_config_for_others(file_in(tmp_path, file_of(REGISTERED)), here=()).config.gateway
    assert (read.registry, read.registry_host, read.registry_port, read.workers) == ("grpc", "0.0.0.0", 50052, ())
    assert pods_config(VARIANTS["plain"]).gateway.registry_host == "127.0.0.1"


def test_one_name_stands_for_all_gateways_also_for_those_that_have_no_workers_yet():
    service = named(REGISTERED, "Service", "kimi-registry")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert selected(REGISTERED, service["spec"]["selector"]) == {"gateway"}
    [port] = service["spec"]["ports"]
    assert port["port"] in {each["containerPort"] for each in container_of(REGISTERED, "gateway")["ports"]}
    assert [each["metadata"]["name"] for each in of_kind(VARIANTS["plain"], "Service")] == [
        "kimi-gateway",
        "kimi-prefill",
        "kimi-decode",
    ]


@pytest.mark.parametrize("component", COMPONENTS)
def test_workers_are_told_that_name_and_no_gateway_of_any_worker(component: str):
    [port] = named(REGISTERED, "Service", "kimi-registry")["spec"]["ports"]
    told = overrides_of(container_of(REGISTERED, component)["command"])
    assert f'worker.gateways=["kimi-registry.models.svc:{port["port"]}"]' in told
    assert pods_config(REGISTERED).gateway.workers == ()
    assert "kimi-decode" not in file_of(REGISTERED)  # so that there may be more or fewer of them


def test_where_there_are_certificates_workers_announce_what_these_can_name_else_their_address():
    plain = described(*PLAIN, "gateway.registry=grpc")
    told = {each: overrides_of(container_of(each, "decode")["command"]) for each in (plain, REGISTERED)}
    assert not any(word.startswith("worker.announced_host=") for word in told[plain])
    assert 'worker.announced_host="$(POD_NAME).kimi-decode.models.svc"' in told[REGISTERED]
    names = REGISTERED.certificate_names
    assert names == ("*.kimi-prefill.models.svc", "*.kimi-decode.models.svc", "kimi-registry.models.svc")


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_registry_hears_workers_alone(component: str):
    assert reaches(REGISTERED, component, "gateway", 50052)
    assert not any(reaches(REGISTERED, caller, "gateway", 50052) for caller in (None, "gateway"))
    assert not reaches(VARIANTS["plain"], component, "gateway", 50052)
