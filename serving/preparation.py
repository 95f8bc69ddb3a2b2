"""How a program comes to be there: found in the store as it was compiled once, or traced, lowered and compiled.

A program is made of its kind and bucket, its blueprint, the code that traces it and what compiles it; of all that the
key in the store is a digest, so that it is the same in every clone, process and role. What another process is making
is waited for. Several are made at once, as many as there are cores: XLA compiles without Python's lock.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
import platform
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

import moonshard.kv.pages
import moonshard.models.kimi
import moonshard.sharding.mesh
from moonshard.serving import stage as stage_module
from moonshard.serving.program_store import ProgramStore
from moonshard.serving.programs import Programs, Wanted
from moonshard.serving.stage import Blueprint
from moonshard.serving.startup import PREPARING, PREPARING_BEHIND
from moonshard.serving.steps import ProgramKey
from moonshard.serving.timings import Timings

CACHE_HITS = "/jax/compilation_cache/cache_hits"
COMPILERS = ("jax", "jaxlib", "numpy", "ml-dtypes")
# What decides what is traced and compiled, besides the code: settings of jax and of XLA.
SETTINGS = ("JAX_", "XLA_", "LIBTPU_", "NVIDIA_TF32", "TF_CPP", "TF_XLA")
HARMLESS = (
    *("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE", "JAX_PLATFORMS"),
    *("JAX_TRACEBACK", "JAX_LOG", "TF_CPP_MIN_LOG", "JAX_DEBUG_LOG"),
)

PROGRESS_S = 0.2  # at most between two words of how far it is
WAIT_S = 0.02  # between two looks at whether another has made a program
LONGEST_WAIT_S = 300.0  # whoever makes one may have been stopped
BEHIND_NICENESS = 10  # of threads that prepare beside the serving

Program = Callable[..., Any]


class Preparation:
    """Makes programs, each once, and gives them to `programs`."""

    def __init__(self, programs: Programs, store: ProgramStore | None, timings: Timings):
        self._programs = programs
        self._store = store
        self._timings = timings
        self._stopped = threading.Event()
        self._asked: queue.SimpleQueue[ProgramKey | None] = queue.SimpleQueue()
        programs.on_missing = self._asked.put

    def start_behind(
        self, on_thread: Callable[[], None], on_failed: Callable[[BaseException], None]
    ) -> threading.Thread:
        """Prepares `programs.others` beside the serving: what the store has at once, the rest as steps ask for it.

        On a thread that gives way to what serves, and calls `on_thread` first. `on_failed`: what making a program
        raised; steps then go on with those that are there.
        """
        thread = threading.Thread(target=self._run_behind, args=(on_thread, on_failed), name=PREPARING_BEHIND)
        thread.daemon = True
        thread.start()
        return thread

    def _run_behind(self, on_thread: Callable[[], None], on_failed: Callable[[BaseException], None]) -> None:
        with contextlib.suppress(OSError, AttributeError):  # a wish only
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BEHIND_NICENESS)
        on_thread()
        for wanted in self._programs.others:
            self._behind(self._take_stored, wanted, on_failed)
        if self._store is not None:
            self._store.prune()
        while (key := self._asked.get()) is not None:
            for wanted in self._programs.others:
                if wanted.key == key and not self._programs.has(wanted):
                    self._behind(functools.partial(self._make, waits=True), wanted, on_failed)

    def _behind(
        self, make: Callable[[Wanted], object], wanted: Wanted, on_failed: Callable[[BaseException], None]
    ) -> None:
        """A program that cannot be made leaves the others to be made."""
        try:
            make(wanted)
        except Exception as error:  # whatever jax or XLA raises
            on_failed(error)

    def _take_stored(self, wanted: Wanted) -> None:
        if self._store is None or self._stopped.is_set():
            return
        digest = digest_of(wanted.blueprint, wanted.key)
        if (found := self._load(self._store, digest, wanted.blueprint, wanted.key)) is not None:
            self._programs.take(wanted, found)

    def finish(self) -> None:
        """What was asked for until now is the last that is made behind."""
        self._asked.put(None)

    def stop(self) -> None:
        """No further program is begun."""
        self._stopped.set()
        self.finish()

    def prepare(
        self,
        wanted: Sequence[Wanted],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Returns once all are there, or after `stop`. Raises what making one raises, and what `progress` does."""
        if not wanted:
            return
        progress(0, len(wanted))
        pool = ThreadPoolExecutor(min(len(wanted), num_cores()), PREPARING)
        try:
            left = self._make_all(pool, wanted, lambda done: progress(done, len(wanted)), waits=False)
            num_done = len(wanted) - len(left)
            self._make_all(pool, left, lambda done: progress(num_done + done, len(wanted)), waits=True)
        except BaseException:
            self.stop()
            raise
        finally:  # after a failure nobody waits for XLA, which cannot be interrupted: see `startup.end_process`
            pool.shutdown(wait=False, cancel_futures=True)

    def _make_all(
        self, pool: ThreadPoolExecutor, wanted: Sequence[Wanted], progress: Callable[[int], None], *, waits: bool
    ) -> list[Wanted]:
        """Those that somebody else is making: without `waits` they are left for later, when they may be there.

        `progress` is called also while nothing is done, since by raising it ends all this.
        """
        pending: set[Future[bool]] = set()
        whose: dict[Future[bool], Wanted] = {}
        for one in wanted:
            pending.add(future := pool.submit(self._make, one, waits))
            whose[future] = one
        left: list[Wanted] = []
        while pending:
            done, pending = wait(pending, timeout=PROGRESS_S)
            left += [whose[future] for future in done if not future.result()]
            progress(len(wanted) - len(pending) - len(left))
        return left

    def _make(self, wanted: Wanted, waits: bool) -> bool:
        """Whether there is nothing left to do: without `waits`, not where another is making the program."""
        if not self._stopped.is_set() and (program := self._found_or_made(wanted.blueprint, wanted.key, waits)):
            self._programs.take(wanted, program)
            return True
        return self._stopped.is_set()

    def _found_or_made(self, blueprint: Blueprint, key: ProgramKey, waits: bool) -> Program | None:
        store, timings, name = self._store, self._timings, _name(key)
        if store is None:
            return compiled(blueprint, key, timings)[0]
        digest = digest_of(blueprint, key)
        if (found := self._load(store, digest, blueprint, key)) is not None:
            return found
        begun_s = timings.now_s
        while not self._stopped.is_set():
            with store.claim(digest) as is_ours:
                if is_ours or timings.now_s - begun_s > LONGEST_WAIT_S:
                    if waits:
                        timings.note("wait", begun_s, name)
                    found = self._load(store, digest, blueprint, key)  # somebody may just have made it
                    return found if found is not None else self._made(store, digest, blueprint, key)
            if not waits:
                return None
            self._stopped.wait(WAIT_S)
        return None

    def _made(self, store: ProgramStore, digest: str, blueprint: Blueprint, key: ProgramKey) -> Program:
        program, is_fresh = compiled(blueprint, key, self._timings)
        if is_fresh:
            with self._timings.phase("save", _name(key)):
                body, _, _ = serialize_executable.serialize(program)
                store.save(digest, body)
        return program

    def _load(self, store: ProgramStore, digest: str, blueprint: Blueprint, key: ProgramKey) -> Program | None:
        body = store.load(digest)
        if body is None:
            return None
        with self._timings.phase("load", _name(key)):
            given = jax.tree.structure((blueprint.arguments(key), {}))
            devices = blueprint.model.mesh.devices.flatten().tolist()
            try:
                return serialize_executable.deserialize_and_load(
                    body, given, blueprint.result_tree(key), execution_devices=devices
                )
            except Exception as error:  # whatever XLA makes of bytes that are not for it
                store.complain(f"{key[0].value} {key[1]} cannot be loaded ({error})")
                return None


