"""What a start takes: to the ready line and to the first token, with an empty compile cache and with a full one."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from moonshard.experiments.bench.serving.streams import ask_grpc, random_prompt
from moonshard.experiments.common.running.measurement import Measurement
from moonshard.experiments.common.running.server import RunningServer, serving
from moonshard.rpc.client import AsyncClient

PROMPT_TOKENS = 16


def with_cache(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment, with the server's compile cache set to `folder`."""
    kept = {name: value for name, value in environment.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    return kept | {"XDG_CACHE_HOME": str(folder)}


def measure_cold(overrides: Sequence[str], environment: Mapping[str, str]) -> list[Measurement]:
    with TemporaryDirectory() as folder, serving(overrides, with_cache(environment, Path(folder))) as server:
        return measure_start(server, "cold")


def measure_start(server: RunningServer, cache: str) -> list[Measurement]:
    """Sends a server its first request. `cache` says whether the compile cache was empty or full when it started."""
    first_token_s = measure_first_token_s(server)
    return [
        Measurement(level="start", name=f"ready after exec, {cache} cache", unit="s", samples=(server.ready_s,)),
        Measurement(level="start", name=f"first token after exec, {cache} cache", unit="s", samples=(first_token_s,)),
        *(
            Measurement(
                level="start",
                name=f"peak memory until the first token, {role}, {cache} cache",
                unit="MiB",
                samples=(server.peak_memory_mib(role),),
            )
            for role in server.pids
        ),
    ]


def measure_first_token_s(server: RunningServer) -> float:
    """Sends a server its first request: seconds from the server's execution to the first token."""
    asyncio.run(_first_token(server))
    return time.perf_counter() - server.begun_s


async def _first_token(server: RunningServer) -> None:
    async with AsyncClient(server.grpc) as client:
        vocab_size = (await client.model_info()).vocab_size
        await ask_grpc(client, random_prompt(Random(0), vocab_size, PROMPT_TOKENS), 1)
