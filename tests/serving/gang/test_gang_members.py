"""What the members of a gang must have alike, what each may have of its own, and where they listen to each other."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from moonshard.serving.config.keys import ConfigError
from moonshard.serving.config.reading import load_config
from moonshard.serving.gang import members
from moonshard.serving.gang.members import made_of, member_of, unlike
from moonshard.serving.store.ports import free_ports
from tests.serving.gateway.conftest import FIXTURE

HOSTS = ("127.0.0.2", "127.0.0.3")
MEMBER = """
import faulthandler, os, sys
faulthandler.dump_traceback_later(120, exit=True)  # where a member hangs, and no hanging test
from moonshard.serving.gang.members import Member, meet
coordinator, index, host = sys.argv[1:]
meet(coordinator, Member(int(index), 2), host, timeout_s=60)
import jax, jax.numpy as jnp
from jax.experimental.multihost_utils import process_allgather
from moonshard.serving.engine.capacity import members
from moonshard.serving.engine.capacity.members import share_here, told_by_all
total = process_allgather(jnp.float32(jax.process_index() + 1)).sum()
said = told_by_all("blocks", f"{jax.process_index()}", 60)
members.BOOT_ID = members.Path(f"/proc/{os.getpid()}/comm") if index == "0" else members.BOOT_ID  # another machine
found = f"\\n{total} {said} {share_here(60)}\\n"
os.write(1, found.encode())  # at once: the collectives write to the same pipe meanwhile, in pieces
sys.stdin.read()
"""


def made(*overrides: str) -> dict[str, str]:
    return made_of(load_config(None, [f"model.path={FIXTURE}", "mode=aggregated", *overrides]), "both")


@pytest.mark.parametrize(
    "override",
    [
        "worker.host=10.0.0.2",
        "worker.port=1234",
        'worker.gateways=["127.0.0.1:50052"]',
        "worker.announced_host=member-1",
        "decode.port=1",
    ],
)
def test_where_a_member_is_and_whom_its_leader_tells_is_its_own(override: str):
    assert made(override) == made()


def test_what_it_serves_is_not_its_own_and_is_told_by_its_key():
    assert unlike(made(), made("decode.max_slots=3")) == "another decode.max_slots (3 instead of 16)"


def test_of_files_their_contents_are_compared_wherever_they_lie(tmp_path: Path):
    for name, text in {"here": "1", "there": "1", "other": "2"}.items():
        (tmp_path / name).write_text(text)
    here, there, other = (made(f"decode.expert_loads={tmp_path / name}") for name in ("here", "there", "other"))
    assert here == there
    assert unlike(here, other) == "another expert loads"
    with pytest.raises(ConfigError, match=r"decode\.expert_loads: .*nowhere: No such file"):
        made(f"decode.expert_loads={tmp_path / 'nowhere'}")


def test_a_changed_line_of_code_is_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "step.py").write_text("1")
    monkeypatch.setattr(members, "import_module", lambda name: SimpleNamespace(__file__=tmp_path / "__init__.py"))
    before = made()
    (tmp_path / "step.py").write_text("2")
    assert unlike(before, made()) == "another version of the code"


@pytest.mark.parametrize(
    ("overrides", "leader", "fault"),
    [
        ((), "10.0.0.1", r"--leader: expected host:port, got '10\.0\.0\.1'"),
        (("worker.host=0.0.0.0",), "10.0.0.1:1", r"worker\.host: members of a gang call each other, and nobody at"),
        ((), "10.0.0.1:1", r"worker\.host: 10\.0\.0\.1:1 may be another machine, which reaches no member at 127"),
    ],
)
def test_a_member_that_others_would_call_in_vain_is_refused(overrides: tuple[str, ...], leader: str, fault: str):
    gang = ("mode=aggregated", "decode.mesh.tensor=2", "decode.processes=2", "kv.network_fence=a VLAN")
    with pytest.raises(ConfigError, match=fault):
        member_of(load_config(None, [*gang, *overrides]), "both", 1, leader)


def test_members_hear_each_other_at_their_own_hosts_and_nowhere_else():
    """Both on this machine, whose name stands for neither host."""
    [port] = free_ports(1)
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, f"{HOSTS[0]}:{port}", str(index), host],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index, host in enumerate(HOSTS)
    ]
    try:
        for member, host in zip(members, HOSTS, strict=True):
            assert member.stdout is not None
            assert "3.0 ['0', '1'] 0.5\n" in iter(member.stdout.readline, "")
            open_at = psutil.Process(member.pid).net_connections("inet")
            listening = {each.laddr.ip for each in open_at if each.status == psutil.CONN_LISTEN}
            assert {address.removeprefix("::ffff:") for address in listening} == {host}
    finally:
        for member in members:
            member.kill()
            member.communicate()