def compiled(blueprint: Blueprint, key: ProgramKey, timings: Timings) -> tuple[jax.stages.Compiled, bool]:
    """A program, and whether XLA made it just now.

    One that came out of jax's own cache must not be saved: on CPU what it serialises to lacks its functions, and fails
    only when it is run.
    """
    name = _name(key)
    with timings.phase("trace", name):
        traced = blueprint.program(key).trace(*blueprint.arguments(key))
    with timings.phase("lower", name):
        lowered = traced.lower()
    _listen_for_hits()
    _hits.num_hits = 0
    with timings.phase("compile", name):
        program = lowered.compile()
    return program, _hits.num_hits == 0


class _Hits(threading.local):
    num_hits = 0


_hits = _Hits()


@functools.cache
def _listen_for_hits() -> None:
    def note(event: str, **kwargs: str | int) -> None:
        del kwargs
        _hits.num_hits += event == CACHE_HITS  # in the thread that compiles

    jax.monitoring.register_event_listener(note)


def _name(key: ProgramKey) -> str:
    kind, bucket = key
    return f"{kind.value} {bucket}" if bucket else kind.value


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


# ---- what a program is made of


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
    runtime = (device.platform, device.device_kind, device.client.platform_version, len(jax.devices()))
    config = sorted((name, repr(value)) for name, value in jax.config.values.items() if name in _TRACING_SETTINGS)
    return (source_digest(), platform.python_version(), versions, settings, config, runtime, _instruction_set())


