"""What the members of a gang must have alike, what each may have of its own, and where they listen to each other."""

import subprocess
import sys

import psutil
import pytest

from moonshard.serving.config.reading import load_config
from moonshard.serving.gang.members import made_of
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
total = process_allgather(jnp.float32(jax.process_index() + 1)).sum()
os.write(1, f"\\n{total}\\n".encode())  # at once: the collectives write to the same pipe meanwhile, in pieces
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


def test_what_it_serves_is_not():
    assert made("decode.max_slots=3")["configuration"] != made()["configuration"]


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
            assert "3.0\n" in iter(member.stdout.readline, "")
            open_at = psutil.Process(member.pid).net_connections("inet")
            listening = {each.laddr.ip for each in open_at if each.status == psutil.CONN_LISTEN}
            assert {address.removeprefix("::ffff:") for address in listening} == {host}
    finally:
        for member in members:
            member.kill()
            member.communicate()
