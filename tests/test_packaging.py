"""What is installed is what is tracked: the folders at the top, as `moonshard.<folder>`, and nothing beside.

With them goes the embedded model's folder, which is data.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("serving", "models", "sharding", "kv", "rpc", "experiments")
SHIPPED = (".py", ".pyi", ".proto", "py.typed")
EMBEDDED = "models/pocket/"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names inside a wheel built from a clean copy of the tracked files."""
    clone, out = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("wheel")
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, clone], check=True)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, clone]
    subprocess.run(build, check=True, capture_output=True)
    with zipfile.ZipFile(next(out.glob("*.whl"))) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_tracked_module_the_embedded_model_and_nothing_else(wheel: set[str]):
    tracked = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", "HEAD", *FOLDERS], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    expected = {f"moonshard/{name}" for name in tracked if name.endswith(SHIPPED) or name.startswith(EMBEDDED)}
    assert {name for name in wheel if ".dist-info/" not in name} == expected


def test_the_wheel_names_the_command_and_carries_the_licence(wheel: set[str]):
    assert any(name.endswith("entry_points.txt") for name in wheel)
    assert any(name.endswith("LICENSE") for name in wheel)
