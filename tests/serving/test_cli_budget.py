"""`moonshard budget`, as a user runs it: a table and a file of figures, and a named fault for what cannot be meant."""

import json
from pathlib import Path

import pytest

from moonshard.serving.cli import main

FOLDER = Path(__file__).parent.parent / "fixtures" / "kimi_k2"


def run(*arguments: str) -> int:
    return main(["budget", *arguments])


def test_all_meshes_are_ranked_with_the_reason_of_those_that_do_not_fit(capsys, tmp_path: Path):
    out = tmp_path / "budget.json"
    assert run("--model", "kimi-k2.5", "--device", "h100-80gb:8", "--json", str(out)) == 0
    shown = capsys.readouterr().out
    assert "553.4 GiB of weights (int4-experts) on h100-80gb:8, rules for decode" in shown
    assert "tensor=8" in shown
    assert "does not fit" in shown
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
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_option(arguments: tuple[str, ...], message: str, capsys):
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err
