"""`moonshard demo`: the whole system once, from nothing to a table of where each millisecond went.

It serves the embedded model on free ports, with the same supervisor as `moonshard serve`: a gateway, a prefill and a
decode worker, each a process, KV going from one to the other through Mooncake. It asks them as any client would, says
which answers are right, and takes everything down again. A wrong answer is the model's, and no failure of the demo.
"""

import asyncio
import signal
import time

import httpx
from rich.console import Console

from moonshard.experiments.demo.script import Script, ask_over_grpc, ask_over_http, heading
from moonshard.experiments.demo.tables import Account, time_table
from moonshard.rpc.client import AsyncClient
from moonshard.rpc.status import RequestError
from moonshard.serving.commands.serve import ChildCommands, ready_line
from moonshard.serving.commands.terminal_chat import TIMEOUT, ServerError, first_model, root_of
from moonshard.serving.config.reading import load_config
from moonshard.serving.deploy.children.limits import limits_of
from moonshard.serving.deploy.children.role import ChildFailed
from moonshard.serving.deploy.children.supervisor import Supervisor
from moonshard.serving.deploy.terminal import TerminalReporter

SETTINGS = (
    "gateway.port=0",
    "gateway.grpc_port=0",
    'speculation.method=["grammar", "eagle3", "lookup"]',
    'worker.prepare="first"',  # else most of its few steps would take the largest programs, beside a compiler
)


def demo(document_tokens: int = 2000, max_tokens: int = 64, seed: int = 0, url: str | None = None) -> int:
    """Serve the embedded model, ask it three questions, show where the time went.

    Args:
        document_tokens: about how long the document is that the first question is about.
        max_tokens: how long an answer may be.
        seed: another one asks about another document and other cities.
        url: of a server that runs already, which is then asked instead, over HTTP.
    """
    script = Script(document_tokens=document_tokens, max_tokens=max_tokens, seed=seed)
    return asyncio.run(_serve_and_ask(script)) if url is None else _ask_running(script, root_of(url))


async def _serve_and_ask(script: Script) -> int:
    begun_s = time.perf_counter()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, signal.raise_signal, signal.SIGINT)
    config = load_config(None, SETTINGS)
    reporter = TerminalReporter()
    supervisor = Supervisor(ChildCommands(config), reporter, limits_of(config))
    try:
        listening = await supervisor.start()
        reporter.finish()
        print(ready_line(config, listening, time.perf_counter() - begun_s))
        async with _http(str(listening["http"])) as http, AsyncClient(str(listening["grpc"])) as grpc:
            about, accounts = await ask_over_http(script, http, config.model.name)
            _show_times([*accounts, await ask_over_grpc(script, grpc, about)])
    except ChildFailed as failure:
        reporter.note(failure.message)
        return failure.exit_code
    except (ServerError, RequestError) as error:
        reporter.note(str(error))
        return 1
    finally:
        reporter.finish()
        await supervisor.stop()
    return 0


def _ask_running(script: Script, url: str) -> int:
    """Asks a server that runs already. ConfigError where none answers."""
    with httpx.Client(base_url=url, timeout=TIMEOUT, trust_env=False) as http:
        model = first_model(http)

    async def ask() -> None:
        async with _http(url) as http:
            _, accounts = await ask_over_http(script, http, model)
            _show_times(accounts)

    try:
        asyncio.run(ask())
    except ServerError as error:
        TerminalReporter().note(str(error))
        return 1
    return 0


def _http(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT, trust_env=False)


def _show_times(accounts: list[Account]) -> None:
    heading("Where the time went, by the gateway's clock")
    Console().print(time_table(accounts))
