"""A deployment that cannot run in pods is refused, each fault by its key or option, and all of them at once."""

from pathlib import Path

import pytest

from moonshard.serving import cli
from tests.serving.deploy.kubernetes.described import FILES, PLAIN, TLS, VOLUMES, faults_of

MOONCAKE = PLAIN[:2]
GANG = ["mode=aggregated", "decode.mesh.data=2", "decode.processes=2"]


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("gateway.port", ["gateway.port=0"]),
        ("gateway.grpc_port", ["gateway.grpc_port=0"]),
        ("prefill.port", ["prefill.port=0"]),
        ("decode.port", ["decode.port=0"]),
        ("worker.port", ["mode=aggregated", "worker.port=0"]),
        ("gateway.host", ["gateway.host=127.0.0.1"]),
        ("gateway.host", ["gateway.host=10.0.0.1"]),
        ("worker.host", ["worker.host=localhost"]),
        ("kv.host", ["kv.host=10.0.0.1"]),
        ("gateway.workers", ['gateway.workers=["a:1"]']),
        ("gateway.workers", ["gateway.registry=grpc", 'gateway.workers=["a:1"]']),
        ("gateway.registry_host", ["gateway.registry=grpc", "gateway.registry_host=10.0.0.1"]),
        ("gateway.registry_port", ["gateway.registry=grpc", "gateway.registry_port=0"]),
        ("gateway.registry_port", ["gateway.registry=grpc", "gateway.registry_port=8000"]),
        ("worker.gateways", ['worker.gateways=["gateways:50052"]']),
        ("worker.gateways", ["gateway.registry=grpc", 'worker.gateways=["gateways:50052"]']),
        ("worker.announced_host", ["gateway.registry=grpc", "worker.announced_host=me"]),
        ("gateway.allowed_hosts", ['gateway.allowed_hosts=["api.example.com"]']),
        ("kv.ports", ["kv.ports=auto"]),
        ("kv.ports", ["kv.ports=[16000, 16000]"]),
        ("cluster.key_file", ["cluster.key_file=auto"]),
        ("kv.store.dram_bytes", ["kv.store.enabled=true", "kv.store.dram_bytes=67108864"]),
        ("kv.store.client", ["kv.store.enabled=true", "kv.store.client=store:5000"]),
        ("tls.key", ["tls.cert=/a.pem", "tls.ca=/b.pem"]),
        ("model.path", ["model.path=my-kimi"]),
        ("gateway.ledger", ["gateway.ledger=/ledger"]),
        ("trace.path", ["trace.path=/rows"]),
        ("kv.store.ssd_path", ["kv.store.enabled=true", "kv.store.ssd_path=/ssd"]),
        ("prefill.chunk_tokens", ["prefill.chunk_tokens=100"]),
        ("decode.max_slots", ["decode.max_slots=none"]),
        ("decode.processes", [*GANG, "decode.processes=3"]),
        ("decode.processes", [*GANG, "decode.mesh.data=1", "decode.mesh.tensor=2", "kv.store.enabled=true"]),
        ("decode.processes", [*GANG, "decode.mesh.data=1", "decode.mesh.tensor=2", "decode.mesh.pipe=3"]),
    ],
)
def test_what_no_pod_could_do_is_named_by_its_key(key: str, overrides: list[str]):
    assert [fault.partition(":")[0] for fault in faults_of(*PLAIN, *overrides)] == [key]


def test_a_gang_meets_only_where_the_user_says_what_fences_its_collectives():
    alone = ["cluster.key_file=/secrets/cluster.key", *GANG]
    [fault] = faults_of(*alone)
    assert fault.startswith("worker.host: ")
    assert "kv.network_fence" in fault
    assert not faults_of(*alone, "kv.network_fence=policies")


def test_hosts_may_be_left_out_or_be_every_address():
    assert not faults_of(*PLAIN)
    assert not faults_of(*PLAIN, "gateway.host=0.0.0.0", "worker.host=0.0.0.0")


@pytest.mark.parametrize("fence", [[], ["kv.network_fence=policies"], list(TLS[:3])])
def test_kv_goes_between_pods_only_where_the_user_says_what_fences_it(fence: list[str]):
    [fault] = faults_of(*MOONCAKE, *fence)
    assert fault.startswith("worker.host: ")
    assert "kv.network_fence" in fault
    assert not faults_of(*MOONCAKE, *TLS)


def test_what_outlives_pods_lies_in_claims():
    assert not faults_of(*PLAIN, "model.path=/models/kimi", *FILES, volumes=VOLUMES)
    [fault] = faults_of(*PLAIN, volumes=VOLUMES[:1])
    assert fault == "--volume /models=models: no key of the configuration names a path there"


def test_a_file_of_one_gateway_is_not_shared_by_two():
    several = faults_of(*PLAIN, "model.path=/models/kimi", *FILES, volumes=VOLUMES, num_gateways=2)
    assert [fault.partition(":")[0] for fault in several] == ["gateway.ledger", "batches.path"]


@pytest.mark.parametrize(
    ("option", "field", "value"),
    [
        ("--image", "image", ""),
        ("--image", "image", "a b"),
        ("--name", "name", "Kimi"),
        ("--name", "name", "k" * 41),
        ("--namespace", "namespace", "a.b"),
        ("--gateways", "num_gateways", 0),
    ],
)
def test_an_option_that_no_cluster_takes_is_named(option: str, field: str, value: object):
    [fault] = faults_of(*PLAIN, **{field: value})
    assert fault.startswith(f"{option}: ")


def test_the_command_tells_all_faults_at_once_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "deployment.toml"
    file.write_text('[gateway]\nport = 0\nhost = "127.0.0.1"\n[kv]\ntransport = "mooncake"\n')
    out = tmp_path / "out"
    assert cli.main(["manifests", "--config", str(file), "--out", str(out), "--image", "moonshard:1"]) == 2
    told = capsys.readouterr().err
    assert all(
        key in told for key in ("gateway.port:", "gateway.host:", "kv.ports:", "cluster.key_file:", "worker.host:")
    )
    assert not out.exists()


@pytest.mark.parametrize("volume", ["models", "models=claim", "/models="])
def test_a_volume_is_a_folder_and_a_claim(volume: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = ["manifests", "--out", str(tmp_path / "out"), "--image", "moonshard:1", "--volume", volume]
    assert cli.main(argv) == 2
    assert f"--volume {volume}: expected /FOLDER=CLAIM" in capsys.readouterr().err
