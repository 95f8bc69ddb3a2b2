"""How a tier on Mooncake Store begins and ends, and what is told of it."""

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from moonshard.kv.store.mooncake.faults import StoreUnavailable
from moonshard.kv.store.mooncake.tier import MooncakeStoreConfig, MooncakeStoreTier
from moonshard.kv.store.tier import MissCause
from moonshard.serving.store.native import NativeProcess
from moonshard.serving.store.ports import free_ports
from moonshard.serving.store.processes import MooncakeProcesses
from tests.kv.store.mooncake.store_blocks import (
    BLOCK_BYTES,
    LAYOUT,
    are_right,
    await_on,
    await_that,
    names_of,
)
from tests.kv.store.mooncake.store_room import (
    LONG_S,
    ROOT,
    config_for,
    go_on,
    keep,
    kill,
    seconds_of,
    start_again,
    stop,
    tier_on,
    worker_on,
)

pytestmark = pytest.mark.xdist_group("mooncake")


def test_a_closed_tier_has_no_threads_and_answers_with_misses(shared_store: MooncakeProcesses):
    before = set(threading.enumerate())
    with tier_on(shared_store) as tier:
        names = names_of("closed", 2)
        assert keep(tier, names) == [True, True]
        tier.close()
        assert set(threading.enumerate()) == before
        num_off = tier.counters.num_misses.get(MissCause.OFF, 0)
        assert tier.find(names) == are_right(tier, names) == keep(tier, names) == [False, False]
        assert tier.counters.num_misses == {MissCause.OFF: num_off + 4}
        assert not tier.is_on
    with tier_on(shared_store) as tier:
        assert are_right(tier, names) == [True, True]


def test_closing_while_the_store_hangs_takes_little(own_store: MooncakeProcesses):
    with worker_on(own_store, timeout_s=0.1) as worker:
        stop(own_store.client)
        assert worker.ask("find", "hang", 1) == [False]
        assert seconds_of(lambda: worker.ask("close")) < 5
    go_on(own_store.client)


def test_a_process_that_uses_the_store_says_nothing(shared_store: MooncakeProcesses):
    code = (
        "import sys; from tests.kv.store.mooncake.store_worker import *\n"
        "worker = Worker(sys.argv[1], 10.0); worker.await_on()\n"
        "assert worker.keep('quiet', 2) == worker.fetch('quiet', 2) == [True, True]; worker.close()"
    )
    argv = [sys.executable, "-c", code, shared_store.ports.client_address]
    done = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_process_whose_store_is_gone_says_nothing_of_it_by_itself(own_store: MooncakeProcesses):
    """The library would, once for every key."""
    argv = [sys.executable, "-m", "tests.kv.store.mooncake.store_worker", own_store.ports.client_address, "10.0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin
        assert process.stdout
        for command, answer in [("await_on", None), ("keep", [True] * 3), ("find", [False] * 3)]:
            process.stdin.write(json.dumps([command, *(() if answer is None else ("gone", 3))]) + "\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline()) == answer
            if command == "keep":
                kill(own_store.client)
        _, said = process.communicate(timeout=LONG_S)
    assert said == ""


@contextmanager
def someone(kind: str) -> Iterator[str]:
    """Where nothing answers, or somebody who is no client of Mooncake Store."""
    if kind == "nobody":
        [port] = free_ports(1)
        yield f"127.0.0.1:{port}"
        return
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(server.serve_forever)
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("kind", "told"),
    [("nobody", "nothing answers at {}"), ("http", "what answers at {} is no mooncake_client of this machine")],
)
def test_a_wrong_address_is_told_once_and_all_is_a_miss(kind: str, told: str):
    changes = list[str | None]()
    with someone(kind) as address:
        config = MooncakeStoreConfig(address=address, rest_s=0.01)
        tier = MooncakeStoreTier.start(layout=LAYOUT, block_bytes=BLOCK_BYTES, config=config, on_change=changes.append)
        try:
            await_that(lambda: bool(changes))
            names = names_of("wrong", 2)
            for _ in range(20):  # each may be an attempt
                assert tier.find(names) == [False, False]
                assert tier.counters.is_up is False
        finally:
            tier.close()
    assert changes == [told.format(address)]


@pytest.mark.parametrize(("how", "why"), [(stop, "does not answer in time"), (kill, "fails")])
def test_that_a_client_goes_and_comes_back_is_told_once_each(
    how: Callable[[NativeProcess], None], why: str, own_store: MooncakeProcesses
):
    changes = list[str | None]()
    address = own_store.ports.client_address
    config = config_for(own_store, timeout_s=0.1)
    tier = MooncakeStoreTier.start(layout=LAYOUT, block_bytes=BLOCK_BYTES, config=config, on_change=changes.append)
    try:
        await_on(tier)
        assert (tier.counters.is_up, changes) == (True, [])
        how(own_store.client)
        names = names_of("gone", 2)
        await_that(lambda: tier.find(names) == [False, False] and f"mooncake_client at {address} {why}" in changes)
        assert tier.counters.is_up is False
        if how is stop:
            go_on(own_store.client)
        else:
            start_again(own_store.client)
        await_on(tier)
        assert changes[-1] is None
        assert all(change != after for change, after in itertools.pairwise(changes))
    finally:
        tier.close()


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    config = MooncakeStoreConfig(address="127.0.0.1:1")
    with pytest.raises(StoreUnavailable, match="mooncake-transfer-engine"):
        MooncakeStoreTier.start(layout=LAYOUT, block_bytes=BLOCK_BYTES, config=config)


def test_an_address_that_is_none_is_told_at_the_start():
    with pytest.raises(ValueError, match="nowhere"):
        MooncakeStoreTier.start(
            layout=LAYOUT, block_bytes=BLOCK_BYTES, config=MooncakeStoreConfig(address="127.0.0.1:nowhere")
        )
