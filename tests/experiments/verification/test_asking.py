"""What is sent, so many at once, and failures that are results."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from moonshard.experiments.verification.asking import Asking, ask_all
from moonshard.experiments.verification.results import FAILED, Result
from moonshard.experiments.verification.samples import Sample
from tests.experiments.verification.scripted import Answer, Scripted, call, calling, request

WAIT_S = 60
OK = Answer()


def after(wait: Callable[[float], object]) -> Answer:
    wait(WAIT_S)
    return OK


def ask(server: Scripted, requests: Sequence[dict[str, Any]], **options: Any) -> dict[int, Result]:
    """The results by index."""
    samples = [Sample(data_index=index, request=each) for index, each in enumerate(requests)]
    asking = Asking(**{"url": server.url, "concurrency": 5, "timeout_s": WAIT_S, "extra_body": {}, **options})
    found: dict[int, Result] = {}
    asyncio.run(ask_all(samples, asking, lambda sample, result: found.update({sample.data_index: result})))
    return found


def test_an_answer_is_the_same_streamed_or_whole(server):
    server.script = lambda body: calling(call('{"a": 1}'), call('{"a": "1"}', number=1))
    whole, streamed = ask(server, [request(), request(stream=True)]).values()
    assert whole.response == streamed.response == server.script({}).whole()
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    assert whole.tool_calls_valid is streamed.tool_calls_valid is False


@pytest.mark.parametrize(
    ("answer", "reason", "valid"),
    [
        (calling(call('{"a": 1}')), "tool_calls", True),
        (calling(call('{"a": 1.5}')), "tool_calls", False),
        (calling(call('{"a": 1}', "subtract")), "tool_calls", False),
        (calling(), "tool_calls", False),
        (Answer(finish_reason="stop", message={"tool_calls": [call("{}")]}), "stop", None),
        (OK, "stop", None),
        (Answer(finish_reason="content_filter"), "content_filter", None),
    ],
)
def test_validity_is_of_answers_that_finish_with_calls(server, answer, reason, valid):
    server.script = lambda body: answer
    (result,) = ask(server, [request()]).values()
    assert (result.has_succeeded, result.finish_reason, result.tool_calls_valid) == (True, reason, valid)


@pytest.mark.parametrize("concurrency", [1, 3, 20])
def test_no_more_are_under_way_than_allowed_and_so_many_are(server, concurrency):
    num = 12
    together = threading.Barrier(min(concurrency, num))  # none is answered before so many are there
    server.script = lambda body: after(together.wait)
    assert len(ask(server, [request(str(each)) for each in range(num)], concurrency=concurrency)) == num
    assert server.max_in_flight == min(concurrency, num)
    assert server.texts() == sorted(map(str, range(num)))


def test_the_extra_body_comes_on_top_and_the_key_along(server):
    ask(server, [request(temperature=1)], extra_body={"temperature": 0, "top_p": 1}, api_key="secret")
    assert server.bodies == [request(temperature=0, top_p=1)]
    assert server.keys == {"Bearer secret"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer(status=400, text='{"error": {"message": "too long"}}'), "HTTP 400: too long"),
        (Answer(status=500, text="<html>"), "HTTP 500"),
        (Answer(status=307, text="{}"), "HTTP 307"),
        (Answer(text='{"choices": []}', lines=["data: [1]"]), "not a chat completion"),
        (Answer(text="[]"), "not a chat completion"),
        (Answer(text='data: {"choices": 5}'), "not a chat completion"),
        (Answer(finish_reason=None), "not a chat completion"),
        (Answer(breaks=True), "disconnected"),
    ],
)
def test_whatever_goes_wrong_with_one_is_its_result_and_the_others_are_asked(server, answer, error, stream):
    server.script = lambda body: answer if body["messages"][0]["content"] == "1" else OK
    found = ask(server, [request(str(each), stream=stream) for each in range(3)], concurrency=1)
    assert [found[each].has_succeeded for each in range(3)] == [True, False, True]
    failed = found[1]
    assert (failed.status, failed.finish_reason, failed.tool_calls_valid) == (FAILED, None, None)
    assert error in failed.response["error_message"]


def test_an_error_amid_a_stream_is_its_result(server):
    server.script = lambda body: Answer(
        lines=['data: {"choices": [{"delta": {"content": "Tw"}}]}', 'data: {"error": {"message": "worker lost"}}']
    )
    (result,) = ask(server, [request(stream=True)]).values()
    assert result.response == {"error_type": "ServerError", "error_message": "worker lost"}


def test_a_request_that_takes_too_long_is_given_up(server):
    held = threading.Event()
    server.script = lambda body: after(held.wait)
    try:
        (result,) = ask(server, [request()], timeout_s=0.2).values()
    finally:
        held.set()
    assert result.response == {"error_type": "TimeoutError", "error_message": "no answer within 0.2 s"}


def test_a_key_is_not_in_what_is_printed_of_an_asking():
    asking = Asking(url="", api_key="secret", concurrency=1, timeout_s=1, extra_body={})
    assert "secret" not in repr(asking)
