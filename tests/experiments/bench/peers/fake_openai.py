"""A server with OpenAI's completions that starts at once and answers by a script."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TEXTS = ("a", "b", "c")


@dataclass(kw_only=True)
class Script:
    """What it does with a prompt, and what it was asked. Several servers may write one log."""

    name: str = "fake"
    log: list[tuple[str, Any]] = field(default_factory=list)  # who was asked, and the prompt
    takes_ids: bool = True
    answers: int | None = None  # before it hangs up; None: it never does
    connections: list[Any] = field(default_factory=list)  # by which its requests came
    refuses: Callable[[dict[str, Any]], bool] = lambda body: False


class FakeOpenAi(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = script
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # whoever asked has hung up


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # it would keep connections
    server: FakeOpenAi  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self._send(200, "application/json", json.dumps({"data": [{"id": "model-of-it"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        script = self.server.script
        with self.server.lock:
            if script.answers == 0:
                self.close_connection = True
                return
            if script.answers is not None:
                script.answers -= 1
        if script.refuses(body) or (isinstance(body["prompt"], list) and not script.takes_ids):
            self._send(400, "text/plain", "not like this")
            return
        with self.server.lock:
            script.log.append((script.name, body["prompt"]))
            script.connections.append(self.client_address)
        self._send(200, "text/event-stream", "".join(stream_of(body["max_tokens"])))

    def _send(self, status: int, content_type: str, text: str) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def stream_of(num_tokens: int) -> Iterator[str]:
    """A chunk for each token; then the reason of the end without text, as some servers send it, and the usage."""
    for index in range(num_tokens):
        yield _event({"choices": [{"text": TEXTS[index % len(TEXTS)], "finish_reason": None}]})
    yield _event({"choices": [{"text": "", "finish_reason": "length"}]})
    yield _event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": num_tokens}})
    yield "data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


@contextmanager
def answering(script: Script) -> Iterator[str]:
    """Its URL during the block."""
    with FakeOpenAi(script) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()
