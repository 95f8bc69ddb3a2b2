"""`moonshard probe`: its exit code is what a worker's health says, with and without TLS."""

import asyncio
from pathlib import Path

import pytest

from moonshard.rpc.server.server import build_server
from moonshard.rpc.tls import TlsFiles
from moonshard.serving import cli
from tests.certificates import Authority, needs_openssl


@needs_openssl
@pytest.mark.parametrize("has_tls", [False, True])
async def test_a_worker_is_well_while_it_serves(tmp_path: Path, has_tls: bool, capsys: pytest.CaptureFixture[str]):
    tls = Authority(tmp_path, "ca").issue("worker")
    assert tls.cert is not None
    assert tls.key is not None
    files = TlsFiles(cert=tls.cert, key=tls.key, client_ca=tls.ca) if has_tls else None
    keys = {"tls.cert": tls.cert, "tls.key": tls.key, "tls.ca": tls.ca} if has_tls else {}
    shown = [word for key, path in keys.items() for word in ("--set", f"{key}={path}")]
    server = build_server(host="127.0.0.1", port=0, add_servicers=[], service_names=[], tls=files, key=b"k" * 32)
    await server.start()

    async def probed(*arguments: str) -> tuple[int, str]:
        code = await asyncio.to_thread(cli.main, ["probe", f"127.0.0.1:{server.port}", *arguments])
        return code, capsys.readouterr().out.strip()

    assert await probed(*shown) == (1, "NOT_SERVING")
    await server.set_serving(True)
    assert await probed(*shown) == (0, "SERVING")
    if has_tls:
        assert (await probed())[0] == 1  # without a certificate
    await server.stop(0)
    assert (await probed(*shown))[0] == 1
