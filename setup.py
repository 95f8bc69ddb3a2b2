"""Builds the kernels for CPUs (models/native/csrc) into the package; all else about it is in pyproject.toml.

They need a C++ compiler and the headers that jaxlib brings, from the environment that builds. Where either is missing,
or the processor is none that they are written for, the package is made without them and works the same, slower.
"""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("models/native/csrc")
# MOONSHARD_KERNEL_FLAGS: more of them, behind these, for compiler and linker: tests ask for sanitizers.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-psabi")
# Of the files in forms/, by their names; the others run on every processor.
INSTRUCTIONS = {"sse4": "-march=x86-64-v2", "avx2": "-march=x86-64-v3", "avx512": "-march=x86-64-v4"}


class NotBuilt(Exception):
    """Why there will be no kernels."""


def find_compiler() -> str:
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        raise NotBuilt(f"they are for Linux on x86-64, not {sys.platform} on {platform.machine()}")
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        raise NotBuilt("no C++ compiler (CXX, c++, g++, clang++)")
    return found


def find_headers() -> Path:
    """As `jax.ffi.include_dir`, without importing jax."""
    spec = importlib.util.find_spec("jaxlib")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        if (Path(folder) / "include/xla/ffi/api/ffi.h").exists():
            return Path(folder) / "include"
    raise NotBuilt("jaxlib's headers are not in the environment that builds")


def build_library(into: Path, scratch: Path) -> None:
    compiler, headers = find_compiler(), find_headers()
    more = os.environ.get("MOONSHARD_KERNEL_FLAGS", "").split()
    into.parent.mkdir(parents=True, exist_ok=True)
    scratch.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> Path:
        made = scratch / f"{source.stem}.o"
        machine = [INSTRUCTIONS[source.stem]] if source.parent.name == "forms" else []
        _run([compiler, *FLAGS, *machine, *more, "-isystem", str(headers), "-c", str(source), "-o", str(made)])
        return made

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = list(threads.map(compile_one, sorted(SOURCES.rglob("*.cc"))))
    partial = into.with_suffix(".partial")  # a running process may have the old one mapped
    exports = f"-Wl,--version-script={SOURCES / 'exports.map'}"
    _run([compiler, "-shared", "-Wl,-z,defs", *more, exports, *map(str, objects), "-o", str(partial)])
    partial.replace(into)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise NotBuilt(f"{' '.join(command)}\n{done.stderr}")


class BuildKernels(build_ext):
    """One shared library, loaded by `models.native.library`: it is no Python module, and has no Python in it."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', os.sep)}.so"

    def build_extension(self, ext: Extension) -> None:
        try:
            build_library(Path(self.get_ext_fullpath(ext.name)), Path(self.build_temp))
        except NotBuilt as reason:
            self.warn(f"moonshard: the kernels for CPUs are not built: {reason}")


class AnyPython(bdist_wheel):
    """A wheel for a platform, whatever its Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[Extension("moonshard.models.native.kernels", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPython},
)