_TRACING_SETTINGS = frozenset(
    {
        *("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable"),
        *("jax_numpy_dtype_promotion", "jax_numpy_rank_promotion", "jax_disable_most_optimizations"),
        *("jax_use_shardy_partitioner", "jax_exec_time_optimization_effort", "jax_optimization_level"),
    }
)


def source_files() -> list[Path]:
    """The code that says what is traced: the packages below serving, and the few files of serving that a stage uses.

    A folder is taken whole, since a file that is not imported today may be tomorrow.
    """
    folders = (moonshard.kv.pages, moonshard.models.kimi, moonshard.sharding.mesh)
    files = [path for module in folders for path in Path(str(module.__file__)).parent.glob("*.py")]
    own = Path(str(stage_module.__file__)).parent
    files += [own / f"{name}.py" for name in ("preparation", "request", "stage", "steps")]
    return sorted(files, key=lambda path: (path.parent.name, path.name))


@functools.cache
def source_digest() -> str:
    """By content and name alone, so that it is the same in every clone."""
    digest = hashlib.sha256()
    for path in source_files():
        _feed(digest, (path.parent.name, path.name, path.read_bytes()))
    return digest.hexdigest()


def _instruction_set() -> str:
    """Machine code for one processor may be none for another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _feed(digest: Any, value: object) -> None:
    """Every value so that no two different ones feed the same bytes. TypeError for what has no form of its own."""
    match value:
        case bytes():
            digest.update(b"b%d:" % len(value) + value)
        case None | bool() | int() | float() | str():
            _feed(digest, f"{type(value).__name__} {value!r}".encode())
        case np.ndarray():
            _feed(digest, ("array", str(value.dtype), value.shape, value.tobytes()))
        case jax.Array() | jax.ShapeDtypeStruct():
            _feed(digest, ("leaf", value.shape, str(value.dtype), _placed(value)))
        case Mapping():
            _feed(digest, ("mapping", *sorted(value.items())))
        case tuple() | list() | frozenset() | set() | range():
            parts: Iterable[object] = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
            digest.update(f"{type(value).__name__} {len(value)}(".encode())
            for part in parts:
                _feed(digest, part)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
            _feed(digest, (type(value).__qualname__, *fields))
        case _ if hasattr(value, "value") and hasattr(value, "name"):  # a member of an enum
            _feed(digest, (type(value).__qualname__, value.name))  # pyright: ignore[reportAttributeAccessIssue]
        case _ if callable(value):
            _feed(digest, (value.__module__, value.__qualname__))
        case _:
            raise TypeError(f"{type(value)} has no digest")


def _placed(leaf: jax.Array | jax.ShapeDtypeStruct) -> str:
    """Where a leaf lies, in the words of its sharding: equal placements in other words are other programs."""
    sharding = leaf.sharding
    assert isinstance(sharding, jax.sharding.NamedSharding)
    mesh = sharding.mesh
    assert isinstance(mesh, jax.sharding.Mesh)
    devices = [device.id for device in mesh.devices.flat]
    return f"{sharding.spec} {sharding.memory_kind} {dict(mesh.shape)} {devices}"
