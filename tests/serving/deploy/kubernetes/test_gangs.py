"""A worker of several processes is as many pods: who leads, who follows, and what becomes of all when one ends."""

import pytest

from moonshard.serving.config.keys import WorkerRole, command_of, mesh_of, processes_of, roles_of
from moonshard.serving.deploy.kubernetes.configuration import worker_config
from moonshard.serving.gang.members import member_of
from tests.serving.deploy.kubernetes.described import (
    VARIANTS,
    Object,
    container_in,
    container_of,
    described,
    group_of,
    named,
    template_of,
)
from tests.serving.deploy.kubernetes.reach import reaches, selected

GANGS = VARIANTS["gangs"]
COLLECTIVES = (22, 20_000, 32_768, 60_999)  # whatever a leader or a kernel takes
each_gang = pytest.mark.parametrize("role", roles_of(GANGS.config))


def follower_of(component: str) -> Object:
    return container_in(group_of(GANGS, component)["workerTemplate"])


def test_a_group_has_a_pod_for_each_process_and_one_worker_alone_no_gang():
    groups = {
        name: {command_of(role): group_of(deployment, command_of(role)) for role in roles_of(deployment.config)}
        for name, deployment in VARIANTS.items()
    }
    sizes = {name: {role: group["size"] for role, group in of.items()} for name, of in groups.items()}
    assert sizes["gangs"] == {"prefill": 2, "decode": 4}
    assert sizes["registered"] == {"prefill": 1, "decode": 4}
    assert sizes["plain"] == {"prefill": 1, "decode": 1}
    for group in (group for of in groups.values() for group in of.values()):
        alone = group["size"] == 1
        assert group["restartPolicy"] == ("None" if alone else "RecreateGroupOnPodRestart")
        assert ("leaderTemplate" in group) == (not alone)


def test_followers_are_not_to_wait_for_a_leader_that_waits_for_them():
    assert named(GANGS, "LeaderWorkerSet", "kimi-decode")["spec"]["startupPolicy"] == "LeaderCreated"


@each_gang
def test_followers_run_the_leaders_command_and_are_told_who_they_are_and_who_leads(role: str):
    leads, follows = container_of(GANGS, role)["command"], follower_of(role)["command"]
    assert follows[: len(leads)] == leads
    port = {"prefill": 50071, "decode": 50072}[role]
    assert follows[len(leads) :] == ["--member", "$(LWS_WORKER_INDEX)", "--leader", f"$(LWS_LEADER_ADDRESS).svc:{port}"]
    assert "--member" not in leads


@each_gang
def test_the_leaders_name_is_one_that_its_certificate_and_the_gateways_have(role: WorkerRole):
    """As the set's webhook fills it in: `SET-GROUP.SUBDOMAIN.NAMESPACE`, with the Service of the set's name."""
    domain = GANGS.domain(role)
    [leader] = [word for word in follower_of(role)["command"] if "LWS_LEADER_ADDRESS" in word]
    called = leader.replace("$(LWS_LEADER_ADDRESS)", f"kimi-{role}-0.kimi-{role}.models")
    assert called in GANGS.worker_addresses
    assert called.partition(".")[2].startswith(f"{domain}:")
    assert f"*.{domain}" in GANGS.certificate_names
    service = named(GANGS, "Service", f"kimi-{role}")
    assert service["spec"]["publishNotReadyAddresses"] is True


@each_gang
def test_the_configuration_of_the_pods_has_all_its_members(role: WorkerRole):
    config, num_members = worker_config(GANGS, role), group_of(GANGS, role)["size"]
    assert processes_of(config, role) == num_members
    for index in range(num_members):
        assert member_of(config, role, index, "leader:1" if index else None).num_members == num_members


@each_gang
def test_a_follower_is_asked_for_no_health_and_listens_at_no_port_that_others_know(role: str):
    follower = follower_of(role)
    assert not [key for key in follower if key.endswith("Probe")]
    assert "ports" not in follower


@each_gang
def test_where_kv_comes_by_grpc_a_follower_listens_as_its_leader_does_under_its_own_name(role: WorkerRole):
    deployment = VARIANTS["streaming gangs"]
    leads, follows = (
        container_in(group_of(deployment, role)[template]) for template in ("leaderTemplate", "workerTemplate")
    )
    assert follows["ports"] == leads["ports"]
    assert f'kv.host="$(POD_NAME).{deployment.domain(role)}"' in follows["command"]
    assert f"*.{deployment.domain(role)}" in deployment.certificate_names


@each_gang
def test_but_for_that_its_pod_is_the_leaders(role: str):
    leads, follows = template_of(GANGS, role), group_of(GANGS, role)["workerTemplate"]
    assert follows["metadata"] == leads["metadata"]  # so the same Service and policies are for it
    assert {**follows["spec"], "containers": []} == {**leads["spec"], "containers": []}  # and it may drain as long
    own, others = container_in(follows), dict(container_in(leads))
    assert others.keys() - own.keys() == {"startupProbe", "readinessProbe", "livenessProbe", "ports"}
    assert {key: value for key, value in own.items() if key != "command"}.items() <= others.items()


@each_gang
def test_the_pods_of_a_gang_share_out_the_devices_of_its_mesh(role: WorkerRole):
    num_devices = mesh_of(GANGS.config, role).num_devices
    pods = [container_of(GANGS, role), *[follower_of(role)] * (processes_of(GANGS.config, role) - 1)]
    assert sum(pod["resources"]["limits"]["nvidia.com/gpu"] for pod in pods) == num_devices


@each_gang
def test_members_reach_each_other_wherever_they_listen_and_nobody_else_does(role: str):
    policy = named(GANGS, "NetworkPolicy", f"kimi-{role}")["spec"]
    assert selected(GANGS, policy["podSelector"]["matchLabels"]) == {role}
    for port in COLLECTIVES:
        assert reaches(GANGS, role, role, port)
        assert not any(reaches(GANGS, caller, role, port) for caller in {None, "gateway", "prefill", "decode"} - {role})
        assert not reaches(VARIANTS["plain"], role, role, port)


def test_an_aggregated_worker_can_be_a_gang():
    alone = ("mode=aggregated", "cluster.key_file=/secrets/cluster.key", "kv.network_fence=policies")
    deployment = described(*alone, "decode.mesh={data=2, tensor=2}", "decode.processes=2")
    follows = container_in(group_of(deployment, "worker")["workerTemplate"])["command"]
    assert follows[:2] == ["moonshard", "worker"]
    assert follows[-1] == "$(LWS_LEADER_ADDRESS).svc:50061"
    assert reaches(deployment, "worker", "worker", 40_000)
