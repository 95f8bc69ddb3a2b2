"""config.toml: what it means, and every mistake in it named with its key before anything is started."""

import json
from pathlib import Path

import pytest

from moonshard.experiments.command import Run, experiment
from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.runner.experiment import load_experiment
from moonshard.experiments.workload.options import FixedOptions

MODEL = Path(__file__).parents[2] / "fixtures" / "kimi_k2"
README = Path(__file__).parents[3] / "experiments" / "README.md"
BASE = f"""
repeats = 2
[server]
model.path = "{MODEL}"
decode.max_slots = 4
[workload]
kind = "fixed"
prompt_tokens = 20
output_tokens = 8
num_requests = 6
"""
LINE = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}


def folder(tmp_path: Path, text: str) -> Path:
    (tmp_path / "config.toml").write_text(text)
    return tmp_path


def test_a_point_has_every_key_that_shapes_what_it_measures(tmp_path: Path):
    text = BASE + '[sweep]\nworkload.rate_per_s = [1, 2.5]\n[[points]]\n"server.mode" = "aggregated"\n[[points]]\n'
    found = load_experiment(folder(tmp_path, text + "[points.server]\nmode = 'disaggregated'\ndecode.max_slots = 8\n"))
    assert [point.label for point in found.points] == [
        *("mode=aggregated rate_per_s=1", "mode=aggregated rate_per_s=2.5"),
        *("mode=disaggregated max_slots=8 rate_per_s=1", "mode=disaggregated max_slots=8 rate_per_s=2.5"),
    ]
    last = found.points[-1]
    assert last.server is not None
    assert (last.server.mode, last.server.decode.max_slots) == ("disaggregated", 8)
    assert isinstance(last.workload, FixedOptions)
    assert last.workload.rate_per_s == 2.5
    for key, value in {"server.kv.block_size": 64, "workload.seed": 0, "slo.attainment": 0.9, "cores": []}.items():
        assert last.settings[key] == value
    assert not any(key.startswith("server.trace.path") for key in last.settings)
    assert json.loads(json.dumps(last.settings)) == last.settings


def test_the_command_line_comes_last_and_a_swept_key_is_set_in_its_sweep(tmp_path: Path):
    text = BASE + "[sweep]\nserver.decode.max_slots = [2, 4]\n"
    sets = ("repeats=5", "workload.num_requests=9", "sweep.server.decode.max_slots=[3]")
    found = load_experiment(folder(tmp_path, text), sets)
    assert found.options.repeats == 5
    assert [point.settings["server.decode.max_slots"] for point in found.points] == [3]
    with pytest.raises(ExperimentError, match=r"set sweep\.server\.decode\.max_slots=\[\.\.\.\]"):
        load_experiment(tmp_path, ("server.decode.max_slots=3",))


def test_a_point_may_say_what_clients_do(tmp_path: Path):
    text = BASE + "[client]\ntemperature = 0.5\n[sweep]\nclient.names_sessions = [true, false]\n"
    points = load_experiment(folder(tmp_path, text)).points
    assert [point.client.names_sessions for point in points] == [True, False]
    assert [point.settings["client.names_sessions"] for point in points] == [True, False]
    assert {point.client.temperature for point in points} == {0.5}
    with pytest.raises(ExperimentError, match=r"client\.names_session: unknown key"):
        load_experiment(tmp_path, ("sweep.client.names_session=[true]",))


def test_the_documented_example_is_one(tmp_path: Path):
    text = README.read_text().partition("```toml\n")[2].partition("```")[0]
    found = load_experiment(folder(tmp_path, text), (f"server.model.path={MODEL}", "cores=[]"))
    assert len(found.points) == 6
    assert found.slo.max_itl_ms == 200


