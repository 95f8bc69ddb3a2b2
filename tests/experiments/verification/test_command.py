"""`moonshard verify-tools` from its arguments to its exit code, table, results and summary."""

import json
import os
import signal
import threading
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from moonshard.experiments.verification.command import verify_tools
from moonshard.serving import cli
from moonshard.serving.config.keys import ConfigError
from tests.experiments.verification.scripted import Answer, Body, Scripted, call, calling, request

WAIT_S = 60
PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
VALUE = "moonshard.experiments.verification.command:verify_tools"
COMMAND = {"verify-tools": EntryPoint(name="verify-tools", value=VALUE, group=cli.ENTRY_POINT_GROUP)}
ANSWERS = {
    "valid": calling(call('{"a": 1}')),
    "invalid": calling(call('{"a": "1"}')),
    "undeclared": calling(call("{}", "subtract")),
    "says": Answer(),
    "long": Answer(finish_reason="length"),
    "fails": Answer(status=400, text='{"error": {"message": "refused [here]"}}'),
}
# what was asked, and how the reference finished
CASES = [("valid", "tool_calls"), ("invalid", "tool_calls"), ("undeclared", "stop"), ("says", "tool_calls")]
CASES += [("long", "stop"), ("says", "stop"), ("fails", "tool_calls"), ("valid", None)]


def script(body: Body) -> Answer:
    return ANSWERS[body["messages"][-1]["content"]]


@pytest.fixture
def scripted(server: Scripted) -> Scripted:
    server.script = script
    return server


def run(*arguments: object) -> int:
    return cli.run(["verify-tools", *map(str, arguments)], COMMAND)


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    requests = [request(name, stream=number % 2 == 0) for number, (name, _) in enumerate(CASES)]
    return write(tmp_path / "samples.jsonl", requests)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """The reference."""
    lines = [
        {
            "data_index": index,
            "request": request(name, model="theirs"),
            "status": "success" if reason else "failed",
            "finish_reason": reason,
        }
        for index, (name, reason) in enumerate(CASES, start=1)
    ]
    return write(tmp_path / "reference.jsonl", lines[::-1])


EXPECTED = {
    "model": "pocket",
    "success_count": 7,
    "failure_count": 1,
    "finish_stop": 2,
    "finish_tool_calls": 4,
    "finish_others": 1,
    "finish_others_detail": {"length": 1},
    "schema_validation_error_count": 2,
    "successful_tool_call_count": 2,
    "tool_call_precision": 2 / 3,
    "tool_call_recall": 2 / 4,
    "tool_call_f1": 4 / 7,
    "schema_accuracy": 2 / 4,
}


def test_the_command_is_registered():
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    assert project["entry-points"][cli.ENTRY_POINT_GROUP]["verify-tools"] == VALUE
    assert COMMAND["verify-tools"].load() is verify_tools


def test_requests_are_measured_by_a_reference_and_results_by_themselves(scripted, samples, results, tmp_path, capsys):
    summary = tmp_path / "summary.json"
    for arguments in ([samples, "--reference", results], [results]):
        assert run(*arguments, "--url", scripted.url, "--json", summary) == 1  # one failed
        told = json.loads(summary.read_text())
        assert {name: told[name] for name in EXPECTED} == EXPECTED
        assert list(told)[: len(EXPECTED)] == list(EXPECTED)
        assert told["reference"] == {
            "num": 7,
            "num_both": 2,
            "num_server_only": 1,
            "num_reference_only": 2,
            "num_neither": 2,
        }
        printed = capsys.readouterr().out
        assert "57.14%" in printed
        assert "HTTP 400: refused [here]" in printed
        assert "at least 73% for K2-Thinking and 80% for K2-0905" in printed


def test_a_named_reference_takes_the_place_of_the_files_own(scripted, results, tmp_path):
    other = write(tmp_path / "other.jsonl", [{"data_index": 3, "finish_reason": "tool_calls", "status": "success"}])
    summary = tmp_path / "summary.json"
    run(results, "--reference", other, "--url", scripted.url, "--json", summary)
    assert json.loads(summary.read_text())["reference"]["num"] == 1


