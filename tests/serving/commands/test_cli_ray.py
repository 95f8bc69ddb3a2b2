"""`serve --launcher ray`: options and keys that do not fit it, and what workers on nodes are told."""

import sys
from pathlib import Path

import pytest

from moonshard.serving import cli
from moonshard.serving.commands.checks.nodes import plan_of
from moonshard.serving.commands.serve import ChildCommands
from moonshard.serving.config.reading import load_config
from moonshard.serving.deploy.on_ray.orders import KEY_FILE, NODE

GANG = ["mode=aggregated", "decode.processes=2", "decode.mesh.data=4"]
FREE = ("--port", "0", "--set", "gateway.grpc_port=0")
STORE = ("--set", "kv.store.enabled=true", "--set", "kv.store.dram_bytes=100000000")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--ray-address", "10.0.0.1:6379"), "--ray-address: only with --launcher ray"),
        (("--ray-device", "GPU"), "--ray-device: only with --launcher ray"),
        (("--launcher", "ray", "--ray-address", "ray://head:10001"), "--ray-address: expected host:port"),
        (("--launcher", "ray", "--ray-address", "head"), "--ray-address: expected host:port"),
        (("--launcher", "ray", "--set", "kv.host=127.0.0.1"), "kv.host: leave it out"),
        (("--launcher", "ray", *STORE), "kv.store.dram_bytes: workers share memory"),
        (("--launcher", "ray", "--set", "gateway.registry=grpc"), "gateway.registry: leave it out"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_name(
    options: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["serve", *FREE, *options]) == 2
    assert told in capsys.readouterr().err


def test_where_ray_is_not_installed_that_is_said_and_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not, where it is
    assert cli.main(["serve", *FREE, "--launcher", "ray"]) == 2
    told = capsys.readouterr().err
    assert "--launcher ray: Ray is not installed" in told
    assert "pip install 'moonshard[ray]'" in told


def test_what_nodes_have_room_for_is_not_asked_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setitem(sys.modules, "ray", None)
    files = f"kv.store={{enabled=true, host_bytes={2**50}, ssd_bytes={2**50}, ssd_path='{tmp_path / 'kv'}'}}"
    assert cli.main(["serve", *FREE, "--set", files]) == 2
    assert "kv.store.host_bytes" in capsys.readouterr().err
    (tmp_path / "kv/prefill-0/moonshard-kv").unlink()
    (tmp_path / "kv/prefill-0").rmdir()
    assert cli.main(["serve", *FREE, "--set", files, "--launcher", "ray"]) == 2
    assert "Ray is not installed" in capsys.readouterr().err
    assert not (tmp_path / "kv/prefill-0").exists()


def test_a_worker_on_a_node_listens_where_that_is_and_finds_the_clusters_key_there():
    config = load_config(None, ["mode=aggregated", "decode.processes=2", "decode.mesh.data=2", "cluster.key_file=/k"])
    commands = ChildCommands(config, on_nodes=True)
    worker = commands.workers["worker 0"]({"address": "10.0.0.7:1234"})
    follower = commands.followers("worker 0", "10.0.0.8:5678")["worker 0.1"](None)
    for argv in (worker, follower):
        assert f'worker.host="{NODE}"' in argv
        assert "worker.port=0" in argv, "the port of a node that is gone is no use on another"
        assert f'cluster.key_file="{KEY_FILE}"' in argv
    assert follower[-2:] == ["--leader", "10.0.0.8:5678"]
    assert 'cluster.key_file="/k"' in commands.gateway(["10.0.0.7:1234"], None)


@pytest.mark.parametrize(
    ("settings", "device", "expected"),
    [
        (
            ["prefill.mesh.tensor=2", "decode.replicas=2"],
            None,
            [("prefill 0", 1, {"CPU": 2}), ("decode 0", 1, {"CPU": 1}), ("decode 1", 1, {"CPU": 1})],
        ),
        (GANG, None, [("worker 0", 2, {"CPU": 2})]),
        (GANG, "GPU", [("worker 0", 2, {"CPU": 1, "GPU": 2})]),
    ],
)
def test_each_worker_is_a_group_of_its_processes_which_divide_its_devices(settings, device, expected):
    plan = plan_of(load_config(None, ["decode.max_slots=16", *settings]), None, device)
    assert [(worker.name, worker.num_processes, worker.bundle) for worker in plan.workers] == expected
