"""The kernels read and write nothing but what they are given, and threads that share their work do not race.

The whole library is compiled again with GCC's address and undefined-behaviour sanitizers, and the tests of this folder
run with it in a process of their own. How work is shared runs under the thread sanitizer in a small program instead:
XLA is not compiled for that sanitizer, which would take its hand-overs for races.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moonshard.models.native import library

ROOT = Path(__file__).parents[3]
GXX = shutil.which("g++")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        library.chosen() is None or GXX is None, reason="no kernels here, or no g++ with its sanitizers"
    ),
]
# In place of the installed one, once packages may be imported.
PLUGIN = """
from pathlib import Path

def pytest_sessionstart():
    from moonshard.models.native import library
    library.PATH = Path({path!r})
"""
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1", "TSAN_OPTIONS": "halt_on_error=1"}


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library with address and undefined-behaviour sanitizers."""
    folder = tmp_path_factory.mktemp("sanitized")
    flags = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
    build = [sys.executable, "setup.py", "-q", "build_ext", f"--build-lib={folder}", f"--build-temp={folder / 'temp'}"]
    subprocess.run(build, cwd=ROOT, env={**os.environ, "MOONSHARD_KERNEL_FLAGS": flags, "CXX": str(GXX)}, check=True)
    (found,) = folder.rglob("kernels.so")
    return found


def runtime_library(name: str) -> str:
    found = subprocess.run([str(GXX), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def run_tests(sanitized: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "sanitized_kernels.py").write_text(PLUGIN.format(path=str(sanitized)))
    runtime = (runtime_library(name) for name in ("libasan.so", "libstdc++.so.6"))
    environment = {**os.environ, **OPTIONS, "LD_PRELOAD": " ".join(runtime), "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-x", "-p", "sanitized_kernels", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_the_kernels_keep_within_their_buffers_and_do_nothing_undefined(sanitized: Path, tmp_path: Path):
    # What the library exports is of the one that is installed: sanitizers add to it.
    done = run_tests(sanitized, tmp_path, "tests/models/native", "-m", "not slow", "-k", "not exports")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout


def test_a_read_beyond_a_buffer_would_be_seen(sanitized: Path, tmp_path: Path):
    """What runs above would fail: here the library is given a name that no zero ends."""
    wrong = tmp_path / "test_wrong.py"
    wrong.write_text(BEYOND)
    done = run_tests(sanitized, tmp_path, str(wrong), "--rootdir", str(tmp_path), "-c", os.devnull, "-s")
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr, done.stdout[-2000:] + done.stderr[-2000:]


BEYOND = """
import ctypes

def test_beyond():
    from moonshard.models.native import library
    handler, malloc = ctypes.CDLL(str(library.PATH)).moonshard_handler, ctypes.CDLL(None).malloc
    handler.argtypes, malloc.restype = (ctypes.c_void_p, ctypes.c_char_p), ctypes.c_void_p
    address = malloc(3)
    ctypes.memmove(address, b"att", 3)
    handler(address, b"avx2")
"""


def test_work_that_is_shared_is_done_once_in_order_and_without_a_race(tmp_path: Path):
    program = tmp_path / "shared_work"
    source = Path(__file__).parent / "shared_work.cc"
    include = f"-I{ROOT / 'models/native/csrc'}"
    command = [str(GXX), "-std=c++17", "-O1", "-g", "-fsanitize=thread", include, str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False, env={**os.environ, **OPTIONS})
    assert done.returncode == 0, done.stdout + done.stderr
