"""A pytest plugin that prints where a run of the tests spends its time, by phase and by slow test.

Of every test: how long it took, what jax took of that to trace, lower and compile (or to load what was compiled), how
much processor time the test's own process needed, that of compiling included, how much the processes that it started
and ended, and how long everything waited. Time that several threads compile at once counts for each. Of every worker
of xdist: imports and collection. `--slowest N` tells how many tests have a line.
"""

import resource
import sys
import threading
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from moonshard.serving.deploy.timings import since_process_began_s

_COMPILING = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
_MISS = "/jax/compilation_cache/cache_misses"
_PROPERTY = "phases"
_WORKER_PHASES = "phases_of_worker"
NUM_FILES = 30
COLUMNS = ("wall", "trace", "lower", "compile", "processor", "children", "waiting")


@dataclass
class _Meter:
    """What jax has taken in this process so far. jax is looked up, never imported: most tests do without it."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COMPILING.values(), 0.0))
    num_compiled: int = 0
    num_missed: int = 0
    _is_listening: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def listen(self) -> None:
        if self._is_listening or "jax" not in sys.modules or not hasattr(sys.modules["jax"], "monitoring"):
            return
        monitoring = sys.modules["jax"].monitoring
        monitoring.register_event_duration_secs_listener(self._on_duration)
        monitoring.register_event_listener(self._on_event)
        self._is_listening = True

    def _on_duration(self, event: str, duration_secs: float, **kwargs: object) -> None:
        del kwargs
        if name := _COMPILING.get(event):
            with self._lock:
                self.seconds[name] += duration_secs
                self.num_compiled += name == "compile"

    def _on_event(self, event: str, **kwargs: object) -> None:
        del kwargs
        with self._lock:
            self.num_missed += event == _MISS

    def read(self) -> dict[str, float]:
        self.listen()
        whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        own, children = (_processor_s(resource.getrusage(who)) for who in whose)
        return {
            "wall": time.perf_counter(),
            **self.seconds,
            "own": own,
            "children": children,
            "programs": self.num_compiled,
            "misses": self.num_missed,
        }


def _processor_s(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


_meter = _Meter()
_key = pytest.StashKey[dict[str, float]]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    item.stash[_key] = _meter.read()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    try:
        return (yield)
    finally:  # set-up, call and tear-down: a deployment that many tests share counts for the first and the last
        before, after = item.stash[_key], _meter.read()
        item.user_properties.append((_PROPERTY, {name: after[name] - before[name] for name in before}))


class Phases:
    """What the controller, or the only process, has been told so far."""

    def __init__(self, num_slowest: int):
        self._num_slowest = num_slowest
        self._tests: dict[str, dict[str, float]] = {}
        self._workers: list[dict[str, float]] = []
        self._begun = time.perf_counter()
        self._started_s = since_process_began_s()
        self._collected: dict[str, float] = {}

    def pytest_collection_finish(self) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self._collected = {"own": _processor_s(usage), "wall": since_process_began_s(), "imports": self._started_s}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = dict(report.user_properties).get(_PROPERTY) if report.when == "teardown" else None
        if isinstance(found, dict):
            self._tests[report.nodeid] = found

    def pytest_testnodedown(self, node: Any) -> None:
        self._workers.append(getattr(node, "workeroutput", {}).get(_WORKER_PHASES, {}))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_WORKER_PHASES] = self._collected

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._tests or self._num_slowest == 0:
            return
        write = terminalreporter.write_line
        terminalreporter.write_sep("=", f"phases, in seconds; the slowest {self._num_slowest} tests")
        for index, worker in enumerate(self._workers or [self._collected]):
            if worker:
                write(
                    f"worker {index}: begun and imported {worker['imports']:.1f}, "
                    f"collected after {worker['wall']:.1f}, {worker['own']:.1f} of processor time by then"
                )
        write("  ".join(f"{name:>9}" for name in (*COLUMNS, "programs", "misses")))
        rows = {name: _row(found) for name, found in self._tests.items()}
        total = {name: sum(row[name] for row in rows.values()) for name in (*COLUMNS, "programs", "misses")}
        write(_line(total) + f"  all {len(rows)} tests, their seconds added up")
        for nodeid in sorted(rows, key=lambda name: -rows[name]["wall"])[: self._num_slowest]:
            write(_line(rows[nodeid]) + f"  {nodeid}")
        write(f"the {NUM_FILES} files that take most")
        files: dict[str, dict[str, float]] = {}
        for nodeid, row in rows.items():
            sums = files.setdefault(nodeid.partition("::")[0], dict.fromkeys(row, 0.0))
            sums.update({name: sums[name] + row[name] for name in row})
        for file in sorted(files, key=lambda name: -files[name]["wall"])[:NUM_FILES]:
            write(_line(files[file]) + f"  {file}")


def _row(found: Mapping[str, float]) -> dict[str, float]:
    return {
        **{name: found[name] for name in ("wall", "trace", "lower", "compile", "children", "programs", "misses")},
        "processor": found["own"],
        "waiting": max(0.0, found["wall"] - found["own"] - found["children"]),
    }


def _line(row: Mapping[str, float]) -> str:
    seconds = [f"{row[name]:9.2f}" for name in COLUMNS]
    return "  ".join([*seconds, f"{row['programs']:9.0f}", f"{row['misses']:9.0f}"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slowest", type=int, default=0, help="name the phases of the N slowest tests, and of the run")


def pytest_configure(config: pytest.Config) -> None:
    num_slowest = config.getoption("--slowest")
    assert isinstance(num_slowest, int)
    config.pluginmanager.register(Phases(num_slowest), "phases-report")
