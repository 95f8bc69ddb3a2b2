"""Traces of requests in Mooncake's public format: when, how long, and which blocks of 512 tokens are the same.

One JSON object a line: `timestamp` in ms, `input_length` and `output_length` in tokens, `hash_ids` of the input's
blocks, the last of which may be partly filled. Source: Mooncake (github.com/kvcache-ai/Mooncake, FAST'25 release).
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 512
MAX_BLOCK = 1 << 64
MAX_TIMESTAMP_MS = 1e15  # some 30,000 years: Unix times fit


class TraceError(ValueError):
    """Raised for a file that is no trace; the message names the line and the field."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    timestamp_ms: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]  # equal numbers, and equal ones before them, are equal tokens
    line: int | None = field(default=None, compare=False)  # of the file; None: it comes from none


def read_trace(path: Path) -> list[TracedRequest]:
    """The requests of a trace in order of time, which is the file's order.

    TraceError for a line that is no request, or that is earlier than the one above it; OSError for a file that cannot
    be read.
    """
    found: list[TracedRequest] = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for request in _requests(path, lines):
            if found and request.timestamp_ms < found[-1].timestamp_ms:
                raise TraceError(f"{path}, line {request.line}: timestamp {request.timestamp_ms:g} after a later one")
            found.append(request)
    return found


def write_trace(path: Path, requests: Iterable[TracedRequest]) -> None:
    """Writes a trace that `read_trace` reads. OSError where it cannot be written."""
    with path.open("w", encoding="utf-8") as lines:
        for one in requests:
            line = {
                "timestamp": round(one.timestamp_ms),
                "input_length": one.input_tokens,
                "output_length": one.output_tokens,
                "hash_ids": list(one.blocks),
            }
            lines.write(json.dumps(line) + "\n")


def _requests(path: Path, lines: Iterator[str]) -> Iterator[TracedRequest]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield replace(_request(json.loads(line)), line=number)
        except (ValueError, OverflowError, RecursionError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from error


def _request(raw: Any) -> TracedRequest:
    if not isinstance(raw, dict):
        raise TraceError("expected an object")
    timestamp, blocks = raw.get("timestamp"), raw.get("hash_ids")
    if not isinstance(timestamp, int | float) or isinstance(timestamp, bool) or not 0 <= timestamp < MAX_TIMESTAMP_MS:
        raise TraceError(f"timestamp is {timestamp!r}, not a number of milliseconds")
    if not isinstance(blocks, list) or not all(type(block) is int and 0 <= block < MAX_BLOCK for block in blocks):
        raise TraceError("hash_ids is not a list of numbers below 2^64")
    num_input, num_output = _count(raw, "input_length"), _count(raw, "output_length")
    if len(blocks) != -(-num_input // BLOCK_TOKENS):
        raise TraceError(f"hash_ids has {len(blocks)} blocks for {num_input} tokens")
    return TracedRequest(float(timestamp), num_input, num_output, tuple(blocks))


def _count(raw: dict[str, Any], field: str) -> int:
    value = raw.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise TraceError(f"{field} is {value!r}, not a number of tokens")
    return value
