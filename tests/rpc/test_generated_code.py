"""The check on generated code sees each way in which it can be out of date."""

import importlib.util
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("check_generated", ROOT / "tests" / "check_generated.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_code_is_current(check):
    assert check.stale_files(ROOT / "rpc") == []


def test_changed_missing_and_orphaned_files_are_named(check, tmp_path):
    for path in (ROOT / "rpc").iterdir():
        if path.suffix == ".proto" or "_pb2" in path.name:
            shutil.copy(path, tmp_path / path.name)
    proto = tmp_path / "link.proto"
    proto.write_text(
        proto.read_text().replace("message InspectRequest {}", "message InspectRequest { bool deep = 1; }")
    )
    (tmp_path / "inference_pb2.pyi").unlink()
    (tmp_path / "gone_pb2.py").touch()
    assert check.stale_files(tmp_path) == ["gone_pb2.py", "inference_pb2.pyi", "link_pb2.py", "link_pb2.pyi"]
