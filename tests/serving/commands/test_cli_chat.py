"""The terminal chat against a scripted HTTP server: streaming, stopping, refusals, no server."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from moonshard.serving.commands.terminal_chat import ChatOptions, run_chat
from moonshard.serving.config.keys import ConfigError


class FakeServer(HTTPServer):
    """Answers every chat with its words, or refuses; remembers the bodies."""

    words: tuple[str, ...] = ("Hel", "lo")
    refusal: str | None = None
    breaks: bool = False
    key: str | None = None  # what every request must be authorised by

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: FakeServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        if self.headers["authorization"] != self.server.key:
            return self._send(401, json.dumps({"error": {"message": "no"}}))
        is_known = self.path == "/v1/models"
        return self._send(200 if is_known else 404, json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        assert self.headers["authorization"] == self.server.key
        if self.server.refusal:
            return self._send(429, json.dumps({"error": {"message": self.server.refusal}}))
        role = {"choices": [{"index": 0, "delta": {"role": "assistant"}}]}
        chunks = [role, *({"choices": [{"index": 0, "delta": {"content": word}}]} for word in self.server.words)]
        last = {"error": {"message": "the worker died"}} if self.server.breaks else {"choices": [], "usage": {}}
        events = [": keep-alive", *(f"data: {json.dumps(chunk)}" for chunk in [*chunks, last]), "data: [DONE]"]
        return self._send(200, "\n\n".join([*events, ""]))

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def talk(server: FakeServer, text: str, options: ChatOptions | None = None, sink: io.StringIO | None = None) -> str:
    sink = sink or io.StringIO()
    assert run_chat(server.url, options or ChatOptions(), source=io.StringIO(text), sink=sink) == 0
    return sink.getvalue()


def test_an_answer_is_shown_and_becomes_part_of_the_next_question(server: FakeServer):
    assert "> Hello\n> > Hello\n" in talk(server, "Hi\n\nAgain\n/exit\nnever sent\n", ChatOptions(system="Be brief."))
    assert [m["content"] for m in server.bodies[1]["messages"]] == ["Be brief.", "Hi", "Hello", "Again"]
    assert len(server.bodies) == 2


def test_the_url_may_be_without_a_scheme(server: FakeServer):
    sink = io.StringIO()
    url = server.url.removeprefix("http://")
    assert run_chat(url, ChatOptions(), source=io.StringIO("Hi\n"), sink=sink) == 0
    assert "Hello" in sink.getvalue()


def test_the_key_goes_with_every_request_and_a_refusal_names_the_option(server: FakeServer):
    server.key = "Bearer secret"
    assert run_chat(server.url, ChatOptions(), api_key="secret", source=io.StringIO("Hi\n"), sink=io.StringIO()) == 0
    for key, said in ((None, "asks for a key"), ("wrong", "does not know this key")):
        with pytest.raises(ConfigError, match=f"^--api-key: {server.url} {said}$"):
            run_chat(server.url, ChatOptions(), api_key=key, source=io.StringIO(""), sink=io.StringIO())


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_url_may_be_the_one_openais_clients_take(server: FakeServer, suffix: str):
    sink = io.StringIO()
    assert run_chat(server.url + suffix, ChatOptions(), source=io.StringIO("Hi\n"), sink=sink) == 0
    assert "Hello" in sink.getvalue()


def test_options_are_sent_only_when_given(server: FakeServer):
    talk(server, "Hi\n")
    talk(server, "Hi\n", ChatOptions(model="other", temperature=0.0, max_tokens=3))
    assert server.bodies[0].keys() == {"model", "stream", "messages"}
    assert server.bodies[0]["model"] == "tiny"
    assert (server.bodies[1]["model"], server.bodies[1]["temperature"], server.bodies[1]["max_tokens"]) == (
        "other",
        0,
        3,
    )


def test_a_refused_question_is_shown_and_forgotten(server: FakeServer):
    server.refusal = "too busy"
    assert talk(server, "Hi\nAgain\n").count("error: too busy") == 2
    assert len(server.bodies[1]["messages"]) == 1


def test_an_error_in_the_middle_of_a_stream_is_shown(server: FakeServer):
    server.breaks = True
    assert "Helloerror: the worker died" in talk(server, "Hi\n").replace("\n", "")


class Interrupting(io.StringIO):
    """Ctrl-C as soon as the first word appears."""

    def write(self, text: str) -> int:
        written = super().write(text)
        if text == "Hel":
            raise KeyboardInterrupt
        return written


def test_an_interrupt_stops_the_answer_and_not_the_session(server: FakeServer):
    shown = talk(server, "Hi\n/exit\n", sink=Interrupting())
    assert "> Hel\n> \n" in shown


def test_without_a_server_it_says_how_to_start_one():
    with FakeServer() as unstarted:
        url = unstarted.url
    with pytest.raises(ConfigError, match=r"no server answers .* start one with `moonshard serve`"):
        run_chat(url, ChatOptions(), source=io.StringIO(""), sink=io.StringIO())


@pytest.mark.parametrize("url", ["not a url", "localhost:8000", "http://[bad"])
def test_a_url_that_is_none_is_refused(url: str):
    with pytest.raises(ConfigError, match=r"--url"):
        run_chat(url, ChatOptions(), source=io.StringIO(""), sink=io.StringIO())
