"""What a compiled program is made of, as one digest: its key in the store, the same in every clone, process and role.

Its kind and bucket, its blueprint, the code that traces it, and what compiles it: versions, settings, devices and
processor. Equal digests promise equal programs; unequal ones promise nothing, since equal shardings may be written in
different words. No path of a file or folder is part of it.
"""

import dataclasses
import functools
import hashlib
import os
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

import moonshard.kv.pages
import moonshard.models.model
import moonshard.sharding.mesh
from moonshard.models.native import library
from moonshard.serving.engine import steps as steps_module
from moonshard.serving.engine.compiled.blueprint import Blueprint
from moonshard.serving.engine.steps import ProgramKey

COMPILERS = ("jax", "jaxlib", "numpy", "ml-dtypes")
# What decides what is traced and compiled, besides the code: settings of jax and of XLA.
SETTINGS = ("JAX_", "XLA_", "LIBTPU_", "NVIDIA_TF32", "TF_CPP", "TF_XLA")
HARMLESS = (
    *("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE", "JAX_PLATFORMS"),
    *("JAX_TRACEBACK", "JAX_LOG", "TF_CPP_MIN_LOG", "JAX_DEBUG_LOG"),
)


def digest_of(blueprint: Blueprint, key: ProgramKey) -> str:
    """The key in the store: 32 hexadecimal digits."""
    made_of = hashlib.sha256()
    _feed(made_of, (_surroundings(), blueprint.made_of(key), blueprint.arguments(key)))
    return made_of.hexdigest()[:32]


@functools.cache
def _surroundings() -> tuple[object, ...]:
    """What all programs of this process have in common: code, compilers, settings, machine."""
    versions = tuple(version(name) for name in COMPILERS)
    settings = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(SETTINGS) and not name.startswith(HARMLESS)
    )
    device = jax.devices()[0]
    devices = (len(jax.devices()), jax.process_index(), jax.process_count())
    runtime = (device.platform, device.device_kind, device.client.platform_version, *devices)
    config = sorted((name, repr(value)) for name, value in jax.config.values.items() if name in _TRACING_SETTINGS)
    code = (source_digest(), library.made_of() if device.platform == "cpu" else ())
    return (*code, platform.python_version(), versions, settings, config, runtime, _instruction_set())


_TRACING_SETTINGS = frozenset(
    {
        *("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable"),
        *("jax_numpy_dtype_promotion", "jax_numpy_rank_promotion", "jax_disable_most_optimizations"),
        *("jax_use_shardy_partitioner", "jax_exec_time_optimization_effort", "jax_optimization_level"),
    }
)


def source_files() -> list[Path]:
    """The code that says what is traced, and how it is compiled and kept: the packages below serving, and a few files.

    A folder is taken whole, since a file that is not imported today may be tomorrow.
    """
    folders = (moonshard.kv.pages, moonshard.models.model, moonshard.sharding.mesh)
    files = [path for module in folders for path in Path(str(module.__file__)).parent.rglob("*.py")]
    own = Path(str(steps_module.__file__)).parents[1]
    names = (
        "control/request",
        "control/sampling_parameters",
        "engine/draws",
        "engine/scoring/program",
        "engine/steps",
        "engine/compiled/blueprint",
        "engine/compiled/bodies",
        "engine/compiled/guessing",
        "engine/compiled/stage_model",
        "engine/compiled/preparation",
        "engine/compiled/digest",
    )
    files += [own / f"{name}.py" for name in names]
    return sorted(files, key=lambda path: (path.parent.name, path.name))


@functools.cache
def source_digest() -> str:
    """The digest of files by content and name alone, so that it is the same in every clone."""
    digest = hashlib.sha256()
    for path in source_files():
        _feed(digest, (path.parent.name, path.name, path.read_bytes()))
    return digest.hexdigest()


def _instruction_set() -> str:
    """The processor's instruction set: machine code for one processor may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _feed(digest: Any, value: object) -> None:
    """Every value under its kind, so that values of two kinds never feed the same bytes.

    TypeError for what has no form of its own. A function goes by its name: its source is in `source_digest`, and what
    it closes over is not in the key.
    """
    match value:
        case bytes():
            digest.update(b"b%d:" % len(value) + value)
        case None | bool() | int() | float() | str():
            text = f"{type(value).__name__} {value!r}".encode()
            digest.update(b"s%d:" % len(text) + text)
        case np.ndarray():
            digest.update(b"array")
            _feed(digest, (str(value.dtype), value.shape, value.tobytes()))
        case jax.Array() | jax.ShapeDtypeStruct():
            digest.update(b"leaf")
            _feed(digest, (value.shape, str(value.dtype), _placed(value)))
        case Mapping():
            digest.update(b"mapping")
            _feed(digest, sorted(value.items()))
        case tuple() | list() | frozenset() | set() | range():
            parts: Iterable[object] = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
            digest.update(f"{type(value).__name__} {len(value)}(".encode())
            for part in parts:
                _feed(digest, part)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
            digest.update(b"dataclass")
            _feed(digest, (type(value).__qualname__, *fields))
        case _ if hasattr(value, "value") and hasattr(value, "name"):  # a member of an enum
            digest.update(b"member")
            _feed(digest, (type(value).__qualname__, value.name))  # pyright: ignore[reportAttributeAccessIssue]
        case _ if callable(value):
            digest.update(b"function")
            _feed(digest, (value.__module__, value.__qualname__))
        case _:
            raise TypeError(f"{type(value)} has no digest")


def _placed(leaf: jax.Array | jax.ShapeDtypeStruct) -> str:
    """Where a leaf lies, as its sharding is spelt: an equal sharding that is spelt otherwise gives another program."""
    sharding = leaf.sharding
    assert isinstance(sharding, jax.sharding.NamedSharding)
    mesh = sharding.mesh
    assert isinstance(mesh, jax.sharding.Mesh)
    devices = [device.id for device in mesh.devices.flat]
    return f"{sharding.spec} {sharding.memory_kind} {dict(mesh.shape)} {devices}"
