"""Mooncake for real: this process writes into another one's slab over loopback, and the other is stopped and killed."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from moonshard.kv.mooncake import MooncakeConfig, MooncakeTransport, has_unheard_ports
from moonshard.kv.native_stderr import stderr_without
from moonshard.kv.slab import Slab
from moonshard.kv.transfer import (
    Copies,
    FailureCause,
    PublishResult,
    TransferFailed,
    TransportUnavailable,
)
from tests.asked_process import AskedProcess
from tests.kv.slab_checksums import checksums

pytestmark = pytest.mark.xdist_group("mooncake")

NUM_SLOTS = 4
SLOT_BYTES = 1024 * 1024
TIMEOUT_S = 1.0
PEER = Path(__file__).with_name("mooncake_peer.py")


def test_a_start_that_succeeds_says_nothing():
    """Though the library complains at each."""
    code = "from moonshard.kv.mooncake import *; MooncakeTransport.start('127.0.0.1', config=MooncakeConfig())"
    started = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert (started.stdout, started.stderr) == ("", "")


def test_native_lines_are_told_but_for_those_that_are_known_and_all_of_them_after_a_failure(
    capfd: pytest.CaptureFixture[str],
):
    def complain():
        os.write(2, b"E known to be harmless\nE new and serious\n")

    with stderr_without(["known to be harmless"]):
        complain()
        assert capfd.readouterr().err == ""
    assert capfd.readouterr().err == "E new and serious\n"

    def fail():
        with stderr_without(["known to be harmless"]):
            complain()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert capfd.readouterr().err == "E known to be harmless\nE new and serious\n"
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


def poll_for(duration_s: float) -> float:
    """How long polling for `duration_s` takes here and now: what a stalled machine adds to a wait, it adds here too."""
    start_s, never = time.perf_counter(), threading.Event()
    while time.perf_counter() - start_s < duration_s:
        never.wait(0.002)
    return time.perf_counter() - start_s


class RemotePeer(AskedProcess):
    """The other process."""

    def __init__(self):
        super().__init__([str(PEER), str(NUM_SLOTS), str(SLOT_BYTES)])
        self.session, self.address = self.ask("where")


class Sender:
    """This process's end, and a mirror of what the peer's slab must hold."""

    def __init__(self):
        self.slab = Slab(NUM_SLOTS, SLOT_BYTES)
        self.slab.bytes[:] = np.random.default_rng(1).integers(0, 256, self.slab.num_bytes, np.uint8)
        config = MooncakeConfig(timeout_s=TIMEOUT_S, max_bytes_in_flight=2 * SLOT_BYTES, max_copies_in_flight=8)
        self.transport = MooncakeTransport.start("127.0.0.1", config=config)
        self.transport.register(self.slab)

    def begin(self, peer: RemotePeer, *rows: tuple[int, int, int]) -> Future[PublishResult]:
        """Begins a publish of rows (offset here, offset there, bytes)."""
        local, remote, num_bytes = np.array(rows, np.int64).T
        copies = Copies(
            local_addresses=local + self.slab.address, remote_addresses=remote + peer.address, num_bytes=num_bytes
        )
        return self.transport.publish(peer.session, copies)

    def publish(self, peer: RemotePeer, *rows: tuple[int, int, int]) -> PublishResult:
        return self.begin(peer, *rows).result(timeout=20)

    def failure(self, peer: RemotePeer, *rows: tuple[int, int, int]) -> TransferFailed:
        with pytest.raises(TransferFailed) as failed:
            self.publish(peer, *rows)
        return failed.value


def _remote_peer() -> Iterator[RemotePeer]:
    peer = RemotePeer()
    yield peer
    peer.kill()


peer = pytest.fixture(_remote_peer, name="peer")
other_peer = pytest.fixture(_remote_peer, name="other_peer")


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender()
    yield sender
    sender.transport.close()


def digest(data: np.ndarray) -> str:
    return hashlib.sha256(data.tobytes()).hexdigest()


def test_bytes_of_any_size_and_alignment_arrive_equal_and_are_counted(sender: Sender, peer: RemotePeer):
    expected = np.zeros(NUM_SLOTS * SLOT_BYTES, np.uint8)
    total_bytes = 0
    for num_bytes in (1, 15, 4095, 4097, 65_537, SLOT_BYTES, 3 * SLOT_BYTES - 1):
        local, remote = num_bytes % 13, num_bytes % 1021
        result = sender.publish(peer, (local, remote, num_bytes))
        expected[remote : remote + num_bytes] = sender.slab.bytes[local : local + num_bytes]
        total_bytes += num_bytes
        assert (result.num_bytes, result.num_transfers) == (num_bytes, 1)
        assert peer.ask("digest") == digest(expected)
    counters = sender.transport.counters
    assert (counters.num_bytes, counters.num_transfers, counters.num_failures) == (total_bytes, 7, {})
    assert counters.busy_s > 0


def test_more_copies_than_may_be_in_flight_all_arrive(sender: Sender, peer: RemotePeer):
    rng = np.random.default_rng(2)
    ends = np.sort(rng.choice(np.arange(1, NUM_SLOTS * SLOT_BYTES), 100, replace=False))
    rows = [(int(a), int(a), int(b - a)) for a, b in zip([0, *ends], [*ends, sender.slab.num_bytes], strict=True)]
    result = sender.publish(peer, *rows[::-1])
    assert (result.num_bytes, result.num_transfers) == (sender.slab.num_bytes, 101)
    assert peer.ask("digest") == digest(sender.slab.bytes)


def test_the_receiver_verifies_what_was_sent_and_names_a_cell_that_was_not(sender: Sender, peer: RemotePeer):
    sent = (0, 1), checksums(sender.slab, (0, 1))
    sender.publish(peer, (0, 0, 2 * SLOT_BYTES))
    assert peer.ask("verify", *sent) is None
    assert peer.ask("private_digests") == [digest(sender.slab.cell(0)), digest(sender.slab.cell(1))]
    sender.publish(peer, (0, SLOT_BYTES + 77, 1000))
    assert peer.ask("verify", *sent) == 1


@pytest.mark.parametrize(
    ("local", "remote"), [(0, NUM_SLOTS * SLOT_BYTES - 7), (0, -8), (NUM_SLOTS * SLOT_BYTES - 7, 0), (-8, 0)]
)
def test_a_range_that_is_not_registered_is_named_as_such(sender: Sender, peer: RemotePeer, local: int, remote: int):
    before = peer.ask("digest")
    assert sender.failure(peer, (local, remote, 8)).cause is FailureCause.BAD_RANGE
    assert peer.ask("digest") == before
    assert sender.transport.counters.num_failures == {FailureCause.BAD_RANGE: 1}
    sender.publish(peer, (0, 0, 8))


def test_a_dead_peer_is_an_error_known_or_not(sender: Sender, peer: RemotePeer):
    sender.publish(peer, (0, 0, 8))
    peer.kill()
    known = sender.failure(peer, (0, 0, SLOT_BYTES))
    assert known.cause is FailureCause.PEER_GONE
    other = Sender()
    unknown = other.failure(peer, (0, 0, SLOT_BYTES))
    assert (unknown.cause, unknown.may_still_land) == (FailureCause.REFUSED, False)
    other.transport.close()


@pytest.mark.parametrize("session", ["nobody", "nobody:port", f"{'long' * 20}:80", "two..dots:80"])
def test_a_session_that_is_no_address_is_refused(sender: Sender, session: str):
    one = np.ones(1, np.int64)
    copies = Copies(local_addresses=one * sender.slab.address, remote_addresses=one, num_bytes=one)
    failure = sender.transport.publish(session, copies).exception(timeout=20)
    assert isinstance(failure, TransferFailed)
    assert (failure.cause, failure.may_still_land) == (FailureCause.REFUSED, False)


def test_a_peer_killed_in_the_middle_is_an_error(sender: Sender, peer: RemotePeer):
    sender.publish(peer, (0, 0, 8))
    peer.stop()
    future = sender.begin(peer, (0, 0, sender.slab.num_bytes))
    peer.kill()
    failure = future.exception(timeout=20)
    assert isinstance(failure, TransferFailed)
    assert failure.cause is FailureCause.PEER_GONE


def test_late_bytes_of_a_timed_out_write_reach_the_slab_and_no_private_copy(sender: Sender, peer: RemotePeer):
    sent = (0,), checksums(sender.slab, (0,))
    sender.publish(peer, (0, 0, SLOT_BYTES))
    assert peer.ask("verify", *sent) is None
    landed, private = peer.ask("digest"), peer.ask("private_digests")

    peer.stop()
    with ThreadPoolExecutor(1) as threads:
        control = threads.submit(poll_for, TIMEOUT_S)
        start_s = time.perf_counter()
        failure = sender.failure(peer, (SLOT_BYTES, 0, SLOT_BYTES))
        elapsed_s = time.perf_counter() - start_s
        assert TIMEOUT_S < elapsed_s < control.result() + 2
    assert "nothing landed for 1 s" in str(failure)  # our deadline, and not the library's, ended the wait
    assert (failure.cause, failure.may_still_land) == (FailureCause.TIMED_OUT, True)
    assert sender.transport.num_stragglers() == 1

    peer.process.send_signal(signal.SIGCONT)
    deadline_s = time.perf_counter() + 20
    while sender.transport.num_stragglers():
        assert peer.ask("digest")
        assert time.perf_counter() < deadline_s
    assert peer.ask("digest") != landed
    assert peer.ask("private_digests") == private == [digest(sender.slab.cell(0))]
    assert peer.ask("verify", *sent) == 0


def test_a_stopped_peer_that_was_never_reached_times_out_and_delays_nobody_else(
    sender: Sender, peer: RemotePeer, other_peer: RemotePeer
):
    sender.publish(other_peer, (0, 0, 8))
    peer.stop()
    hung = sender.begin(peer, (0, 0, 8))
    sender.publish(other_peer, (0, 0, SLOT_BYTES))
    assert not hung.done()
    failure = hung.exception(timeout=20)
    assert isinstance(failure, TransferFailed)
    assert (failure.cause, failure.may_still_land) == (FailureCause.TIMED_OUT, False)
    peer.process.send_signal(signal.SIGCONT)
    sender.publish(peer, (0, 0, 8))


def test_close_fails_what_is_under_way_and_may_be_called_again(sender: Sender, peer: RemotePeer):
    sender.publish(peer, (0, 0, 8))
    peer.stop()
    future = sender.begin(peer, (0, 0, sender.slab.num_bytes))
    sender.transport.close()
    sender.transport.close()
    failure = future.exception(timeout=0)
    assert isinstance(failure, TransferFailed)
    assert failure.cause is FailureCause.CLOSED
    assert sender.failure(peer, (0, 0, 8)).cause is FailureCause.CLOSED
    with pytest.raises(TransferFailed, match="closed"):
        sender.transport.register(Slab(1, 8))


def test_a_slab_is_registered_once(sender: Sender):
    with pytest.raises(TransferFailed, match="bad_range"):
        sender.transport.register(sender.slab)


def test_the_library_is_told_its_settings_and_never_less_than_its_least_timeout(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.environ", {})
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(TransportUnavailable):
        MooncakeTransport.start("127.0.0.1", config=MooncakeConfig(timeout_s=1.5, ports=(17_000, 17_009)))
    assert os.environ == {
        "MC_LOG_LEVEL": "ERROR",
        "MC_TRANSFER_TIMEOUT": "5",
        "MC_TCP_SLICE_SIZE": "1048576",
        "MC_MIN_PRC_PORT": "17000",
        "MC_MAX_PRC_PORT": "17009",
    }


def test_a_missing_library_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(TransportUnavailable, match="libibverbs1"):
        MooncakeTransport.start("127.0.0.1", config=MooncakeConfig())


def test_a_library_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch):
    class DeadEngine:
        def initialize(self, *arguments: str) -> int:
            return -1

    monkeypatch.setattr("moonshard.kv.mooncake._load_engine", DeadEngine)
    with pytest.raises(TransportUnavailable, match="initialize returned -1"):
        MooncakeTransport.start("127.0.0.1", config=MooncakeConfig())


def start_alone(first: int, last: int) -> str:
    """What a process of its own says that starts with these ports: the library reads its settings once."""
    script = f"""