def test_without_a_reference_there_is_no_f1_and_it_says_so(scripted, tmp_path, capsys):
    summary = tmp_path / "summary.json"
    path = write(tmp_path / "samples.jsonl", [request("valid"), request("says")])
    assert run(path, "--url", scripted.url, "--json", summary) == 0
    told = json.loads(summary.read_text())
    assert (told["tool_call_f1"], told["tool_call_precision"], told["tool_call_recall"]) == (None, None, None)
    assert told["schema_accuracy"] == 1
    printed = capsys.readouterr().out
    assert "Without a reference tool_call_f1 is not computed" in printed
    assert "100.00%" in printed
    assert "Failed" not in printed


def test_results_are_lines_of_the_verifiers_format(scripted, tmp_path):
    out = tmp_path / "out.jsonl"
    path = write(tmp_path / "samples.jsonl", [request("valid", model="theirs")])
    assert run(path, "--url", scripted.url, "--out", out, "--extra-body", '{"top_p": 1}') == 0
    (line,) = read(out)
    assert line["data_index"] == 1
    assert line["request"] == request("valid", model="pocket")
    assert line["extra_body"] == {"top_p": 1}
    assert (line["status"], line["finish_reason"], line["tool_calls_valid"]) == ("success", "tool_calls", True)
    assert line["response"] == ANSWERS["valid"].whole()
    assert scripted.bodies == [request("valid", model="pocket", top_p=1)]


def test_what_succeeded_is_not_asked_again_and_counts(scripted, samples, results, tmp_path, capsys):
    out, summary = tmp_path / "out.jsonl", tmp_path / "summary.json"
    arguments = [samples, "--reference", results, "--url", scripted.url, "--out", out, "--json", summary]
    assert run(*arguments) == 1
    assert len(read(out)) == len(CASES)
    scripted.bodies.clear()
    scripted.script = lambda body: ANSWERS["valid"]
    capsys.readouterr()
    assert run(*arguments) == 0
    assert scripted.texts() == ["fails"]
    assert len(read(out)) == len(CASES) + 1
    told = json.loads(summary.read_text())
    assert (told["success_count"], told["failure_count"], told["finish_tool_calls"]) == (8, 0, 5)
    assert told["tool_call_recall"] == 3 / 4
    assert "7 answers are of an earlier run" in capsys.readouterr().out
    scripted.bodies.clear()
    assert run(*arguments) == 0
    assert scripted.bodies == []


def test_ctrl_c_shows_what_is_there_and_the_run_goes_on_where_it_ended(scripted, tmp_path, capsys):
    out, summary, held = tmp_path / "out.jsonl", tmp_path / "summary.json", threading.Event()
    path = write(tmp_path / "samples.jsonl", [request("valid", number=number) for number in range(5)])
    arguments = [path, "--url", scripted.url, "--out", out, "--json", summary, "--concurrency", 1]

    def interrupting(body: Body) -> Answer:
        if body["number"] == 2:
            os.kill(os.getpid(), signal.SIGINT)
            held.wait(WAIT_S)
        return script(body)

    scripted.script = interrupting
    assert run(*arguments) == 130
    held.set()
    told = json.loads(summary.read_text())
    assert (told["success_count"], told["failure_count"], told["num_not_asked"]) == (2, 0, 3)
    assert "Broken off: 3 requests were not answered" in capsys.readouterr().out
    scripted.bodies.clear()
    scripted.script = script
    assert run(*arguments) == 0
    assert [body["number"] for body in scripted.bodies] == [2, 3, 4]
    assert [line["data_index"] for line in read(out)] == [1, 2, 3, 4, 5]


