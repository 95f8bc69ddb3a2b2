"""`moonshard budget`, as a user runs it: a table and a file of figures, and a named fault for what cannot be meant."""

import json
from pathlib import Path
from typing import Any

import pytest

from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.folder.conversion import config_in
from moonshard.serving.cli import main
from moonshard.serving.commands.checks.lowering import lower_and_tell
from moonshard.serving.engine.compiled.lowering_process import LoweringJob
from moonshard.sharding.shape import MeshShape

FOLDER = Path(__file__).parents[2] / "fixtures" / "kimi_k2"


def run(*arguments: str) -> int:
    return main(["budget", *arguments])


def test_all_meshes_are_ranked_with_the_reason_of_those_that_do_not_fit(capsys, tmp_path: Path):
    out = tmp_path / "budget.json"
    assert run("--model", "kimi-k2.5", "--device", "h100-80gb:8", "--json", str(out)) == 0
    shown = capsys.readouterr().out
    assert "553.4 GiB of weights (int4-experts) on h100-80gb:8, rules for decode" in shown
    assert "tensor=8" in shown
    assert "does not fit" in shown
    assert "\nexpert=8: weights and workspace exceed a device by 8." in shown
    records = json.loads(out.read_text())
    tokens = [record["num_tokens"] for record in records]
    assert tokens == sorted(tokens, reverse=True)
    assert len(records) == 20
    (misfit,) = (each for each in records if each["mesh"] == {"data": 1, "expert": 8, "tensor": 1, "pipe": 1})
    assert "exceed a device by 8." in misfit["reason"]


def test_of_a_folder_only_the_configuration_is_needed(capsys, tmp_path: Path):
    (tmp_path / "config.json").write_bytes((FOLDER / "config.json").read_bytes())
    assert run("--model", str(tmp_path), "--device", "1gib:2", "--mesh", "tensor=2", "--role", "prefill") == 0
    assert "(bf16) on 1gib:2, rules for prefill" in capsys.readouterr().out


def test_a_mesh_that_cuts_a_packed_word_does_not_fit_and_says_why(capsys, tmp_path: Path):
    config = json.loads((FOLDER / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config_in("int4", config | {"moe_intermediate_size": 24})))
    arguments = ("--model", str(tmp_path), "--device", "1gib:2", "--role", "prefill", "--mesh")
    assert run(*arguments, "tensor=2") == 0  # as of any mesh that does not fit, with the reason in its place
    told = "mesh.tensor cuts the model's expert_ffw dimension 24 into parts of 12, which cut through 8 values"
    assert told in capsys.readouterr().out
    assert run(*arguments, "expert=2") == 0
    assert "cut through" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "named"), [("bf16", "bf16"), ("int4", "int4-experts"), ("fp8", "fp8"), ("int8", "int8")]
)
def test_without_weights_their_format_is_the_one_that_the_configuration_names(capsys, tmp_path: Path, target, named):
    config = config_in(target, json.loads((FOLDER / "config.json").read_text()))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run("--model", str(tmp_path), "--device", "1gib:1") == 0
    assert f"({named}) on 1gib:1" in capsys.readouterr().out


def test_a_folder_without_a_configuration_is_refused_by_its_name(capsys, tmp_path: Path):
    assert run("--model", str(tmp_path), "--device", "1gib:2") == 2
    assert f"{tmp_path}/config.json: model_type is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "kimi-k3", "--device", "h100-80gb:8"), "--model kimi-k3: neither a folder nor a known model"),
        (("--model", "kimi-k2", "--device", "h100:8"), "--device h100:8: unknown device 'h100' (known: "),
        (("--model", "kimi-k2", "--device", "h100-80gb"), "expected a number of devices"),
        (("--model", "kimi-k2", "--device", "h100-80gb:0"), "expected a number of devices"),
        (("--model", "kimi-k2", "--device", "-5gib:2"), "unknown device '-5gib'"),
        (("--model", "kimi-k2", "--device", "8gib:2", "--mesh", "tensr=2"), "--mesh tensr=2: expected axis=size"),
        (("--model", "kimi-k2", "--device", "8gib:2", "--mesh", "tensor=2,tensor=1"), "names tensor twice"),
        (("--model", "kimi-k2", "--device", "8gib:2", "--mesh", "tensor=4"), "has 4 devices, --device names 2"),
        (("--model", "kimi-k2", "--device", "8gib:2", "--max-slots", "0"), "--max-slots 0: expected at least 1"),
        (("--model", "kimi-k2", "--device", "8gib:2", "--json", "/nowhere/x"), "--json /nowhere/x: No such file"),
        (("--model", "pocket", "--device", "8gib:2", "--lower"), "--lower: lowers for one mesh; name it with --mesh"),
        (
            ("--model", "pocket", "--device", "8gib:3", "--mesh", "tensor=3", "--lower"),
            "--lower: mesh.tensor = 3 does not divide",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_option(arguments: tuple[str, ...], message: str, capsys):
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err


def lowered(out: Path, *arguments: str) -> list[dict[str, Any]]:
    """The record of each stage, which a process of its own has lowered and compiled."""
    assert run(*arguments, "--lower", "--json", str(out)) == 0
    (record,) = json.loads(out.read_text())
    return record["lowered"]


def test_what_is_lowered_and_compiled_agrees_with_the_budget(capsys, tmp_path: Path):
    asked = ("--model", str(FOLDER), "--device", "1gib:2", "--mesh", "pipe=2", "--max-slots", "4")
    stages = lowered(tmp_path / "budget.json", *asked)
    assert sum(stage["num_layers"] for stage in stages) == 4
    shown = capsys.readouterr().out
    assert "the largest decode step on 2 virtual CPU devices (pipe=2), weights in bf16:" in shown
    assert shown.count("agree within 1%") == 2
    assert shown.count("not compared: on CPU XLA widens bf16") == 2


def test_a_compilation_that_takes_too_long_is_given_up_and_what_was_lowered_is_told(capsys):
    config = dict(Checkpoint.open(FOLDER).config)
    job = LoweringJob(
        config_json=config, mesh=MeshShape(), role="decode", chunk_tokens=64, max_slots=2, compile_limit_s=0.006
    )
    exit_code, reports = lower_and_tell(job)
    assert exit_code == 0
    assert [report.compiled for report in reports] == [None]
    assert "lowered; compiling was given up after 0.0001 minutes" in capsys.readouterr().out


def test_a_process_that_breaks_is_told_from_one_that_is_given_up(capfd):
    config = {**Checkpoint.open(FOLDER).config, "num_attention_heads": 3}
    job = LoweringJob(config_json=config, mesh=MeshShape(tensor=2), role="decode", chunk_tokens=64, max_slots=2)
    assert lower_and_tell(job) == (1, [])
    assert "MeshError" in (told := capfd.readouterr().err)
    assert "moonshard: lowering ended with exit code 1" in told


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kimi_k25_at_full_size_holds_what_the_budget_says(tmp_path: Path):
    asked = ("--model", "kimi-k2.5", "--device", "h100-80gb:8", "--mesh", "expert=2,tensor=4")
    (stage,) = lowered(tmp_path / "budget.json", *asked)
    assert stage["num_layers"] == 61
    for side in ("arguments", "outputs"):
        assert stage["compiled"]["held"][side] == pytest.approx(stage["counted"][side], rel=0.01)
