"""`moonshard store` as a process, with the two that it holds, and their ends."""

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from moonshard.kv.listening import listening_ports
from moonshard.kv.store.mooncake.answers import answers
from moonshard.serving.store.ports import StorePorts, free_ports
from moonshard.serving.store.processes import MooncakeProcesses, StoreSettings
from tests.cluster.conftest import wait_until
from tests.kv.store.mooncake.store_usage import read_usage
from tests.serving.store.store_process import StoreProcess, first_of_free, natives_of, running_store

pytestmark = [pytest.mark.xdist_group("mooncake"), pytest.mark.timeout(120)]
SO_ACCEPTCON = 1 << 16  # of a socket's flags: it listens; source: proc_net_unix(5)


def argument(process: psutil.Process, name: str) -> int:
    """A number on its command line."""
    [found] = (part for part in process.cmdline() if part.startswith(f"--{name}="))
    return int(found.partition("=")[2])


def sockets_of(process: psutil.Process) -> set[str]:
    """The names in the abstract namespace at which it listens, as Linux tells them: @ stands for the first byte."""
    own = {Path(f"/proc/{process.pid}/fd", entry).readlink() for entry in os.listdir(f"/proc/{process.pid}/fd")}
    rows = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    listening = {row[7].removeprefix("@"): row[6] for row in rows if len(row) == 8 and int(row[3], 16) & SO_ACCEPTCON}
    return {name for name, inode in listening.items() if Path(f"socket:[{inode}]") in own}


def test_all_that_it_opens_is_of_its_ports_and_told_and_it_ends_in_order():
    first = first_of_free(7)
    with running_store(f"127.0.0.1:{first}", **{"kv.ports": f"[{first}, {first + 6}]"}) as store:
        natives = natives_of(store.process.pid)
        assert sorted(natives) == ["mooncake_client", "mooncake_master"]
        opened = {name: listening_ports(process.pid) for name, process in natives.items()}
        assert opened["mooncake_master"] == {first + 1, first + 2}
        by_the_library = sorted(opened["mooncake_client"] - {first})
        assert len(by_the_library) == 2
        assert set(by_the_library) <= set(range(first + 3, first + 7))
        [socket] = sockets_of(natives["mooncake_client"])
        assert not sockets_of(natives["mooncake_master"])
        assert store.ready.strip().endswith(
            f"ready; at {store.address}; open to whoever reaches them are its ports: {by_the_library[0]}, "
            f"{by_the_library[1]}; to all on this machine its master at {first + 1} with metrics at {first + 2}, "
            f"and its client at {first} and the socket {socket}"
        )
        store.process.send_signal(signal.SIGTERM)
        assert store.end() == 0


def test_it_comes_back_at_the_same_ports_at_once():
    first = first_of_free(8)
    for _ in range(2):
        with running_store(f"127.0.0.1:{first}", **{"kv.ports": f"[{first}, {first + 7}]"}) as store:
            assert f"its master at {first + 1} with metrics at {first + 2}" in store.ready


def test_what_it_holds_ends_with_it_though_it_is_killed():
    with running_store():
        pass  # which kills it


def test_told_to_end_before_it_is_ready_it_ends_and_leaves_nothing():
    store = StoreProcess(f"127.0.0.1:{free_ports(1)[0]}")
    assert wait_until(lambda: bool(natives_of(store.process.pid)), 30)
    natives = natives_of(store.process.pid)
    store.process.send_signal(signal.SIGTERM)
    assert store.end() == 0
    assert not any(native.is_running() for native in natives.values())


@pytest.mark.parametrize("which", ["mooncake_master", "mooncake_client"])
def test_when_one_ends_by_itself_so_does_all(which: str):
    with running_store() as store:
        natives_of(store.process.pid)[which].kill()
        assert store.end() == 1
        assert any(f"{which} ended with -9" in line for line in store.lines)


def test_it_is_there_before_somebody_elses_master_and_finds_that_when_it_comes():
    ports = StorePorts.free()
    with running_store(**{"kv.store.master": ports.master_address}) as store:
        assert any("until it answers nothing is found in Mooncake Store" in line for line in store.lines)
        master = MooncakeProcesses(ports, StoreSettings(segment_bytes=64 * 1024**2)).master
        assert master
        master.start()
        try:
            assert wait_until(lambda: answers(store.address, timeout_s=1.0), 60)
        finally:
            master.stop(10.0)


def test_it_joins_somebody_elses_master():
    with running_store() as first:
        master = natives_of(first.process.pid)["mooncake_master"]
        port, metrics = argument(master, "rpc_port"), argument(master, "metrics_port")
        with running_store(**{"kv.store.master": f"127.0.0.1:{port}"}) as second:
            assert sorted(natives_of(second.process.pid)) == ["mooncake_client"]
            assert wait_until(lambda: read_usage(metrics).bytes_capacity == 2 * 64 * 1024**2, 30)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"kv.store.dram_bytes": 2**50}, "kv.store.dram_bytes: .* more than this machine has left"),
        ({"kv.store.dram_bytes": 1000}, "kv.store.dram_bytes: 1000 is too little"),
        ({"kv.store.dram_bytes": 0}, "kv.store.dram_bytes: with kv.store.enabled it says how much to hold"),
        ({"kv.store.enabled": "false"}, "kv.store.dram_bytes: with kv.store.enabled it says how much to hold"),
        ({"kv.store.client": "auto"}, "kv.store.client: name the address"),
        ({"kv.store.client": "nowhere"}, "kv.store.client: expected host:port"),
        ({"kv.store.master": "nowhere"}, "kv.store.master: expected host:port"),
        ({"kv.host": "10.0.0.1"}, "kv.host: 10.0.0.1 is not loopback"),
    ],
)
def test_what_cannot_be_had_is_told_by_its_key(overrides: dict[str, object], told: str):
    store = StoreProcess(f"127.0.0.1:{free_ports(1)[0]}", **overrides)
    assert store.end() == 2
    assert re.search(told, "".join(store.lines))


def test_an_address_in_use_is_told():
    with running_store() as store:
        second = StoreProcess(store.address)
        assert second.end() == 2
        assert f"something answers at {store.address} already" in "".join(second.lines)
