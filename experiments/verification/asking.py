"""Asks the server: so many at a time, each whole or streamed as it says, and every answer a result as it arrives.

Whatever goes wrong with one request is its result. A request is asked once: the verifier retries, here the same command
with the same `--out` asks again for what failed.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx

from moonshard.experiments.verification.results import FAILED, SUCCESS, TOOL_CALLS, Result
from moonshard.experiments.verification.samples import BrokenLine, Sample, tools_of
from moonshard.experiments.verification.streamed import StreamSum
from moonshard.experiments.verification.strict_json import parse
from moonshard.experiments.verification.validity import are_valid
from moonshard.serving.commands.terminal_chat import ServerError, authorization, chunk_of, error_text, root_of

CHAT_PATH = "/v1/chat/completions"
CONNECT_S = 5.0
NO_COMPLETION = (ValueError, LookupError, TypeError, AttributeError)  # what reading something else raises
Take = Callable[[Sample, Result], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asking:
    """Whom, and how."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    concurrency: int
    timeout_s: float
    extra_body: Mapping[str, Any]


async def ask_all(samples: Sequence[Sample], asking: Asking, take: Take) -> None:
    """Asks everything, `concurrency` at a time. What `take` raises ends it, in a group, and so does cancelling."""
    waiting = iter(samples)
    async with client(asking) as http, asyncio.TaskGroup() as group:
        for _ in range(min(asking.concurrency, len(samples))):
            group.create_task(_ask_in_turn(http, waiting, asking, take))


def client(asking: Asking) -> httpx.AsyncClient:
    """Its connections are bounded by who asks alone: no request's time passes in a queue for one."""
    return httpx.AsyncClient(
        base_url=root_of(asking.url),
        headers=authorization(asking.api_key) | {"content-type": "application/json"},
        timeout=httpx.Timeout(None, connect=CONNECT_S),
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
    )


async def _ask_in_turn(http: httpx.AsyncClient, waiting: Iterator[Sample], asking: Asking, take: Take) -> None:
    for sample in waiting:
        take(sample, await ask(http, sample, asking))


async def ask(http: httpx.AsyncClient, sample: Sample, asking: Asking) -> Result:
    """One request's result, whatever becomes of it."""
    begun_s = time.perf_counter()
    try:
        async with asyncio.timeout(asking.timeout_s):
            response = await _completion(http, {**sample.request, **asking.extra_body})
        return _success(sample, asking, response, begun_s)
    except TimeoutError:
        error: Exception = TimeoutError(f"no answer within {asking.timeout_s:g} s")
    except (ServerError, httpx.HTTPError) as failure:
        error = failure
    except NO_COMPLETION as failure:
        error = ServerError(f"not a chat completion: {type(failure).__name__}: {failure}")
    return _failure(sample.data_index, asking, error, begun_s, sample)


def broken_result(line: BrokenLine, asking: Asking) -> Result:
    """The result of what could not be asked."""
    return _failure(line.data_index, asking, ValueError(line.error), time.perf_counter())


async def _completion(http: httpx.AsyncClient, body: Mapping[str, Any]) -> dict[str, Any]:
    """The answer, whole. ServerError for a refusal, httpx.HTTPError, and those of `NO_COMPLETION`."""
    content = json.dumps(body)
    if body.get("stream"):
        return await _streamed(http, content)
    response = await http.post(CHAT_PATH, content=content)
    if not response.is_success:
        raise _refusal(response.content, response.status_code)
    return parse(response.content)


async def _streamed(http: httpx.AsyncClient, content: str) -> dict[str, Any]:
    found = StreamSum()
    async with http.stream("POST", CHAT_PATH, content=content) as response:
        if not response.is_success:
            raise _refusal(await response.aread(), response.status_code)
        async for line in response.aiter_lines():
            if (chunk := chunk_of(line)) is not None:
                found.add(chunk)
    return found.completion()


def _refusal(body: bytes, status: int) -> ServerError:
    code, text = f"HTTP {status}", error_text(body, status)
    return ServerError(code if text == code else f"{code}: {text}")


def _success(sample: Sample, asking: Asking, response: Mapping[str, Any], begun_s: float) -> Result:
    """LookupError, TypeError or AttributeError for what is no chat completion."""
    choice = response["choices"][0]
    reason, message = choice["finish_reason"], choice["message"]
    if not isinstance(reason, str) or not isinstance(message, dict):
        raise TypeError(f"it finished for {reason!r}")
    valid = are_valid(message.get("tool_calls"), tools_of(sample.request)) if reason == TOOL_CALLS else None
    return Result(
        data_index=sample.data_index,
        request=sample.request,
        extra_body=asking.extra_body,
        response=response,
        status=SUCCESS,
        finish_reason=reason,
        tool_calls_valid=valid,
        last_run_at=_now(),
        duration_ms=_since_ms(begun_s),
        hash=sample.hash,
    )


def _failure(index: int, asking: Asking, error: Exception, begun_s: float, sample: Sample | None = None) -> Result:
    return Result(
        data_index=index,
        request=None if sample is None else sample.request,
        extra_body=asking.extra_body,
        response={"error_type": type(error).__name__, "error_message": str(error)},
        status=FAILED,
        last_run_at=_now(),
        duration_ms=_since_ms(begun_s),
        hash=None if sample is None else sample.hash,
    )


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _since_ms(begun_s: float) -> int:
    return round((time.perf_counter() - begun_s) * 1000)
