"""A gateway over several scripted workers, and one way to ask it whichever front is used."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import httpx

from moonshard.rpc.client import AsyncClient
from moonshard.serving.config.keys import GatewayConfig, RoutingConfig, TelemetryConfig, TraceConfig
from moonshard.serving.gateway.process import RunningGateway, serving
from tests.serving.gateway import fake_worker
from tests.serving.gateway.conftest import FIXTURE, make_config
from tests.serving.gateway.fake_worker import FakeWorker
from tests.serving.gateway.sse import decoded, tokens_of

HANG_S = 30.0  # a bound for a hang, not a measure
MANY = 40  # prompt tokens: three blocks
PROMPT = list(range(1, MANY + 1))
NUM_TOKENS = 8

type Form = Literal["http stream", "http whole", "grpc"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a client was given, by choice."""

    tokens: tuple[list[int], ...]
    texts: tuple[str, ...]
    num_logprobs: tuple[int, ...]
    num_billed: int


def prefill_worker(number: int = 0) -> FakeWorker:
    return FakeWorker(role="prefill", epoch=b"p%015d" % number)


def decode_worker(number: int = 0) -> FakeWorker:
    return FakeWorker(role="decode", epoch=b"d%015d" % number)


@asynccontextmanager
async def fleet(
    *workers: FakeWorker,
    lease_s: float = 60.0,
    ledger: Path | None = None,
    trace: TraceConfig | None = None,
    telemetry: TelemetryConfig | None = None,
    **routing: float | str,
) -> AsyncIterator[RunningGateway]:
    """All workers are there when the block begins. Prompts are handed over unless a test says when not."""
    async with asyncio.timeout(HANG_S), AsyncExitStack() as stack:
        ports = [await stack.enter_async_context(fake_worker.serving(worker)) for worker in workers]
        gateway = GatewayConfig(port=0, grpc_port=0, drain_timeout_s=1, ledger=ledger)
        config = make_config(gateway, FIXTURE, [f"127.0.0.1:{port}" for port in ports])
        made = replace(
            config,
            routing=RoutingConfig(**({"local_prefill": "static", "failover_wait_s": 0.5} | routing)),  # pyright: ignore[reportArgumentType]
            kv=replace(config.kv, lease_s=lease_s),
            trace=trace or TraceConfig(),
            telemetry=telemetry or TelemetryConfig(),
        )
        running = await stack.enter_async_context(serving(made))
        pool = running.gateway.pool
        while any(link.session is None for link in pool.links):
            await pool.wait_changed(0.05)
        yield running


@asynccontextmanager
async def front_of(
    worker: FakeWorker, config: GatewayConfig
) -> AsyncIterator[tuple[RunningGateway, httpx.AsyncClient]]:
    """A gateway over this worker, and an HTTP client of it; the gateway has closed when the block has ended."""
    async with (
        asyncio.timeout(2 * HANG_S),
        fake_worker.serving(worker) as port,
        serving(make_config(config, FIXTURE, [f"127.0.0.1:{port}"])) as running,
        httpx.AsyncClient(base_url=running.http, timeout=HANG_S, trust_env=False) as http,
    ):
        await running.gateway.pool.wait_ready()
        yield running, http


async def first_to_reach(point: str, workers: Iterable[FakeWorker]) -> FakeWorker:
    """Whichever of them gets there; the others are no longer held."""
    waits = {asyncio.create_task(worker.script.points.reached(point)): worker for worker in workers}
    done, others = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
        waits[task].script.points.release(point)
    return waits[done.pop()]


async def until(condition: Callable[[], bool]) -> None:
    """For what nothing announces. Whoever calls this has a bound of its own: `fleet` has."""
    while not condition():  # noqa: ASYNC110  # workers' lists and tasks have no event each
        await asyncio.sleep(0.001)


async def ask(running: RunningGateway, form: Form, *, n: int = 2, **more: object) -> Answer:
    if form == "grpc":
        return await _ask_grpc(running, n=n, **more)
    logprobs = {"logprobs": more.pop("logprobs")} if "logprobs" in more else {}
    body = {"model": "kimi", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "n": n, "return_token_ids": True}
    body |= {"stream": form == "http stream"} | logprobs | more
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    async with httpx.AsyncClient(base_url=running.http, timeout=HANG_S, trust_env=False) as client:
        response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    if not body["stream"]:
        whole = response.json()
        return _of_parts([whole], n, whole["usage"]["completion_tokens"])
    assert "data: [DONE]" in response.text, response.text
    events = decoded(response.text.split("\n\n")[:-2])
    return _of_parts(events, n, events[-1]["usage"]["completion_tokens"])


async def _ask_grpc(running: RunningGateway, *, n: int, **more: object) -> Answer:
    options = {"max_tokens": NUM_TOKENS, "n": n} | more
    async with AsyncClient(running.grpc) as client:
        completion = await client.generate(PROMPT, **options)  # pyright: ignore[reportArgumentType]
    return Answer(
        tokens=tuple(list(choice.token_ids) for choice in completion.choices),
        texts=tuple(choice.text for choice in completion.choices),
        num_logprobs=tuple(len(choice.logprobs) for choice in completion.choices),
        num_billed=completion.usage.completion_tokens,
    )


def _of_parts(events: list[dict], n: int, num_billed: int) -> Answer:
    parts = [part for event in events for part in event["choices"]]
    of = [[part for part in parts if part["index"] == choice] for choice in range(n)]
    return Answer(
        tokens=tuple(tokens_of(events, choice) for choice in range(n)),
        texts=tuple("".join(part["text"] for part in mine) for mine in of),
        num_logprobs=tuple(sum(len((part["logprobs"] or {}).get("tokens", ())) for part in mine) for mine in of),
        num_billed=num_billed,
    )


def assert_nothing_left(running: RunningGateway) -> None:
    """At a gateway that is idle."""
    gateway, links = running.gateway, running.gateway.pool.links
    assert (gateway.num_running, gateway.handoffs.num_handoffs) == (0, 0)
    assert [gateway.pool.in_flight_tokens(link.address) for link in links] == [0] * len(links)
    assert not any(link.session.inboxes for link in links if link.session)
