"""`moonshard serve` as a child process, as a user starts it: how long until it is ready, what it costs, its counters.

Only what anybody could see from outside: the ready line, `/metrics`, and what Linux tells of the processes in `/proc`.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
from prometheus_client.parser import text_string_to_metric_families

READY = re.compile(r"moonshard ready in .* (?P<http>http://\S+)/v1  grpc (?P<grpc>\S+)  model (?P<model>\S+)")
STOP_TIMEOUT_S = 60.0
HANDED_OVER = "routing.local_prefill=static"  # a setting: what is said of handoffs is said of every prompt
NOBODY_REFUSED = "routing.ttft_slo_s=none"  # likewise: however many wait, all that was sent is measured
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ServerFailed(Exception):
    """The server ended before it was ready; the message is the last that it printed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningServer:
    """A server that is ready."""

    http: str  # URL without a path
    grpc: str  # host:port
    model: str
    begun_s: float  # of `time.perf_counter` when it was executed
    ready_s: float  # from its execution to its ready line
    pids: Mapping[str, int]  # the gateway's and each worker's, by what it is called

    def peak_memory_mib(self, role: str) -> float:
        """The high-water mark of resident memory."""
        if (peak := peak_memory_mib(self.pids[role])) is None:
            raise ServerFailed(f"the {role} has ended")
        return peak

    def cpu_s(self, role: str) -> float:
        """Processor time of a role's process, as `cpu_s` counts that of any."""
        return cpu_s(self.pids[role])

    def counters(self) -> dict[str, float]:
        """The sum over workers of each of moonshard's own counters and gauges."""
        text = httpx.get(f"{self.http}/metrics", trust_env=False).raise_for_status().text
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("moonshard_"):
                    totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals


def cpu_s(pid: int) -> float:
    """Processor time of all threads of a process since its start, in ticks of 10 ms or so."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S


def peak_memory_mib(pid: int) -> float | None:
    """The high-water mark of a process's resident memory (VmHWM of proc(5)); None where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), None)


@contextmanager
def serving(overrides: Sequence[str], environment: Mapping[str, str]) -> Iterator[RunningServer]:
    """A ready server during the block; all its processes have ended after it. ServerFailed if it cannot start."""
    free_ports = ("gateway.port=0", "gateway.grpc_port=0")
    arguments = [part for override in (*overrides, *free_ports) for part in ("--set", override)]
    argv = [sys.executable, "-m", "moonshard.serving.cli", "serve", *arguments]
    begun_s = time.perf_counter()
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    try:
        assert process.stdout is not None  # it was asked for
        ready = _wait_ready(process.stdout)
        ready_s = time.perf_counter() - begun_s
        yield RunningServer(
            http=ready["http"],
            grpc=ready["grpc"],
            model=ready["model"],
            begun_s=begun_s,
            ready_s=ready_s,
            pids=_roles(process.pid),
        )
    finally:
        _stop(process)


def _wait_ready(output: IO[str]) -> re.Match[str]:
    said = ""
    for line in output:
        if found := READY.search(line):
            return found
        said = line.strip() or said
    raise ServerFailed(said or "the server ended without a word")


def _stop(process: subprocess.Popen[str]) -> None:
    """Ends the server and reads its output to the end: a full pipe would block it while it drains."""
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()  # its children get their own signal when it dies
        process.communicate()


def _roles(pid: int) -> dict[str, int]:
    """The first child process of each role, by its command line."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    roles: dict[str, int] = {}
    for child in map(int, children):
        argv = Path(f"/proc/{child}/cmdline").read_text().split("\0")
        roles.setdefault(argv[argv.index("moonshard.serving.cli") + 1], child)
    return roles
