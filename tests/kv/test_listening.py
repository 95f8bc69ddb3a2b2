"""A process's own listening ports are found, and nobody else's."""

import socket
import sys

import pytest

from moonshard.kv.listening import listening_ports

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_port_is_found_while_it_is_listened_at(family: socket.AddressFamily, host: str):
    before = listening_ports()
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        assert listening_ports() == before | {port}
        with socket.create_connection((host, port)) as client:
            assert client.getsockname()[1] not in listening_ports()
    assert listening_ports() == before


def test_of_a_process_that_is_not_there_nothing_is_found():
    assert listening_ports(2**22 + 1) == frozenset()
