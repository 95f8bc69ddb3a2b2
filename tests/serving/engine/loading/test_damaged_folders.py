"""`moonshard serve` on a damaged model folder: one line that names file and fault, exit code 2, no process started."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.folder.conversion import convert
from moonshard.models.folder.writing import write_checkpoint
from tests.quantised import folders
from tests.wrapped import copy_companions

KIMI = Path(__file__).parents[3] / "fixtures" / "kimi_k2"
FILES = ("config.json", "chat_template.jinja", "model.safetensors", "tiktoken.model", "tokenizer.json")

Damage = Callable[[Path], object]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def name_a_format(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "awq"}}))


def serve(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    given = (f"model.path={folder}", "gateway.port=0", "gateway.grpc_port=0", *options)
    sets = [part for one in given for part in ("--set", one)]
    argv = [sys.executable, "-m", "moonshard.serving.cli", "serve", *sets]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


EXPERT = "model.layers.1.mlp.experts.3.up_proj"
FAULTS = [
    ("int4", "weight_scale", lambda scale: scale * 0, "has a scale that is zero"),
    ("fp8", "weight_scale_inv", lambda scale: scale + np.inf, "has a scale that is infinite"),
    ("int4", "weight_packed", lambda packed: packed[:, :-1], "has shape"),
    ("fp8", "weight_scale_inv", None, "are missing|is missing"),
]


@pytest.mark.parametrize(
    ("format", "part", "change", "fault"),
    [pytest.param(*one, marks=[] if number == 0 else pytest.mark.slow) for number, one in enumerate(FAULTS)],
)
def test_serve_names_tensor_and_file_of_weights_that_cannot_be_served(tmp_path: Path, format, part, change, fault):
    before, folder = Checkpoint.open(folders(format) / "stored"), tmp_path / "damaged"
    tensors = {name: before.tensor(name) for name in before.names}
    own = tensors.pop(f"{EXPERT}.{part}")
    if change is not None:
        with np.errstate(invalid="ignore"):
            tensors[f"{EXPERT}.{part}"] = change(own).astype(own.dtype)
    write_checkpoint(folder, before.config, tensors)
    copy_companions(KIMI, folder)
    ended = serve(folder)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if EXPERT in line]
    assert f"{folder}/model.safetensors: tensor '{EXPERT}." in line
    assert any(each in line for each in fault.split("|"))


def narrowed(name: str, tensor: np.ndarray) -> np.ndarray:
    """Of an expert the first 24 of its inner dimension."""
    if "_experts." not in name and ".experts." not in name:
        return tensor
    return tensor[:, :24] if "down" in name else tensor[:24]


@pytest.mark.slow
def test_serve_names_the_mesh_that_cuts_a_packed_word(tmp_path: Path):
    before, narrow = Checkpoint.open(KIMI), tmp_path / "narrow"
    tensors = {name: narrowed(name, before.tensor(name)) for name in before.names}
    write_checkpoint(narrow, before.config | {"moe_intermediate_size": 24}, tensors)
    copy_companions(KIMI, narrow)
    convert(narrow, "int4", tmp_path / "int4")
    ended = serve(tmp_path / "int4", "prefill.mesh={tensor=2}")
    assert ended.returncode == 2, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if "cut through" in line]
    assert "prefill.mesh.tensor = 2" in line
    assert f"{tmp_path}/int4/model.safetensors: tensor" in line


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
    ended = serve(tmp_path)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()  # a worker that loads would tell its progress on others
    assert line.startswith(f"moonshard: {tmp_path / name}: ")
    assert any(part in line for part in fault.split("|"))
