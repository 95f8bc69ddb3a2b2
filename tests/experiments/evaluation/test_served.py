"""Questions over HTTP: what is sent, several at once, and failures that are kept."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from moonshard.experiments.common.turns import WrittenCall
from moonshard.experiments.evaluation.replies import Asked, NoReply, Reply
from moonshard.experiments.evaluation.served import ServedAnswers
from moonshard.experiments.training.texts.tools.tasks import MAX_ANSWER_TOKENS, tool_tasks
from moonshard.serving.config.keys import ConfigError

WAIT_S = 60
TASK = tool_tasks(0, 1)[0]
QUESTION = Asked(messages=({"role": "user", "content": "How many?"},))


@dataclass(frozen=True)
class Answer:
    status: int = 200
    text: str = json.dumps({"choices": [{"message": {"content": "Two."}}]})
    is_broken: bool = False


class FakeServer(ThreadingHTTPServer):
    """Gives every chat the same answer, once so many of them are waiting for it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = Answer()
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.together = threading.Barrier(1)
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: FakeServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["authorization"])
        self._send(200, json.dumps({"data": [{"id": "pocket"}]}))

    def do_POST(self) -> None:
        self.server.keys.append(self.headers["authorization"])
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.server.together.wait(WAIT_S)
        if self.server.answer.is_broken:
            self.close_connection = True
            return
        self._send(self.server.answer.status, self.server.answer.text)

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


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_question_is_sent_greedy_with_its_tools_and_bounded(server, suffix):
    asked = Asked(messages=TASK.messages, tools=TASK.tools)
    with ServedAnswers(server.url + suffix) as served:
        assert served.answer([asked, QUESTION]) == [Reply(content="Two."), Reply(content="Two.")]
    with_tools, without = sorted(server.bodies, key=lambda body: "tools" not in body)
    assert with_tools == {
        "model": "pocket",
        "messages": list(TASK.messages),
        "temperature": 0,
        "max_tokens": MAX_ANSWER_TOKENS,
        "tools": list(TASK.tools),
    }
    assert "tools" not in without


def test_a_key_goes_with_every_request_to_a_url_without_a_scheme(server):
    with ServedAnswers(server.url.removeprefix("http://"), "secret") as served:
        assert served.answer([QUESTION]) == [Reply(content="Two.")]
    assert server.keys == ["Bearer secret"] * 2


def test_calls_are_read_as_they_were_written(server):
    call = {"id": "functions.add:0", "type": "function", "function": {"name": "add", "arguments": '{ "a":1 }'}}
    server.answer = Answer(text=json.dumps({"choices": [{"message": {"content": None, "tool_calls": [call]}}]}))
    with ServedAnswers(server.url) as served:
        (reply,) = served.answer([QUESTION])
    written = WrittenCall(id="functions.add:0", name="add", arguments='{ "a":1 }')
    assert reply == Reply(content="", calls=(written,))


def test_several_questions_are_under_way_together_and_answers_keep_their_order(server):
    server.together = threading.Barrier(4)  # none is answered before four are there
    asked = [Asked(messages=({"role": "user", "content": str(number)},)) for number in range(8)]
    with ServedAnswers(server.url) as served:
        assert served.answer(asked) == [Reply(content="Two.")] * 8
    assert sorted(body["messages"][0]["content"] for body in server.bodies) == list("01234567")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer(status=400, text='{"error": {"message": "too long"}}'), "HTTP 400: too long"),
        (Answer(status=500, text="<html>"), "not a chat completion"),
        (Answer(text='{"choices": []}'), "not a chat completion"),
        (Answer(text="[]"), "not a chat completion"),
        (Answer(text='{"choices": [{"message": {"content": 5}}]}'), "not a chat completion"),
        (Answer(is_broken=True), "RemoteProtocolError"),
    ],
)
def test_whatever_goes_wrong_with_a_question_is_its_reply(server, answer, error):
    server.answer = answer
    with ServedAnswers(server.url) as served:
        (reply,) = served.answer([QUESTION])
        assert isinstance(reply, NoReply)
        assert error in reply.error
        server.answer = Answer()
        assert served.answer([QUESTION]) == [Reply(content="Two.")]


def test_a_server_that_is_not_there_is_an_error_before_anything_is_asked():
    with pytest.raises(ConfigError, match="no server answers"):
        ServedAnswers("http://127.0.0.1:9")
