"""`moonshard demo`: the whole system once, from nothing to a table of where each millisecond went.

It serves the embedded model on free ports, with the same supervisor as `moonshard serve`: a gateway, a prefill and a
decode worker, each a process, KV going from one to the other through Mooncake. It asks them over HTTP and over gRPC as
any client would, shows the answers as they come, then sends a prompt so long that its KV goes over in several chunks,
and takes everything down again.
"""

import asyncio
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random

import httpx
from rich.console import Console
from rich.table import Table

from moonshard.rpc.client import Client
from moonshard.rpc.status import RequestError
from moonshard.rpc.types import Timing
from moonshard.serving.commands.serve import ChildCommands, limits_of, ready_line
from moonshard.serving.config import Config
from moonshard.serving.config_file import load_config
from moonshard.serving.supervisor import ChildFailed, Supervisor
from moonshard.serving.terminal import TerminalReporter
from moonshard.serving.terminal_chat import (
    TIMEOUT,
    ChatOptions,
    ServerError,
    chunk_text,
    request_body,
    stream_chat,
    user,
)

Row = tuple[str, float]  # what the time went to, milliseconds
LONG_CHUNKS = 4  # of the long prompt, the last of them not full
LONG_MAX_TOKENS = 16
GRPC_METHOD = "moonshard.v1.Inference/Generate"


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpTimes:
    """What the HTTP client saw, in milliseconds since it sent the request."""

    first_chunk_ms: float  # the first that carries a token
    last_chunk_ms: float
    end_ms: float
    num_tokens: int


def demo(prompt: str = "Where does the moon go in the morning?", max_tokens: int = 48) -> int:
    """Serve the embedded model, send three requests, show where the time went.

    Args:
        prompt: the user's message of the first two requests; the third is a long one of random tokens.
        max_tokens: how long each of their answers may be.
    """
    return asyncio.run(_demo(prompt, max_tokens))


async def _demo(prompt: str, max_tokens: int) -> int:
    begun_s = time.perf_counter()
    config = load_config(None, ["gateway.port=0", "gateway.grpc_port=0"])
    reporter = TerminalReporter()
    supervisor = Supervisor(ChildCommands(config), reporter, limits_of(config))
    try:
        listening = await supervisor.start()
        reporter.finish()
        print(ready_line(config, listening, time.perf_counter() - begun_s))
        await asyncio.to_thread(_show, config, listening, prompt, max_tokens)
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


def _show(config: Config, listening: Mapping[str, object], prompt: str, max_tokens: int) -> None:
    print(f"{config.model.name} has random weights, so what it says is gibberish.")
    http = ask_http(str(listening["http"]), config.model.name, prompt, max_tokens)
    with Client(str(listening["grpc"])) as client:
        short = ask_grpc(client, prompt, max_tokens)
        long = ask_long(client, LONG_CHUNKS * config.prefill.chunk_tokens - config.kv.block_size)
    console = Console()
    print()
    for title, timing in (("gRPC request", short), ("gRPC request with the long prompt", long)):
        console.print(time_table(f"{title}, by the gateway's clock", grpc_rows(timing), timing.e2e_ms))
        console.print(handoff_table(timing))
    console.print(time_table("HTTP request, as its client saw it", http_rows(http), http.end_ms))


def ask_http(url: str, model: str, prompt: str, max_tokens: int) -> HttpTimes:
    """Stream one chat completion to the terminal. ServerError if it is refused."""
    _announce(f"HTTP {url}/v1/chat/completions")
    body = request_body(model, ChatOptions(max_tokens=max_tokens)) | {"messages": [user(prompt)]}
    with httpx.Client(base_url=url, timeout=TIMEOUT, trust_env=False) as http:
        begun_s = time.perf_counter()
        arrivals_ms = []
        for chunk in stream_chat(http, body):
            if any("role" not in choice["delta"] for choice in chunk["choices"]):  # the role comes before any token
                arrivals_ms.append((time.perf_counter() - begun_s) * 1e3)
                _type(chunk_text(chunk))
        end_ms = (time.perf_counter() - begun_s) * 1e3
    _type("\n")
    if not arrivals_ms:
        raise ServerError("the stream ended without a token")
    return HttpTimes(
        first_chunk_ms=arrivals_ms[0], last_chunk_ms=arrivals_ms[-1], end_ms=end_ms, num_tokens=len(arrivals_ms)
    )


