"""KvWrite as we frame it and as protobuf does: one wire format."""

import pytest

from moonshard.rpc import kv_write
from moonshard.rpc.link_pb2 import KvWrite
from moonshard.rpc.status import InvalidArgument

SIZES = [1, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152]


@pytest.mark.parametrize("num_bytes", SIZES)
@pytest.mark.parametrize("address", [0, 0x1A, 2**64 - 1])
def test_protobuf_reads_what_we_write_and_so_do_we(address: int, num_bytes: int):
    data = bytes(range(256)) * (num_bytes // 256 + 1)
    message = kv_write.encode(address, memoryview(data)[:num_bytes])
    assert KvWrite.FromString(message) == KvWrite(address=address, data=data[:num_bytes])
    assert kv_write.decode(message) == ("", address, data[:num_bytes])


@pytest.mark.parametrize("num_bytes", [0, *SIZES])
@pytest.mark.parametrize("session", ["", "grpc://host:1/00"])
@pytest.mark.parametrize("address", [0, 0x1A, 2**64 - 1])
def test_any_message_of_protobuf_is_read(session: str, address: int, num_bytes: int):
    message = KvWrite(session=session, address=address, data=bytes(num_bytes)).SerializeToString()
    assert kv_write.decode(message) == (session, address, bytes(num_bytes))


def test_the_last_of_a_repeated_field_counts_as_in_protobuf():
    message = kv_write.encode(1, memoryview(b"first")) + kv_write.encode(2, memoryview(b"second"))
    assert kv_write.decode(message) == ("", 2, b"second")


def test_the_payload_is_a_view_of_the_message():
    message = kv_write.encode(1, memoryview(b"payload"))
    assert kv_write.decode(message)[2].obj is message


@pytest.mark.parametrize("message", [b"\x11", b"\x11" + bytes(8) + b"\x1a\x05four", b"\x1a" + b"\xff" * 12, b"\x07"])
def test_bytes_of_something_else_are_refused(message: bytes):
    with pytest.raises(InvalidArgument, match="not a KvWrite"):
        kv_write.decode(message)
