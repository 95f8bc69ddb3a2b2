"""`moonshard serve` on a damaged model folder: one line that names file and fault, exit code 2, no process started."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

KIMI = Path(__file__).parents[2] / "fixtures" / "kimi_k2"
FILES = ("config.json", "chat_template.jinja", "model.safetensors", "tiktoken.model", "tokenizer.json")

Damage = Callable[[Path], object]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def name_a_format(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "awq"}}))


@pytest.mark.parametrize(
    ("name", "damage", "fault"),
    [
        ("tokenizer.json", cut, "delimiter|EOF|Expecting"),
        ("tokenizer.json", replace_by_folder, "Is a directory"),
        ("chat_template.jinja", lambda path: path.write_text("a\n{% if %}"), "line 2"),
        ("chat_template.jinja", lambda path: path.write_bytes(b"\xff"), "utf-8"),
        ("chat_template.jinja", replace_by_folder, "Is a directory"),
        ("model.safetensors", cut, "1000 bytes are missing"),
        ("config.json", cut, "broken JSON|delimiter"),
        ("config.json", name_a_format, "quantization_config.quant_method is 'awq' (AWQ)"),
        ("generation_config.json", lambda path: path.write_text('{"top_p": "x"}'), "top_p"),
    ],
)
def test_serve_refuses_a_damaged_folder_before_it_starts_anything(
    tmp_path: Path, name: str, damage: Damage, fault: str
):
    for file in FILES:
        shutil.copy(KIMI / file, tmp_path)
    damage(tmp_path / name)
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "moonshard.serving.cli",
            "serve",
            "--set",
            f"model.path={tmp_path}",
            "--set",
            "gateway.port=0",
            "--set",
            "gateway.grpc_port=0",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()  # a worker that loads would tell its progress on others
    assert line.startswith(f"moonshard: {tmp_path / name}: ")
    assert any(part in line for part in fault.split("|"))
