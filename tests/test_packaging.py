"""What is installed is what is tracked: the folders at the top, as `moonshard.<folder>`, and nothing beside.

With them goes the embedded model's folder, which is data, and the kernels, which the build makes where it can.
"""

import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from moonshard.models.native import library

pytestmark = pytest.mark.xdist_group("packaging")  # one wheel for all of them
ROOT = Path(__file__).parent.parent
FOLDERS = ("serving", "models", "sharding", "kv", "rpc", "experiments")
SHIPPED = (".py", ".pyi", ".proto", "py.typed")
EMBEDDED = ("models/pocket/", "models/pocket_draft/")
KERNELS = "moonshard/models/native/kernels.so"


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
    assert {name for name in wheel if ".dist-info/" not in name} - {KERNELS} == expected


@pytest.mark.skipif(library.chosen() is None, reason="what built this installation builds no kernels")
def test_the_wheel_holds_the_kernels(wheel: set[str]):
    assert KERNELS in wheel


def closure(names: Iterable[str]) -> set[str]:
    """These distributions and all that they require, by canonical name."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        if (name := canonicalize_name(waiting.pop())) in found:
            continue
        found.add(name)
        needed = map(Requirement, requires(name) or ())
        waiting += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def test_the_client_loads_nothing_but_what_its_extra_names():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["client"]
    code = (
        "import sys, moonshard.rpc.client, moonshard.rpc.tls; print(*{name.partition('.')[0] for name in sys.modules})"
    )
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    makers, allowed = packages_distributions(), closure([*extra, "setuptools"])  # that a .pth file loads everywhere
    made_by = {name: set(map(canonicalize_name, makers[name])) for name in loaded if name in makers}
    ours = {"moonshard", "grpc_tools", "grpc_reflection"}  # grpc itself loads those two where they happen to be
    assert "grpcio" in made_by["grpc"]
    assert [name for name, by in made_by.items() if not by & allowed and name not in ours] == []


def test_the_wheel_names_the_command_and_carries_the_licence(wheel: set[str]):
    assert any(name.endswith("entry_points.txt") for name in wheel)
    assert any(name.endswith("LICENSE") for name in wheel)
