"""A streamed chat completion, added up to what the same answer is when it comes whole."""

from collections.abc import Mapping
from typing import Any


class StreamSum:
    """The chunks so far. Of several choices only the first counts, as in the verifier."""

    def __init__(self) -> None:
        self._about: dict[str, Any] = {}
        self._texts: dict[str, str] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self._finish_reason: str | None = None
        self._usage: Any = None

    def add(self, chunk: Mapping[str, Any]) -> None:
        """LookupError, TypeError or AttributeError for what is no chunk."""
        self._about |= {name: chunk[name] for name in ("id", "created", "model") if chunk.get(name) is not None}
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            if choice.get("index", 0) == 0:
                self._add_delta(choice.get("delta") or {})
                self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def completion(self) -> dict[str, Any]:
        """The whole. ValueError where the stream broke off before it told why it ends."""
        if self._finish_reason is None:
            raise ValueError("the stream ended without a finish reason")
        message: dict[str, Any] = {"role": "assistant", "content": None, **self._texts}
        if self._calls:
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        choice = {"index": 0, "message": message, "finish_reason": self._finish_reason}
        return {**self._about, "object": "chat.completion", "choices": [choice], "usage": self._usage}

    def _add_delta(self, delta: Mapping[str, Any]) -> None:
        for name in ("content", "reasoning_content", "reasoning"):
            if text := delta.get(name):
                self._texts[name] = self._texts.get(name, "") + text
        for part in delta.get("tool_calls") or ():
            self._add_call(part)

    def _add_call(self, part: Mapping[str, Any]) -> None:
        """The first part at an index has id and name; the arguments come in pieces."""
        call = self._calls.setdefault(
            part.get("index", 0), {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        )
        said, function = part.get("function") or {}, call["function"]
        call["id"] = part.get("id") or call["id"]
        function["name"] = said.get("name") or function["name"]
        function["arguments"] += said.get("arguments") or ""
