"""What every server of ours has: its own port, health that flips at once, reflection, TLS, keepalive."""

import asyncio
import socket
from functools import partial

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from moonshard.rpc.client import AsyncClient
from moonshard.rpc.inference_pb2_grpc import add_InferenceServicer_to_server
from moonshard.rpc.server.server import BoundServer, PortInUse, build_server
from moonshard.rpc.status import TooLarge, Unavailable
from moonshard.rpc.tls import TlsFiles, channel_credentials
from tests.certificates import needs_openssl, self_signed

INFERENCE = "moonshard.v1.Inference"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def watch_health(channel: grpc.aio.Channel, service: str):
    stub = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch  # pyright: ignore[reportAttributeAccessIssue]  # typeshed leaves it out
    return watch(health_pb2.HealthCheckRequest(service=service))


async def reflect(target: str, version: str, request: reflection_pb2.ServerReflectionRequest):
    async with grpc.aio.insecure_channel(target) as channel:
        call = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        [answer] = [answer async for answer in call(iter([request]))]
        return answer


def bind(servicer, **options) -> BoundServer:
    add = partial(add_InferenceServicer_to_server, servicer)
    defaults = {"host": "127.0.0.1", "port": 0, "add_servicers": [add], "service_names": [INFERENCE]}
    return build_server(**defaults | options)


async def test_a_port_in_use_is_said_by_name(inference, server):
    with pytest.raises(PortInUse, match=f"127.0.0.1:{server.port} is in use") as caught:
        bind(inference, port=server.port)
    assert (caught.value.host, caught.value.port) == ("127.0.0.1", server.port)
    assert isinstance(caught.value, OSError)


async def test_a_port_that_another_protocol_listens_on_is_in_use(inference):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PortInUse):
        bind(inference, port=taken.getsockname()[1])


async def test_a_host_that_is_not_ours_is_not_called_a_port_in_use(inference):
    with pytest.raises(OSError, match="assign") as caught:
        bind(inference, host="192.0.2.1", port=1)
    assert not isinstance(caught.value, PortInUse)


async def test_a_stopped_servers_port_is_free_at_once(inference):
    first = bind(inference)
    await first.start()
    await first.stop(0)
    second = bind(inference, port=first.port)
    assert second.port == first.port
    await second.stop(0)


async def test_health_is_not_serving_until_it_is_said_and_covers_every_service(inference):
    server = bind(inference)
    await server.start()
    async with AsyncClient(f"127.0.0.1:{server.port}") as client:
        assert not await client.health()
        assert not await client.health(INFERENCE)
        await server.set_serving(True)
        assert await client.health()
        assert await client.health(INFERENCE)
    await server.stop(0)


async def test_health_watch_flips_at_once(server, target):
    async with grpc.aio.insecure_channel(target) as channel, asyncio.timeout(10):
        watch = watch_health(channel, INFERENCE)
        assert (await watch.read()).status == SERVING
        await server.set_serving(False)
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()


async def test_stop_says_not_serving_before_it_cuts_a_running_stream(inference, server, target):
    inference.script, inference.holds = inference.script[:2], True
    async with grpc.aio.insecure_channel(target) as channel, AsyncClient(target) as client, asyncio.timeout(10):
        watch = watch_health(channel, "")
        assert (await watch.read()).status == SERVING
        stream = client.stream("x")
        await anext(stream)
        stop = asyncio.create_task(server.stop(60))
        assert (await watch.read()).status == NOT_SERVING
        assert not inference.ended.is_set()
        stream.cancel()
        watch.cancel()
        await stop


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_the_services_and_describes_each(target, version):
    ask = partial(reflect, target, version)
    listed = await ask(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = [service.name for service in listed.list_services_response.service]
    assert {INFERENCE, "grpc.health.v1.Health"} <= set(names)
    for name in names:
        answer = await ask(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
        file = FileDescriptorProto.FromString(answer.file_descriptor_response.file_descriptor_proto[0])
        assert name in {f"{file.package}.{service.name}" for service in file.service}


async def test_a_request_over_the_limit_is_too_large(inference):
    server = bind(inference, max_message_bytes=1000)
    await server.start()
    async with AsyncClient(f"127.0.0.1:{server.port}") as client:
        with pytest.raises(TooLarge):
            await client.generate("x" * 1001)
        assert (await client.generate("x" * 900)).text == "aA"
    await server.stop(0)


@needs_openssl
async def test_tls_is_spoken_and_plain_text_refused(inference, tmp_path):
    cert, key = self_signed(tmp_path, "server")
    server = bind(inference, tls=TlsFiles(cert=cert, key=key))
    await server.start()
    target = f"127.0.0.1:{server.port}"
    async with AsyncClient(target, credentials=channel_credentials(root_ca=cert)) as client:
        assert (await client.generate("x")).text == "aA"
    async with AsyncClient(target) as plain:
        with pytest.raises(Unavailable):
            await plain.generate("x")
    await server.stop(0)


@needs_openssl
async def test_mutual_tls_lets_in_only_who_shows_a_certificate(inference, tmp_path):
    (cert, key), (client_cert, client_key) = self_signed(tmp_path, "server"), self_signed(tmp_path, "client")
    server = bind(inference, tls=TlsFiles(cert=cert, key=key, client_ca=client_cert))
    await server.start()
    target = f"127.0.0.1:{server.port}"
    known = channel_credentials(root_ca=cert, cert=client_cert, key=client_key)
    async with AsyncClient(target, credentials=known) as client:
        assert (await client.generate("x")).text == "aA"
    async with AsyncClient(target, credentials=channel_credentials(root_ca=cert)) as stranger:
        with pytest.raises(Unavailable):
            await stranger.generate("x")
    await server.stop(0)


async def test_tls_files_that_are_no_pem_are_a_start_up_error(inference, tmp_path):
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    with pytest.raises(ValueError, match="PEM"):
        bind(inference, tls=TlsFiles(cert=junk, key=junk))
    with pytest.raises(FileNotFoundError):
        bind(inference, tls=TlsFiles(cert=tmp_path / "none", key=junk))
