"""Results that are kept, and what of them is done."""

import dataclasses

import pytest

from moonshard.experiments.verification.results import FAILED, SUCCESS, Result, ResultFile, read_done
from moonshard.experiments.verification.samples import Sample
from tests.experiments.verification.scripted import request

SAMPLE = Sample(data_index=3, request=request(model="m"))
RESULT = Result(
    data_index=3,
    request=SAMPLE.request,
    extra_body={"top_p": 1},
    response={"choices": []},
    status=SUCCESS,
    finish_reason="tool_calls",
    tool_calls_valid=False,
    last_run_at="2026-01-01T00:00:00+00:00",
    duration_ms=5,
    hash=SAMPLE.hash,
)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "results.jsonl"


def test_what_was_kept_is_done(out):
    ResultFile(out).append(RESULT)
    assert read_done(out, {"top_p": 1}).of(SAMPLE) == RESULT


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(SAMPLE, data_index=4),
        dataclasses.replace(SAMPLE, request=request(model="n")),
    ],
)
def test_another_request_or_the_same_elsewhere_is_not_done(other, out):
    ResultFile(out).append(RESULT)
    assert read_done(out, {"top_p": 1}).of(other) is None


def test_what_failed_or_was_asked_otherwise_is_not_done(out):
    results = ResultFile(out)
    results.append(dataclasses.replace(RESULT, status=FAILED))
    assert read_done(out, {"top_p": 1}).of(SAMPLE) is None
    results.append(RESULT)
    assert read_done(out, {"top_p": 0.5}).of(SAMPLE) is None
    assert read_done(out, {"top_p": 1}).of(SAMPLE) == RESULT


def test_a_line_that_was_cut_off_costs_itself_alone(out):
    ResultFile(out).append(RESULT)
    whole = out.read_bytes()
    out.write_bytes(whole + whole[: len(whole) // 2])
    assert read_done(out, {"top_p": 1}).of(SAMPLE) == RESULT
    another = dataclasses.replace(SAMPLE, data_index=4)
    ResultFile(out).append(dataclasses.replace(RESULT, data_index=4))
    assert len(out.read_bytes().splitlines()) == 3
    assert read_done(out, {"top_p": 1}).of(another) is not None


def test_a_file_with_other_lines_has_nothing_done(out):
    assert read_done(out, {}).of(SAMPLE) is None
    out.write_bytes(b'{"data_index": "3"}\n[]\n\xff\n\n')
    assert read_done(out, {}).of(SAMPLE) is None


def test_what_cannot_be_written_is_kept_as_the_error(tmp_path):
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    results = ResultFile(full)
    results.append(RESULT)
    results.append(RESULT)
    assert results.error is not None
    assert results.error.strerror == "No space left on device"
    assert read_done(full, {}).of(SAMPLE) is None
