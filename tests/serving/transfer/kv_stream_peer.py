"""The receiving process of the gRPC transport's tests: told through lines of JSON on stdin, answered on stdout."""

import asyncio
import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import uvloop

from moonshard.kv.slab import Slab
from moonshard.rpc.server.server import build_server
from moonshard.rpc.tls import TlsFiles
from moonshard.serving.transfer.grpc_stream import SERVICE_NAME, GrpcTransport, KvStreamReceiver


class StoppingReceiver(KvStreamReceiver):
    """Stops its process before the message that the test names."""

    messages_left = -1

    def _put(self, address: int, data: memoryview, end: int) -> None:
        if self.messages_left == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        self.messages_left -= 1
        super()._put(address, data, end)


class Peer:
    def __init__(self, receiver: StoppingReceiver, port: int, slab: Slab, key: bytes):
        self.receiver, self.slab = receiver, slab
        self.transport = GrpcTransport(receiver, f"127.0.0.1:{port}", key=key)
        self.transport.register(slab)

    def where(self) -> list[str | int]:
        return [self.transport.session, self.slab.address]

    def digest(self) -> str:
        return hashlib.sha256(self.slab.bytes.data).hexdigest()

    def stop_after(self, num_messages: int) -> None:
        self.receiver.messages_left = num_messages

    def close(self) -> None:
        self.transport.close()


async def main(num_bytes: int, port: int, tls_folder: str, key: bytes) -> None:
    receiver = StoppingReceiver()
    folder = Path(tls_folder)
    tls = TlsFiles(cert=folder / "peer.pem", key=folder / "peer.key") if tls_folder else None
    server = build_server(
        host="127.0.0.1",
        port=port,
        add_servicers=[receiver.add_to],
        service_names=[SERVICE_NAME],
        tls=tls,
        key=key,
    )
    await server.start()
    peer = Peer(receiver, server.port, Slab(1, num_bytes), key)
    while line := await asyncio.to_thread(sys.stdin.readline):
        verb, *arguments = json.loads(line)
        sys.stdout.write(json.dumps(getattr(peer, verb)(*arguments)) + "\n")
        sys.stdout.flush()
    await server.stop(0)


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], bytes.fromhex(sys.argv[4])))