from moonshard.kv.mooncake import MooncakeConfig, MooncakeTransport
print("started", MooncakeTransport.start("127.0.0.1", config=MooncakeConfig(ports=({first}, {last}))).session)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    return ran.stdout + ran.stderr


@pytest.mark.parametrize(("first", "last"), [(0, 0), (17_009, 17_000), (70_000, 70_010)])
def test_ports_that_the_library_passes_over_in_silence_are_named(first: int, last: int):
    said = start_alone(first, last)
    assert f"Mooncake passed over the ports {first} to {last}" in said
    assert "started" not in said


def test_taken_ports_are_named():
    with socket.create_server(("", 29_741)) as taken:
        port = taken.getsockname()[1]
        said = start_alone(port, port)
    assert f"are 2 ports from {port} to {port} free?" in said
    assert "started" not in said


def leave_at_rest(port: int) -> None:
    """A connection to this port ends as those of a killed process do: the system remembers it for a minute."""
    with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(("127.0.0.1", port)) as client:
        server.accept()[0].close()
        assert client.recv(1) == b""


def test_ports_at_rest_are_told_from_ports_that_somebody_listens_at():
    leave_at_rest(29_751)
    leave_at_rest(29_752)
    assert has_unheard_ports(29_751, 29_752)
    with socket.create_server(("", 29_752)):
        assert not has_unheard_ports(29_751, 29_752)


@pytest.mark.slow
def test_a_process_waits_for_the_ports_of_one_that_was_killed():
    leave_at_rest(29_761)
    leave_at_rest(29_762)
    assert "started 127.0.0.1:2976" in start_alone(29_761, 29_762)