def test_paths_are_beside_the_file_and_those_of_the_command_line_beside_the_caller(tmp_path: Path, monkeypatch):
    own = tmp_path / "own"
    own.mkdir()
    for place in (own, tmp_path):
        (place / "trace.jsonl").write_text(json.dumps(LINE))
    text = f'[server]\nmodel.path = "{MODEL}"\n[workload]\nkind = "trace"\npath = "trace.jsonl"\n'
    monkeypatch.chdir(tmp_path)
    paths = [
        load_experiment(folder(own, text), sets).points[0].settings["workload.path"]
        for sets in ((), ("workload.path=trace.jsonl",))
    ]
    assert paths == [str(own / "trace.jsonl"), str(tmp_path / "trace.jsonl")]


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("repeat=3", "repeat: unknown key; did you mean repeats?"),
        ("repeats=0", "repeats: expected `int` >= 1, got 0"),
        ("wrkload.a=1", "wrkload: unknown key; did you mean workload?"),
        ("server.decode.max_slot=4", "[server] decode.max_slot: unknown key; did you mean decode.max_slots?"),
        ("server.decode.max_slots=0", "[server] decode.max_slots: expected `int` >= 1, got 0"),
        ("server.decode=0", "[server] decode is a table and a value"),
        ("slo.ttft=1", "slo.ttft: unknown key; did you mean slo.ttft_ms?"),
        ("slo.attainment=2", "slo.attainment: expected `float` <= 1.0, got 2"),
        ("client.timeout=1", "client.timeout: unknown key; did you mean client.timeout_s?"),
        ("workload.rate=1", "workload.rate: unknown key; did you mean workload.rate_per_s?"),
        ("workload.prompt_tokens=x", "workload.prompt_tokens: expected `int`, got 'x'"),
        ("workload.kind=fixd", "workload.kind: expected one of trace, fixed, relative, mixed, sessions, prompts, got"),
        (
            "sweep.server.decode.max_slot=[1]",
            "sweep.server.decode.max_slot: unknown key; did you mean decode.max_slots?",
        ),
        ("sweep.workload.rat_per_s=[1]", "sweep.workload.rat_per_s: unknown key; did you mean rate_per_s?"),
        ("sweep.workload.num_sessions=[1]", "workload.num_sessions: unknown key; did you mean workload.num_clients?"),
        ("sweep.server.zzz=[1]", "sweep.server.zzz: unknown key; there are batches, cluster, decode, gateway, "),
        ("points=[{server={mod=1}}]", "points.server.mod: unknown key; did you mean mode?"),
        ("sweep.workload.rate_per_s=[]", "sweep.workload.rate_per_s: no values"),
        ("sweep.workload.rate_per_s=1", "sweep.workload.rate_per_s: expected a list of values"),
        ("sweep.repeats=[1]", "sweep.repeats: points set keys of server and workload"),
        ("sweep.decode.max_slots=[1]", "sweep.decode.max_slots: points set keys of server and workload"),
        ("points=3", "points: expected tables"),
        ("server=3", "server: expected a table"),
        ("cores=[0]", "cores: 1 for 2 workers"),
        ("cores=[0, 9999]", "cores: 9999 is none of this process's cores"),
        ("server.trace.path=x", "server.trace.path: each trial records into its own folder"),
        ("repeats", "--set repeats: expected key=value"),
    ],
)
def test_mistakes_are_named_with_the_key_that_may_have_been_meant(tmp_path: Path, capsys, mistake: str, said: str):
    assert experiment(Run(folder=folder(tmp_path, BASE), set=(mistake,), out=tmp_path / "results")) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_every_mistake_is_named_at_once_and_once(tmp_path: Path):
    (tmp_path / "trace.jsonl").write_text("{")
    text = f"""
repeat = 1
[server]
model.path = "{MODEL}"
prefill.chunk_token = 3
[workload]
kind = "trace"
path = "trace.jsonl"
[slo]
ttft = 1
[client]
late = 3
[sweep]
server.decode.max_slot = [1, 2]
server.decode.max_slots = [0, 4]
workload.seed = 3
"""
    with pytest.raises(ExperimentError) as refused:
        load_experiment(folder(tmp_path, text))
    assert sorted(fault.partition(": ")[0] for fault in refused.value.faults) == [
        "[server] decode.max_slots",
        "[server] prefill.chunk_token",
        "client.late",
        "repeat",
        "slo.ttft",
        "sweep.server.decode.max_slot",
        "sweep.workload.seed",
        "workload",
    ]
    assert f"workload: {tmp_path}/trace.jsonl, line 1: " in str(refused.value)


def test_what_a_workload_needs_is_asked_for(tmp_path: Path):
    with pytest.raises(ExperimentError, match=r"workload\.output_tokens: needed, and not given"):
        load_experiment(folder(tmp_path, BASE.replace("output_tokens = 8\n", "")))