def ask_grpc(client: Client, prompt: str, max_tokens: int) -> Timing:
    """Stream one generation to the terminal; the gateway's account of its time. RequestError if it is refused."""
    _announce(f"gRPC {GRPC_METHOD}")
    with client.stream([user(prompt)], max_tokens=max_tokens) as stream:
        for delta in stream:
            _type(delta.text)
        _type("\n")
        return stream.summary.timing


def ask_long(client: Client, num_tokens: int) -> Timing:
    """The same for a prompt of random tokens, whose answer is not worth showing."""
    vocab_size = client.model_info().vocab_size
    random = Random(0)
    prompt = [random.randrange(vocab_size) for _ in range(num_tokens)]
    _announce(f"gRPC {GRPC_METHOD}, a prompt of {num_tokens:,} random tokens")
    return client.generate(prompt, max_tokens=LONG_MAX_TOKENS, ignore_eos=True).timing


def grpc_rows(timing: Timing) -> list[Row]:
    """The gateway's phases, with the workers' shares of the long ones apart. Their sum is `timing.e2e_ms`.

    The second wire may be below 0: the transfer's rest begins when the prefill worker has the first token, and the
    gateway's phase when that token has arrived.
    """
    after_first = (timing.exposed_transfer_ms, timing.land_ms, timing.join_ms, timing.worker_decode_ms)
    return [
        ("gateway: queue (validate, template, tokenise, route)", timing.gateway_queue_ms),
        ("prefill worker: wait for a step", timing.worker_queue_ms),
        ("prefill worker: prefill", timing.worker_prefill_ms),
        ("wire: to the worker, and the first token back", timing.wire_ms),
        ("transfer: its rest after the first token (exposed)", timing.exposed_transfer_ms),
        ("decode worker: land the last chunk", timing.land_ms),
        ("decode worker: join the batch", timing.join_ms),
        ("decode worker: decode the other tokens", timing.worker_decode_ms),
        ("wire: between the workers, and the other tokens back", timing.decode_ms - sum(after_first)),
        ("gateway: finish the stream", timing.finish_ms),
    ]


def handoff_rows(timing: Timing) -> list[Row]:
    """What a handoff is judged by. These lie inside the phases, so they add up to nothing."""
    return [
        ("TTFT: receipt to the first token sent", timing.ttft_ms),
        ("handoff gap: the first token to the second", timing.handoff_gap_ms),
        ("transfer in all", timing.transfer_ms),
        ("of this, hidden behind the prefill", timing.transfer_ms - timing.exposed_transfer_ms),
    ]


def http_rows(times: HttpTimes) -> list[Row]:
    """Their sum is `times.end_ms`."""
    return [
        ("to the first token", times.first_chunk_ms),
        (f"the other {times.num_tokens - 1} chunks", times.last_chunk_ms - times.first_chunk_ms),
        ("to the end of the stream", times.end_ms - times.last_chunk_ms),
    ]


def time_table(title: str, rows: Iterable[Row], total_ms: float) -> Table:
    table = Table("where", "ms", "share", title=title, title_justify="left", show_footer=True)
    for name, elapsed_ms in rows:
        table.add_row(name, f"{elapsed_ms:.2f}", f"{elapsed_ms / total_ms:.0%}")
    for column, footer in zip(table.columns, ("end to end", f"{total_ms:.2f}", "100%"), strict=True):
        column.footer = footer
        column.justify = "left" if column is table.columns[0] else "right"
    return table


def handoff_table(timing: Timing) -> Table:
    table = Table("beside", "ms", title="Its handoff", title_justify="left")
    for name, elapsed_ms in handoff_rows(timing):
        table.add_row(name, f"{elapsed_ms:.2f}")
    table.columns[1].justify = "right"
    return table


def _announce(text: str) -> None:
    print(f"\n── {text}")


def _type(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
