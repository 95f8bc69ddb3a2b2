"""One request over gRPC as its client saw it, however it ended: never an exception, always a row.

TTFT is from the sending to the first token here, whatever was intended; how late the sending was stands beside it.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from moonshard.experiments.runner.points import ClientOptions
from moonshard.experiments.workload.plan import Planned
from moonshard.rpc.client import AsyncClient, AsyncStream
from moonshard.rpc.status import RequestError
from moonshard.rpc.types import Summary
from moonshard.serving.observe.rows.schema import Value

SESSION_HEADER = "x-session-affinity"
MAX_ERROR_CHARS = 500
COMPLETED = "completed"
ABANDONED = "abandoned"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientRequest:
    """One request. Stamps are of `time.perf_counter_ns`."""

    request_id: str
    request_index: int  # in the workload
    planned: Planned
    intended_ns: int
    sent_ns: int
    arrivals_ns: tuple[int, ...]  # of each token
    ended_ns: int
    outcome: str = COMPLETED
    error: str | None = None
    finish_reason: str | None = None
    summary: Summary | None = None  # None: it did not complete

    @property
    def late_ns(self) -> int:
        return self.sent_ns - self.intended_ns

    def row(self) -> Mapping[str, Value]:
        """The row of the table `client requests`, by column."""
        arrivals, summary = self.arrivals_ns, self.summary
        gaps = [after - before for before, after in pairwise(arrivals)]
        timing, usage = (summary.timing, summary.usage) if summary else (None, None)
        return {
            "request_id": self.request_id,
            "request_index": self.request_index,
            "session": self.planned.session,
            "turn": self.planned.turn,
            "outcome": self.outcome,
            "error": self.error,
            "finish_reason": self.finish_reason,
            "planned_prompt_tokens": len(self.planned.prompt),
            "max_tokens": self.planned.max_tokens,
            "prompt_tokens": usage.prompt_tokens if usage else None,
            "cached_tokens": usage.cached_tokens if usage else None,
            "completion_tokens": len(arrivals),
            "intended_ns": self.intended_ns,
            "sent_ns": self.sent_ns,
            "late_ns": self.late_ns,
            "ended_ns": self.ended_ns,
            "ttft_ns": arrivals[0] - self.sent_ns if arrivals else None,
            "e2e_ns": self.ended_ns - self.sent_ns,
            "decode_ns": arrivals[-1] - arrivals[0] if arrivals else None,
            "max_itl_ns": max(gaps, default=None),
            "gateway_ttft_ms": timing.ttft_ms if timing else None,
            "gateway_e2e_ms": timing.e2e_ms if timing else None,
            "handoff_gap_ms": (timing.handoff_gap_ms or None) if timing else None,
            "num_retries": timing.num_retries if timing else None,
        }

    def token_rows(self) -> Iterator[Mapping[str, Value]]:
        """The rows of the table `client tokens`."""
        for index, arrived_ns in enumerate(self.arrivals_ns):
            yield {"request_index": self.request_index, "index": index, "arrived_ns": arrived_ns}


async def ask(
    client: AsyncClient,
    planned: Planned,
    prompt: list[int],
    *,
    request_index: int,
    request_id: str,
    intended_ns: int,
    options: ClientOptions,
) -> ClientRequest:
    """Asks one request and returns its row. Cancelling the task abandons the request, and returns a row as well."""
    arrivals_ns: list[int] = []
    outcome, error, finish_reason, stream = COMPLETED, None, None, None
    names_session = options.names_sessions and planned.session is not None
    sent_ns = time.perf_counter_ns()
    try:
        stream = client.stream(
            prompt,
            max_tokens=planned.max_tokens,
            temperature=options.temperature,
            ignore_eos=options.ignore_eos,
            request_id=request_id,
            timeout_s=options.timeout_s,
            metadata=((SESSION_HEADER, str(planned.session)),) if names_session else (),
        )
        finish_reason = await _read(stream, arrivals_ns)
    except RequestError as failed:
        outcome, error = failed.code.name.lower(), str(failed)[:MAX_ERROR_CHARS]
    except asyncio.CancelledError:
        outcome, error = ABANDONED, "the trial ended before this request did"
    return ClientRequest(
        request_id=request_id,
        request_index=request_index,
        planned=planned,
        intended_ns=intended_ns,
        sent_ns=sent_ns,
        arrivals_ns=tuple(arrivals_ns),
        ended_ns=time.perf_counter_ns(),
        outcome=outcome,
        error=error,
        finish_reason=finish_reason,
        summary=stream.summary if stream is not None and outcome == COMPLETED else None,
    )


async def _read(stream: AsyncStream, arrivals_ns: list[int]) -> str | None:
    """Reads the stream, adding a stamp for each token; returns the finish reason."""
    reason = None
    async with stream:
        async for delta in stream:
            if delta.token_ids:
                arrivals_ns += [time.perf_counter_ns()] * len(delta.token_ids)
            reason = delta.finish_reason or reason
    return reason
