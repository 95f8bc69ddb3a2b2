"""Both files of the verifier, read; lines that are broken; hashes as the verifier has them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from moonshard.experiments.verification.samples import (
    BrokenLine,
    Sample,
    prepared,
    read_reference,
    read_samples,
)
from tests.experiments.verification.scripted import request


def write(path: Path, *lines: Any) -> Path:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def result(index: int, reason: str | None, text: str = "How many?", **more: Any) -> dict[str, Any]:
    return {"data_index": index, "request": request(text), "finish_reason": reason, "status": "success", **more}


def test_requests_have_the_number_of_their_line_and_no_reference(tmp_path):
    path = write(tmp_path / "samples.jsonl", request("a"), b"", request("b"))
    assert read_samples(path) == [
        Sample(data_index=1, request=request("a")),
        Sample(data_index=3, request=request("b")),
    ]


def test_results_have_their_own_index_and_are_their_own_reference_unless_they_failed(tmp_path):
    failed = result(5, "stop", "c") | {"status": "failed"}
    path = write(tmp_path / "results.jsonl", result(9, "tool_calls", "a"), result(2, None, "b"), failed)
    assert read_samples(path) == [
        Sample(data_index=9, request=request("a"), reference="tool_calls"),
        Sample(data_index=2, request=request("b")),
        Sample(data_index=5, request=request("c")),
    ]


def test_of_results_of_the_same_request_the_last_counts_and_other_requests_stay(tmp_path):
    lines = [result(1, None, status="failed"), result(1, "stop"), result(1, "length", "another")]
    assert [each.reference for each in read_samples(write(tmp_path / "r", *lines)) if isinstance(each, Sample)] == [
        "stop",
        "length",
    ]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b'{"messages": [', "not JSON"),
        (b'{"messages": [], "temperature": NaN}', "NaN is not JSON"),
        (b'{"messages": "\xff"}', "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[1]", "not a JSON object"),
        (b'{"tools": []}', "no list of messages"),
        (b'{"request": null}', "no list of messages"),
        (b'{"request": {"messages": "Hi"}}', "no list of messages"),
    ],
)
def test_a_broken_line_is_told_by_its_number_and_the_others_are_read(line, error, tmp_path):
    first, broken, last = read_samples(write(tmp_path / "samples.jsonl", request("a"), line, request("b")))
    assert isinstance(broken, BrokenLine)
    assert (broken.data_index, error in broken.error) == (2, True)
    assert (first, last) == (Sample(data_index=1, request=request("a")), Sample(data_index=3, request=request("b")))


def test_a_reference_has_what_succeeded(tmp_path):
    lines = [result(4, "stop"), b"{", result(5, "stop", status="failed"), [], result(6, "tool_calls")]
    assert read_reference(write(tmp_path / "results.jsonl", *lines)) == {4: "stop", 6: "tool_calls"}


def test_a_request_is_prepared_as_the_verifier_prepares_it():
    asked = {"messages": [{"role": "_input", "content": "Be brief."}, {"role": "user", "content": "_input"}, 5]}
    assert prepared(asked | {"model": "theirs"}, "ours") == {
        "model": "ours",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "_input"}, 5],
    }
    assert asked["messages"][0] == {"role": "_input", "content": "Be brief."}


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"stream": False}, {"stream": False}),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
        (
            {"stream": True, "stream_options": {"include_usage": False}},
            {"stream": True, "stream_options": {"include_usage": False}},
        ),
    ],
)
def test_a_stream_is_asked_for_its_usage_unless_it_says_otherwise(given, sent):
    assert prepared(request(**given), "m") == request(model="m", **sent)


def test_the_hash_knows_no_order_of_keys_and_is_the_verifiers():
    text = '{"messages": [{"content": "é", "role": "user"}], "model": "m"}'
    sample = Sample(data_index=1, request={"model": "m", "messages": [{"role": "user", "content": "é"}]})
    assert sample.hash == hashlib.md5(text.encode()).hexdigest()
    assert Sample(data_index=2, request={"messages": [{"role": "user", "content": "\ud800"}]}).hash