def test_a_broken_line_is_its_own_row_and_the_others_run(scripted, tmp_path, capsys):
    out, summary = tmp_path / "out.jsonl", tmp_path / "summary.json"
    path = write(tmp_path / "samples.jsonl", [request("valid"), '{"messages": [', request("says")])
    assert run(path, "--url", scripted.url, "--out", out, "--json", summary) == 1
    told = json.loads(summary.read_text())
    assert (told["success_count"], told["failure_count"]) == (2, 1)
    broken, *others = sorted(read(out), key=lambda line: (line["status"], line["data_index"]))
    assert [line["data_index"] for line in others] == [1, 3]
    assert (broken["data_index"], broken["status"], broken["request"]) == (2, "failed", None)
    assert "not JSON" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("models", "own", "arguments", "asked"),
    [
        (["pocket"], "theirs", [], "pocket"),
        (["pocket"], None, [], "pocket"),
        (["pocket", "theirs"], "theirs", [], "theirs"),
        (["pocket", "theirs"], "theirs", ["--model", "any"], "any"),
    ],
)
def test_the_model_is_the_one_given_or_the_requests_own_or_the_only_one(
    scripted, models, own, arguments, asked, tmp_path
):
    scripted.models = models
    path = write(tmp_path / "samples.jsonl", [request("says") | ({"model": own} if own else {})])
    assert run(path, "--url", scripted.url, *arguments) == 0
    assert [body["model"] for body in scripted.bodies] == [asked]


def test_a_model_that_can_be_several_is_asked_for(scripted, samples):
    scripted.models = ["a", "b"]
    with pytest.raises(ConfigError, match="--model: the server lists a, b, and request 1 names none of them"):
        run(samples, "--url", scripted.url)
    assert scripted.bodies == []


def test_the_key_comes_from_the_environment_too(scripted, tmp_path, monkeypatch):
    monkeypatch.setenv("MOONSHARD_API_KEY", "secret")
    path = write(tmp_path / "samples.jsonl", [request("says")])
    assert run(path, "--url", scripted.url) == 0
    assert scripted.keys == {"Bearer secret"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "--url http://127.0.0.1:9: no server answers"),
        (["--extra-body", "{"], "--extra-body: not JSON"),
        (["--extra-body", "[1]"], r"--extra-body \[1\]: expected a JSON object"),
        (["--concurrency", 0], "--concurrency 0: at least 1"),
        (["--timeout", 0], "--timeout 0: expected"),
        (["--timeout", "nan"], "--timeout nan: expected"),
        (["--reference", "/nowhere/r"], "--reference /nowhere/r: No such file or directory"),
        (["--out", "/nowhere/r"], "--out /nowhere/r: No such file or directory"),
        (["--json", "/nowhere/r"], "--json /nowhere/r: cannot be written"),
    ],
)
def test_what_the_user_can_mend_is_one_line_that_names_the_option(scripted, samples, arguments, message):
    with pytest.raises(ConfigError, match=message) as refused:
        run(samples, *([] if "--url" in arguments else ["--url", scripted.url]), *arguments)
    assert len(str(refused.value).splitlines()) == 1
    assert scripted.bodies == []


def test_files_that_are_not_there_or_empty_are_named(scripted, samples, tmp_path):
    with pytest.raises(ConfigError, match=r"FILE .*none: No such file or directory"):
        run(tmp_path / "none", "--url", scripted.url)
    empty = write(tmp_path / "empty", [""])
    with pytest.raises(ConfigError, match=r"FILE .*empty: no request in it"):
        run(empty, "--url", scripted.url)
    with pytest.raises(ConfigError, match=r"--reference .*: no result with a finish reason"):
        run(samples, "--url", scripted.url, "--reference", samples)


def test_results_are_never_put_into_the_file_that_is_read(scripted, samples):
    before = samples.read_bytes()
    with pytest.raises(ConfigError, match=r"--out .*: it is read from"):
        run(samples, "--url", scripted.url, "--out", samples)
    assert samples.read_bytes() == before


def test_results_that_cannot_be_kept_cost_no_table(scripted, tmp_path, capsys):
    path = write(tmp_path / "samples.jsonl", [request("valid"), request("says")])
    assert run(path, "--url", scripted.url, "--out", "/dev/full") == 1
    printed = capsys.readouterr()
    assert "schema_accuracy" in printed.out
    assert printed.err.splitlines()[-1] == "moonshard: --out /dev/full: No space left on device"


def test_a_refusal_is_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(cli, "found_commands", lambda: COMMAND)
    assert cli.main(["verify-tools", "/nowhere/samples.jsonl", "--url", "http://127.0.0.1:9"]) == 2
    assert capsys.readouterr().err == "moonshard: FILE /nowhere/samples.jsonl: No such file or directory\n"
