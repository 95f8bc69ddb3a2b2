"""`moonshard store` as a process, with the two that it holds, and their ends."""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from moonshard.kv.store.mooncake.answers import answers
from moonshard.serving.store.mooncake import free_ports
from tests.cluster.conftest import wait_until

pytestmark = [pytest.mark.xdist_group("mooncake"), pytest.mark.timeout(120)]
LIMIT_S = 30.0


class StoreProcess:
    def __init__(self, address: str, **overrides: object):
        keys = {"kv.store.enabled": "true", "kv.store.dram_bytes": 64 * 1024**2, "kv.store.client": address}
        argv = [sys.executable, "-m", "moonshard.serving.cli", "store"]
        for key, value in {**keys, **overrides}.items():
            argv += ["--set", f"{key}={value}"]
        self.lines = list[str]()
        self.address = address
        self.process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    @property
    def natives(self) -> dict[str, psutil.Process]:
        """Those that run."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return {child.name(): child for child in children if child.name().startswith("mooncake")}

    def await_ready(self) -> None:
        assert wait_until(lambda: any("ready" in line for line in self.lines), LIMIT_S), self.lines

    def end(self) -> int:
        code = self.process.wait(LIMIT_S)
        self._reading.join()
        return code

    def _read(self) -> None:
        assert self.process.stderr
        with self.process.stderr as lines:
            self.lines += lines


@contextmanager
def running(**overrides: object) -> Iterator[StoreProcess]:
    """Nothing of it is left after the block."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    store = StoreProcess(address, **overrides)
    natives = dict[str, psutil.Process]()
    try:
        store.await_ready()
        natives |= store.natives
        yield store
    finally:
        store.process.kill()
        store.end()
        psutil.wait_procs(natives.values(), timeout=LIMIT_S)
    assert not any(native.is_running() and native.status() != psutil.STATUS_ZOMBIE for native in natives.values())
    assert not answers(address, timeout_s=0.2)


def test_it_tells_what_stands_open_and_ends_in_order():
    with running() as store:
        assert sorted(store.natives) == ["mooncake_client", "mooncake_master"]
        assert answers(store.address, timeout_s=1.0)
        [ready] = (line for line in store.lines if "ready" in line)
        told = re.search(r"ready at (\S+); open to whoever reaches them are its ports: [\d, ]+", ready)
        assert told
        assert told[1] == store.address
        store.process.send_signal(signal.SIGTERM)
        assert store.end() == 0


def test_what_it_holds_ends_with_it_though_it_is_killed():
    with running():
        pass  # which kills it


@pytest.mark.parametrize("which", ["mooncake_master", "mooncake_client"])
def test_when_one_ends_by_itself_so_does_all(which: str):
    with running() as store:
        store.natives[which].kill()
        assert store.end() == 1
        assert any(f"{which} ended with -9" in line for line in store.lines)


def test_it_is_there_though_somebody_elses_master_is_not():
    with running(**{"kv.store.master": f"127.0.0.1:{free_ports(1)[0]}"}) as store:
        assert any("until it answers nothing is found in Mooncake Store" in line for line in store.lines)


def test_it_joins_somebody_elses_master():
    with running() as first:
        [port] = (
            connection.laddr.port
            for connection in first.natives["mooncake_master"].net_connections()
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port != _metrics_port(first)
        )
        with running(**{"kv.store.master": f"127.0.0.1:{port}"}) as second:
            assert sorted(second.natives) == ["mooncake_client"]


def _metrics_port(store: StoreProcess) -> int:
    [argument] = (part for part in store.natives["mooncake_master"].cmdline() if part.startswith("--metrics_port="))
    return int(argument.partition("=")[2])


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"kv.store.dram_bytes": 2**50}, "kv.store.dram_bytes: .* more than this machine has left"),
        ({"kv.store.dram_bytes": 0}, "kv.store.dram_bytes: 0 bytes hold no blocks"),
        ({"kv.store.enabled": "false"}, "kv.store.enabled: it is false"),
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
    with running() as store:
        second = StoreProcess(store.address)
        assert second.end() == 2
        assert f"something answers at {store.address} already" in "".join(second.lines)
