"""A server of chat completions that answers as it is told, whole or streamed as it is asked."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = Mapping[str, Any]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """`lines` are a stream's instead of the answer's own; `breaks` closes the connection without a word."""

    finish_reason: str | None = "stop"
    message: Body | None = None
    status: int = 200
    text: str | None = None  # instead of all that
    lines: Sequence[str] | None = None
    breaks: bool = False

    def whole(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": "Two.", **(self.message or {})}
        choice = {"index": 0, "message": message, "finish_reason": self.finish_reason}
        about = {"id": "chatcmpl-1", "object": "chat.completion", "created": 7, "model": "pocket"}
        return {**about, "choices": [choice], "usage": USAGE}


def call(arguments: str, name: str = "add", number: int = 0) -> dict[str, Any]:
    return {"id": f"functions.{name}:{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: Body) -> Answer:
    return Answer(finish_reason="tool_calls", message={"content": None, "tool_calls": list(calls)})


def request(text: str = "How many?", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "tools": [ADD], **more}


def chunks(whole: Body, cut: Callable[[str], Sequence[str]] = list) -> Iterator[dict[str, Any]]:
    """The chunks that a completion is streamed as, its texts cut into pieces; the last has the usage."""
    (choice,) = whole["choices"]
    message = choice["message"]
    deltas: list[Body] = [{"role": "assistant"}]
    for name in ("reasoning_content", "content"):
        deltas += [{name: piece} for piece in cut(message.get(name) or "")]
    for index, each in enumerate(message.get("tool_calls") or ()):
        function = each["function"]
        deltas.append({"tool_calls": [{**each, "index": index, "function": {"name": function["name"]}}]})
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": piece}}]} for piece in cut(function["arguments"])
        ]
    about = {name: whole[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for delta in deltas:
        yield {**about, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield {**about, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}
    yield {**about, "choices": [], "usage": whole["usage"]}


class Scripted(ThreadingHTTPServer):
    """`script` gives each request its answer, in the thread that has the connection."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: Callable[[Body], Answer] = lambda body: Answer()
        self.models = ["pocket"]
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.num_in_flight = self.max_in_flight = 0
        self.counting = threading.Lock()

    def count(self, num: int) -> None:
        with self.counting:
            self.num_in_flight += num
            self.max_in_flight = max(self.max_in_flight, self.num_in_flight)

    def texts(self) -> list[str]:
        """What was asked, in an order of its own."""
        return sorted(body["messages"][-1]["content"] for body in self.bodies)


class Handler(BaseHTTPRequestHandler):
    server: Scripted  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self.server.keys.add(self.headers["authorization"])
        self._send(200, json.dumps({"data": [{"id": name} for name in self.server.models]}))

    def do_POST(self) -> None:
        self.server.count(1)
        self.server.keys.add(self.headers["authorization"])
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        answer = self.server.script(body)
        self.server.count(-1)  # before its client can know
        if answer.breaks:
            self.close_connection = True
        else:
            self._send(answer.status, answer.text or self._text(answer, bool(body.get("stream"))))

    def _text(self, answer: Answer, is_streamed: bool) -> str:
        if not is_streamed:
            return json.dumps(answer.whole())
        lines = answer.lines
        if lines is None:
            lines = [*(f"data: {json.dumps(chunk)}" for chunk in chunks(answer.whole())), "data: [DONE]"]
        return "".join(f"{line}\n\n" for line in [": alive", *lines])

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def scripted_server() -> Iterator[Scripted]:
    with Scripted() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
