"""Results as the verifier's `results.jsonl` has them: written as they arrive, and read to go on with a broken-off run.

A result belongs to a request by index and hash, so that the same request asked twice has two. What was asked with
another extra body is another question.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from moonshard.experiments.verification.samples import Request, Sample

SUCCESS, FAILED = "success", "failed"
TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A line of the file. `response` of a failed one has `error_type` and `error_message`."""

    data_index: int
    request: Request | None  # None: the line had none
    extra_body: Mapping[str, Any]
    response: Mapping[str, Any]
    status: str
    finish_reason: str | None = None
    tool_calls_valid: bool | None = None  # None: it did not finish with calls
    last_run_at: str
    duration_ms: int
    hash: str | None

    @property
    def has_succeeded(self) -> bool:
        return self.status == SUCCESS

    @property
    def has_calls(self) -> bool:
        return self.finish_reason == TOOL_CALLS

    def to_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Done:
    """The results that need not be asked for again."""

    def __init__(self, found: Mapping[tuple[int, str], Result] | None = None):
        self._found = found or {}

    def of(self, sample: Sample) -> Result | None:
        return self._found.get((sample.data_index, sample.hash))


def read_done(path: Path, extra_body: Mapping[str, Any]) -> Done:
    """What has succeeded, of a file that need not exist. A line that was cut off is passed over. OSError."""
    if not path.is_file():  # a device may have no end
        return Done()
    with path.open("rb") as file:
        results = [result for line in file if (result := _read(line)) is not None]
    return Done(
        {
            (result.data_index, result.hash): result
            for result in results
            if result.has_succeeded and result.hash is not None and result.extra_body == extra_body
        }
    )


class ResultFile:
    """Results behind those that the file has. What cannot be written ends the writing and is kept as `error`."""

    def __init__(self, path: Path):
        """OSError."""
        self.error: OSError | None = None
        self.path = path
        with path.open("ab") as file:
            if file.tell() and not _ends_with_newline(path):
                file.write(b"\n")

    def append(self, result: Result) -> None:
        """Writes a line that is there whatever ends the process next."""
        if self.error is not None:
            return
        try:
            with self.path.open("ab") as file:
                file.write(json.dumps(result.to_json()).encode() + b"\n")
        except OSError as error:
            self.error = error


def _read(line: bytes) -> Result | None:
    try:
        return msgspec.json.decode(line, type=Result)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"