@pytest.mark.parametrize("text", ["repeats = ", '"', "repeats = 1\nrepeats = 2", "\xff"])
def test_a_file_that_is_no_toml_is_refused_by_its_name(tmp_path: Path, text: str):
    with pytest.raises(ExperimentError, match=r"config\.toml: "):
        load_experiment(folder(tmp_path, text))


def test_a_missing_file_is_refused_by_its_name(tmp_path: Path):
    with pytest.raises(ExperimentError, match=r"config\.toml: No such file"):
        load_experiment(tmp_path)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([json.dumps(LINE), "{"], "line 2: "),
        ([json.dumps(LINE | {"timestamp": -1})], "line 1: timestamp is -1"),
        ([json.dumps(LINE | {"timestamp": 5}), "", json.dumps(LINE)], "line 3: timestamp 0 after a later one"),
        ([], "no requests"),
    ],
)
def test_a_broken_trace_is_refused_with_its_line_before_a_server_starts(tmp_path: Path, lines: list[str], said: str):
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    text = f'[server]\nmodel.path = "{MODEL}"\n[workload]\nkind = "trace"\npath = "trace.jsonl"\n'
    with pytest.raises(ExperimentError, match=said):
        load_experiment(folder(tmp_path, text))


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "127.0.0.1", "grpc://", "host:x"])
def test_an_address_that_is_not_of_grpc_is_refused_as_it_was_typed(tmp_path: Path, capsys, url: str):
    assert experiment(Run(folder=folder(tmp_path, BASE), url=url)) == 2
    assert f"--url {url}: requests are sent over gRPC" in capsys.readouterr().err


def test_a_server_that_runs_already_cannot_be_swept(tmp_path: Path, capsys):
    text = BASE + '[sweep]\nserver.mode = ["aggregated"]\n'
    assert experiment(Run(folder=folder(tmp_path, text), url="127.0.0.1:1")) == 2
    assert "--url: a server that runs already does not follow server.mode" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["server.decode.max_slot=2", "server.mod=aggregated"])
def test_an_unknown_key_of_the_server_is_refused_also_where_one_runs_already(tmp_path: Path, capsys, setting: str):
    assert experiment(Run(folder=folder(tmp_path, BASE), url="127.0.0.1:1", set=(setting,))) == 2
    assert "unknown key; did you mean" in capsys.readouterr().err


@pytest.mark.parametrize(("sets", "is_fine"), [(("repeats=1",), True), ((), False)])
def test_real_prompts_are_sent_once_to_a_server_that_keeps_its_cache(tmp_path: Path, sets: tuple, is_fine: bool):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": [1], "max_tokens": 1}')
    text = BASE.partition("[workload]")[0] + '[workload]\nkind = "prompts"\npath = "prompts.jsonl"\n'
    own = folder(tmp_path, text)
    assert len(load_experiment(own).points) == 1
    if is_fine:
        load_experiment(own, sets, "127.0.0.1:1")
    else:
        with pytest.raises(ExperimentError, match="--url: the server keeps its cache"):
            load_experiment(own, sets, "127.0.0.1:1")


def test_what_is_too_long_is_refused_before_anything_is_started(tmp_path: Path):
    with pytest.raises(ExperimentError, match=r"request 0: 20 \+ 8 tokens are more than a context of 27"):
        load_experiment(folder(tmp_path, BASE), ("server.model.max_context_tokens=27",))


def test_a_points_settings_tell_what_was_warmed_up_and_what_its_file_holds(tmp_path: Path):
    (tmp_path / "trace.jsonl").write_text(json.dumps(LINE))
    text = BASE.partition("[workload]")[0] + '[workload]\nkind = "trace"\npath = "trace.jsonl"\n'
    one = load_experiment(folder(tmp_path, text), ("warmup_requests=7",)).points[0].settings
    assert one["warmup_requests"] == 7
    (tmp_path / "trace.jsonl").write_text(json.dumps(LINE | {"output_length": 6}))
    other = load_experiment(tmp_path, ("warmup_requests=7",)).points[0].settings
    assert {key for key in one if one[key] != other[key]} == {"workload.digest"}
