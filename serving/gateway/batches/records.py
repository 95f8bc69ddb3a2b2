"""What the store keeps of a file and of a batch, and which states a batch goes through."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

type Status = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]
ENDED: frozenset[Status] = frozenset({"completed", "failed", "expired", "cancelled"})
STAMPS: tuple[str, ...] = (
    *("in_progress_at", "finalizing_at", "completed_at", "failed_at"),
    *("expired_at", "cancelling_at", "cancelled_at"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """A file that is whole and on disk. Times are seconds of the day's clock, as OpenAI has them."""

    id: str
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LineError:
    """What is wrong with a line, or with the whole (no `line`, which counts from 1)."""

    code: str
    message: str
    line: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRecord:
    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: Mapping[str, str] | None
    status: Status
    created_at: int
    expires_at: int
    stamps: Mapping[str, int]  # of STAMPS, those that have come
    num_total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: tuple[LineError, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingLine:
    """A line without a result: where it stands in the input file."""

    number: int  # from 1
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CheckedLine:
    """A line of the input: to be run where `row` is None, else broken, with its row of the error file."""

    place: PendingLine
    row: bytes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LineResult:
    """A line's row of the output file, or of the error file."""

    batch_id: str
    number: int
    row: bytes
    is_error: bool
