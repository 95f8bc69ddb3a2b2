"""Private copies of slabs that change, and the contract of a transport on the one inside a process."""

import threading
from concurrent.futures import Future

import numpy as np
import pytest

from moonshard.kv.inproc import InprocNetwork, InprocTransport
from moonshard.kv.slab import Bytes, Slab
from moonshard.kv.transfer import (
    ChecksumMismatch,
    Copies,
    FailureCause,
    PublishResult,
    TransferFailed,
    Transport,
    checksum,
    copy_verified,
)
from tests.kv.slab_checksums import checksums


def random_slab(num_cells: int, cell_bytes: int) -> Slab:
    slab = Slab(num_cells, cell_bytes)
    slab.bytes[:] = np.random.default_rng(0).integers(0, 256, slab.num_bytes, np.uint8)
    return slab


def copies_of(*rows: tuple[int, int, int]) -> Copies:
    local, remote, num_bytes = np.array(rows, np.int64).reshape(-1, 3).T
    return Copies(local_addresses=local, remote_addresses=remote, num_bytes=num_bytes)


class Ends:
    """Two ends with a slab each."""

    def __init__(self, end_type: type[InprocTransport] = InprocTransport):
        network = InprocNetwork()
        self.source, self.target = random_slab(4, 1000), Slab(4, 1000)
        self.sender: Transport = end_type(network)
        self.receiver: Transport = InprocTransport(network)
        self.sender.register(self.source)
        self.receiver.register(self.target)

    def publish(self, offset: int, num_bytes: int) -> Future[PublishResult]:
        row = (self.source.address + offset, self.target.address + offset, num_bytes)
        return self.sender.publish(self.receiver.session, copies_of(row))


def test_a_verified_copy_has_the_cells_in_the_order_asked_for():
    slab = random_slab(4, 1000)
    copy = copy_verified(slab, (2, 0, 2), checksums(slab, (2, 0, 2)))
    assert copy.tolist() == [slab.cell(cell).tolist() for cell in (2, 0, 2)]
    assert copy.flags.c_contiguous
    assert copy_verified(slab, (), ()).shape == (0, 1000)


def test_a_private_copy_does_not_change_with_the_slab():
    slab = random_slab(2, 64)
    copy = copy_verified(slab, (1,), checksums(slab, (1,)))
    before = copy.tobytes()
    slab.bytes[:] = 0
    assert copy.tobytes() == before


@pytest.mark.parametrize("position", [0, 499, 999])
def test_one_changed_bit_names_its_cell(position: int):
    slab = random_slab(4, 1000)
    sent = checksums(slab, (3, 1, 2))
    slab.cell(1)[position] ^= 1
    slab.cell(2)[position] ^= 1
    with pytest.raises(ChecksumMismatch, match="slot 1") as mismatch:
        copy_verified(slab, (3, 1, 2), sent)
    assert (mismatch.value.cell, mismatch.value.expected) == (1, sent[1])
    assert mismatch.value.found == checksum(slab.cell(1))


def test_what_is_checked_is_the_copy_and_not_the_slab(monkeypatch: pytest.MonkeyPatch):
    slab = random_slab(2, 64)
    sent, expected = slab.bytes.reshape(2, 64).copy(), checksums(slab, (0, 1))

    def overwrite_then_digest(data: memoryview) -> int:
        slab.bytes[:] = 0  # a late write, at the worst moment
        return expected[[row.tobytes() for row in sent].index(bytes(data))]

    monkeypatch.setattr("moonshard.kv.transfer.xxhash.xxh3_64_intdigest", overwrite_then_digest)
    assert copy_verified(slab, (0, 1), expected).tolist() == sent.tolist()


@pytest.mark.parametrize("cell", [-1, 2])
def test_a_cell_that_the_slab_does_not_have_is_refused(cell: int):
    slab = Slab(2, 64)
    with pytest.raises(IndexError, match=f"slot {cell} of 2"):
        copy_verified(slab, (0, cell), checksums(slab, (0, 1)))
    with pytest.raises(IndexError, match=f"slot {cell} of 2"):
        slab.cell(cell)


