"""The tables that a server records, and every column of them; `experiments/SCHEMA.md` says what each column means.

A row is a tuple in the order of the columns named here. Stamps are of `time.perf_counter_ns`, which on Linux is
CLOCK_MONOTONIC: one clock for all processes of a host, since its boot.
"""

from dataclasses import dataclass
from typing import Literal

type ColumnKind = Literal["text", "int", "float", "bool", "ints"]
type Value = str | int | float | bool | tuple[int, ...] | None
type TableRow = tuple[Value, ...]

VERSION = 1  # of all tables together: another one for every change that is more than a new column


@dataclass(frozen=True, slots=True)
class Column:
    """`unit`: "clock ns" for a stamp, "ns" or "ms" for a duration, "tokens" or "blocks" for so many, or none."""

    name: str
    kind: ColumnKind
    unit: str = ""
    is_optional: bool = False  # may be null


@dataclass(frozen=True, slots=True)
class Table:
    """`columns` are those that a row fills; the file has `ORIGIN` behind them."""

    name: str
    columns: tuple[Column, ...]

    @property
    def all_columns(self) -> tuple[Column, ...]:
        return self.columns + ORIGIN


def _optional(name: str, kind: ColumnKind, unit: str = "") -> Column:
    return Column(name, kind, unit, is_optional=True)


# Of whom a part is, and what ties its clock to the time of day: the same in every row of one part.
ORIGIN = (
    Column("host", "text"),
    Column("clock", "text"),
    Column("pid", "int"),
    Column("unix_offset_ns", "int", "ns"),
    Column("version", "int"),
)

REQUESTS = Table(
    "requests",
    (
        Column("request_id", "text"),
        _optional("attempt_id", "text"),
        Column("model", "text"),
        Column("tenant", "text"),
        _optional("session", "text"),
        Column("outcome", "text"),
        _optional("error", "text"),
        _optional("finish_reason", "text"),
        _optional("num_choices", "int"),
        _optional("max_tokens", "int", "tokens"),
        _optional("prompt_tokens", "int", "tokens"),
        _optional("cached_tokens", "int", "tokens"),
        _optional("tier_tokens", "int", "tokens"),
        Column("completion_tokens", "int", "tokens"),
        Column("num_retries", "int"),
        _optional("prefill_worker", "text"),
        _optional("prefill_epoch", "text"),
        _optional("prefill_partition", "int"),
        _optional("decode_worker", "text"),
        _optional("decode_epoch", "text"),
        _optional("decode_partition", "int"),
        _optional("is_local_prefill", "bool"),
        Column("received_ns", "int", "clock ns"),
        _optional("ttft_ns", "int", "ns"),
        Column("e2e_ns", "int", "ns"),
        Column("gateway_queue_ns", "int", "ns"),
        Column("first_token_ns", "int", "ns"),
        Column("decode_ns", "int", "ns"),
        Column("finish_ns", "int", "ns"),
        _optional("lost_ns", "int", "ns"),
        _optional("decode_queue_ms", "float", "ms"),
        _optional("worker_queue_ms", "float", "ms"),
        _optional("worker_prefill_ms", "float", "ms"),
        _optional("worker_decode_ms", "float", "ms"),
        _optional("wire_ms", "float", "ms"),
        _optional("handoff_gap_ms", "float", "ms"),
        _optional("transfer_ms", "float", "ms"),
        _optional("exposed_transfer_ms", "float", "ms"),
        _optional("transferred_ns", "int", "clock ns"),
        _optional("land_ms", "float", "ms"),
        _optional("join_ms", "float", "ms"),
    ),
)
PHASES = ("gateway_queue_ns", "first_token_ns", "decode_ns", "finish_ns")  # they add up to e2e_ns

STEPS = Table(
    "steps",
    (
        Column("worker", "text"),
        Column("epoch", "text"),
        Column("role", "text"),
        Column("number", "int"),
        Column("kind", "text"),
        Column("partitions", "ints"),
        Column("bucket", "int"),
        Column("batch", "int"),
        Column("tokens", "int", "tokens"),
        Column("context_tokens", "int", "tokens"),
        Column("blocks", "int", "blocks"),
        Column("was_overlapped", "bool"),
        Column("launched_ns", "int", "clock ns"),
        Column("host_ns", "int", "ns"),
        Column("device_ns", "int", "ns"),
        Column("done_ns", "int", "clock ns"),
        Column("handled_ns", "int", "clock ns"),
    ),
)

TOKENS = Table(
    "tokens",
    (
        Column("request_id", "text"),
        Column("choice", "int"),
        Column("index", "int"),
        Column("arrived_ns", "int", "clock ns"),
    ),
)

STARTS = Table(
    "starts",
    (
        Column("process", "text"),
        Column("role", "text"),
        Column("phase", "text"),
        Column("detail", "text"),
        Column("begun_ms", "float", "ms"),
        Column("took_ms", "float", "ms"),
    ),
)

TABLES = (REQUESTS, STEPS, TOKENS, STARTS)
