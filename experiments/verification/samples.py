"""What is asked, out of either file of the verifier: `samples.jsonl` has a request a line, `results.jsonl` a result.

A result brings its request along and the finish reason of whoever answered it, which then is the reference. A line that
is neither is kept as what is wrong with it: the others are asked.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonshard.experiments.verification.strict_json import parse

INPUT_ROLE, SYSTEM_ROLE = "_input", "system"
Request = Mapping[str, Any]  # the body of a chat completion


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A request; `reference` is the finish reason that the reference has for it, None without one."""

    data_index: int
    request: Request
    reference: str | None = None

    @property
    def hash(self) -> str:
        """As the verifier has it: of the request, keys sorted."""
        text = json.dumps(self.request, sort_keys=True, ensure_ascii=False)
        return hashlib.md5(text.encode("utf-8", "surrogatepass"), usedforsecurity=False).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenLine:
    """A line that cannot be asked; its number stands for its index."""

    data_index: int
    error: str


def read_samples(path: Path) -> list[Sample | BrokenLine]:
    """The file's lines in order; of several results of one request, which a continued run leaves, the last. OSError."""
    found: dict[object, Sample | BrokenLine] = {}
    for number, line in _lines(path):
        each = _sample(number, line)
        found[(each.data_index, each.hash) if isinstance(each, Sample) else number] = each
    return list(found.values())


def read_reference(path: Path) -> dict[int, str]:
    """The finish reason by index of each result that succeeded; other lines give none. OSError."""
    found: dict[int, str] = {}
    for number, line in _lines(path):
        try:
            told = parse(line)
        except ValueError:
            continue
        if isinstance(told, dict) and (reason := _finish_reason(told)) is not None:
            found[_index(told, number)] = reason
    return found


def prepared(request: Request, model: str) -> Request:
    """The request as the verifier would send it to this model, so that its hashes are ours."""
    body = {**request, "model": model, "messages": [_message(each) for each in request["messages"]]}
    if not body.get("stream"):
        return body
    options = body.get("stream_options")
    return {**body, "stream_options": {"include_usage": True, **(options if isinstance(options, dict) else {})}}


def tools_of(request: Request) -> Sequence[Any]:
    tools = request.get("tools")
    return tools if isinstance(tools, list) else ()


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())


def _sample(number: int, line: bytes) -> Sample | BrokenLine:
    try:
        told = parse(line)
    except ValueError as error:
        return BrokenLine(data_index=number, error=f"not JSON: {error}")
    if not isinstance(told, dict):
        return BrokenLine(data_index=number, error="not a JSON object")
    is_result = "request" in told
    request = told["request"] if is_result else told
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
        return BrokenLine(data_index=number, error="neither a chat request nor a result: it has no list of messages")
    if not is_result:
        return Sample(data_index=number, request=request)
    return Sample(data_index=_index(told, number), request=request, reference=_finish_reason(told))


def _index(result: Mapping[str, Any], number: int) -> int:
    index = result.get("data_index")
    return index if isinstance(index, int) else number


def _finish_reason(result: Mapping[str, Any]) -> str | None:
    reason = result.get("finish_reason")
    return reason if isinstance(reason, str) and result.get("status") != "failed" else None


def _message(message: Any) -> Any:
    is_input = isinstance(message, dict) and message.get("role") == INPUT_ROLE
    return {**message, "role": SYSTEM_ROLE} if is_input else message