def test_a_checksum_too_few_or_too_many_is_refused():
    slab = Slab(2, 64)
    for count in (1, 3):
        with pytest.raises(ValueError, match="checksums for 2 cells"):
            copy_verified(slab, (0, 1), (checksum(slab.cell(0)),) * count)


def test_ragged_or_empty_copies_are_refused():
    one, two = np.ones(1, np.int64), np.ones(2, np.int64)
    with pytest.raises(ValueError, match="one length"):
        Copies(local_addresses=two, remote_addresses=two, num_bytes=one)
    with pytest.raises(ValueError, match="no bytes"):
        Copies(local_addresses=one, remote_addresses=one, num_bytes=0 * one)


@pytest.mark.parametrize(("offset", "num_bytes"), [(0, 4000), (1, 1), (999, 3), (13, 3987)])
def test_published_bytes_are_equal_and_nothing_else_changes(offset: int, num_bytes: int):
    ends = Ends()
    result = ends.publish(offset, num_bytes).result()
    expected = np.zeros_like(ends.target.bytes)
    expected[offset : offset + num_bytes] = ends.source.bytes[offset : offset + num_bytes]
    assert ends.target.bytes.tobytes() == expected.tobytes()
    counters = ends.sender.counters
    assert (result.num_bytes, result.num_transfers) == (counters.num_bytes, counters.num_transfers) == (num_bytes, 1)


def test_no_copy_is_made_when_one_is_out_of_range():
    ends = Ends()
    good = (ends.source.address, ends.target.address, 10)
    future = ends.sender.publish(ends.receiver.session, copies_of(good, (ends.source.address, 4096, 10)))
    with pytest.raises(TransferFailed) as failed:
        future.result()
    assert failed.value.cause is FailureCause.BAD_RANGE
    assert not ends.target.bytes.any()
    assert ends.sender.counters.num_failures == {FailureCause.BAD_RANGE: 1}


def test_a_closed_receiver_refuses_and_a_closed_sender_says_so():
    ends = Ends()
    ends.receiver.close()
    with pytest.raises(TransferFailed, match="refused"):
        ends.publish(0, 1).result()
    ends.sender.close()
    ends.sender.close()
    with pytest.raises(TransferFailed, match="closed"):
        ends.publish(0, 1).result()
    with pytest.raises(TransferFailed, match="closed"):
        ends.sender.register(Slab(1, 1))


def test_sessions_are_not_used_again():
    network = InprocNetwork()
    first = InprocTransport(network)
    first.close()
    assert InprocTransport(network).session != first.session


class LateEnd(InprocTransport):
    """Says that a copy timed out, and makes it when the test releases it."""

    late: list[tuple[Bytes, bytes]]

    def copy(self, destination: Bytes, source: Bytes) -> None:
        self.late = [(destination, source.tobytes())]
        raise TransferFailed(FailureCause.TIMED_OUT, "scripted", may_still_land=True)

    def land(self) -> None:
        for destination, data in self.late:
            destination[:] = np.frombuffer(data, np.uint8)


def test_a_late_write_reaches_the_slab_and_no_private_copy():
    ends = Ends(LateEnd)
    assert isinstance(ends.sender, LateEnd)
    ends.target.bytes[:] = 7
    staged = checksums(ends.target, (0,))
    with pytest.raises(TransferFailed) as failed:
        ends.publish(0, 1000).result()
    private = copy_verified(ends.target, (0,), staged)
    writer = threading.Thread(target=ends.sender.land)
    writer.start()
    writer.join()
    assert failed.value.may_still_land
    assert private.tobytes() == bytes([7]) * 1000
    with pytest.raises(ChecksumMismatch):
        copy_verified(ends.target, (0,), staged)
