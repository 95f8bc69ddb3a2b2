"""Streams added up are what the same answers are whole."""

from random import Random

import pytest

from moonshard.experiments.verification.streamed import StreamSum
from tests.experiments.verification.scripted import Answer, call, calling, chunks

ANSWERS = [
    Answer(),
    Answer(finish_reason="length", message={"reasoning_content": "One and one.", "content": "Two, I"}),
    calling(call('{"a": 1}')),
    calling(call('{"a": 1}'), call("{}", "subtract", 1), call("", number=2)),
    Answer(finish_reason="tool_calls", message={"content": "I add.", "tool_calls": [call('{"a": 1}')]}),
]


def cut_by(random: Random):
    def cut(text: str) -> list[str]:
        places = sorted(random.sample(range(len(text) + 1), k=min(3, len(text) + 1)))
        return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]

    return cut


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_stream_adds_up_to_the_whole_however_it_is_cut(answer, seed):
    found = StreamSum()
    for chunk in chunks(answer.whole(), cut_by(Random(seed))):
        found.add(chunk)
    assert found.completion() == answer.whole()


def test_parts_of_calls_may_be_interleaved():
    found = StreamSum()
    parts = [
        {"index": 1, "id": "y", "function": {"name": "add", "arguments": "{"}},
        {"index": 0, "id": "x", "function": {"name": "add", "arguments": '{"a"'}},
        {"index": 1, "function": {"arguments": "}"}},
        {"index": 0, "function": {"arguments": ": 1}"}},
    ]
    for part in parts:
        found.add({"choices": [{"index": 0, "delta": {"tool_calls": [part]}}]})
    found.add({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    calls = found.completion()["choices"][0]["message"]["tool_calls"]
    assert [(each["id"], each["function"]["arguments"]) for each in calls] == [("x", '{"a": 1}'), ("y", "{}")]


def test_only_the_first_of_several_choices_counts():
    found = StreamSum()
    found.add({"choices": [{"index": 1, "delta": {"content": "Three."}, "finish_reason": "length"}]})
    found.add({"choices": [{"index": 0, "delta": {"content": "Two."}, "finish_reason": "stop"}]})
    (choice,) = found.completion()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Two.", "stop")


def test_a_stream_that_broke_off_is_no_answer():
    found = StreamSum()
    found.add({"choices": [{"index": 0, "delta": {"content": "Two."}}]})
    with pytest.raises(ValueError, match="without a finish reason"):
        found.completion()
