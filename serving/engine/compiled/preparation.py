"""How a program comes to be there: found in the store as it was compiled once, or traced, lowered and compiled.

The key in the store is the digest of what a program is made of: see `compiled.digest`. What another process is
making is waited for. Several are made at once, as many as there are cores: XLA compiles without Python's lock.
"""

import contextlib
import functools
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
from jax.experimental import serialize_executable

from moonshard.serving.deploy.startup import PREPARING, PREPARING_BEHIND
from moonshard.serving.deploy.timings import Timings
from moonshard.serving.engine.compiled.blueprint import Blueprint
from moonshard.serving.engine.compiled.digest import digest_of
from moonshard.serving.engine.compiled.prepared import PreparedPrograms, Wanted
from moonshard.serving.engine.compiled.store import ProgramStore
from moonshard.serving.engine.steps import ProgramKey

CACHE_HITS = "/jax/compilation_cache/cache_hits"
PROGRESS_S = 0.2  # at most between two words of how far it is
WAIT_S = 0.02  # between two looks at whether another has made a program
LONGEST_WAIT_S = 300.0  # whoever makes one may have been stopped
BEHIND_NICENESS = 10  # of threads that prepare beside the serving

Program = Callable[..., Any]


class Preparation:
    """Makes programs, each once, and gives them to `programs`."""

    def __init__(self, programs: PreparedPrograms, store: ProgramStore | None, timings: Timings):
        self._programs = programs
        self._store = store
        self._timings = timings
        self._stopped = threading.Event()
        self._asked: queue.SimpleQueue[ProgramKey | None] = queue.SimpleQueue()
        programs.tell_missing(self._asked.put)

    def start_ahead(self, on_thread: Callable[[], None], is_over: Callable[[], bool]) -> threading.Thread:
        """Prepares of `programs.others` one after the other until `is_over`: for as long as weights are read.

        On a thread that gives way to others, since the last one may be under way when the worker serves, and that calls
        `on_thread` first. Those that a first request asks for come first. What making one raises is told to whoever
        asks for it later.
        """

        def run() -> None:
            _give_way()
            on_thread()
            for wanted in (*self._programs.firsts, *self._programs.others):
                if is_over() or self._stopped.is_set():
                    return
                if not self._programs.has(wanted):
                    with contextlib.suppress(Exception):
                        self._make(wanted, waits=False)

        thread = threading.Thread(target=run, name=PREPARING, daemon=True)
        thread.start()
        return thread

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
        _give_way()
        on_thread()
        for wanted in self._programs.others:
            if not self._programs.has(wanted):
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
        """Where a program cannot be made, the others are made all the same."""
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
        """Nothing more is made after what has been asked for until now."""
        self._asked.put(None)

    def stop(self) -> None:
        """No further program is begun."""
        self._stopped.set()
        self.finish()

    def prepare(
        self,
        wanted: Sequence[Wanted],
        progress: Callable[[int, int], None] = lambda done, total: None,
        if_stored: Sequence[Wanted] = (),
    ) -> None:
        """Returns once all are there, or after `stop`; and, where the store has them, those of `if_stored`.

        Raises what making one raises, and what `progress` does.
        """
        if not wanted:
            return
        progress(0, len(wanted))
        pool = ThreadPoolExecutor(min(len(wanted), num_cores()), PREPARING)
        try:
            taken = [pool.submit(self._take_stored, one) for one in if_stored]
            left = self._make_all(pool, wanted, lambda done: progress(done, len(wanted)), waits=False)
            num_done = len(wanted) - len(left)
            self._make_all(pool, left, lambda done: progress(num_done + done, len(wanted)), waits=True)
            for future in taken:
                future.result()
        except BaseException:
            self.stop()
            raise
        finally:  # after a failure nobody waits for XLA, which cannot be interrupted: see `startup.end_process`
            pool.shutdown(wait=False, cancel_futures=True)

    def _make_all(
        self, pool: ThreadPoolExecutor, wanted: Sequence[Wanted], progress: Callable[[int], None], *, waits: bool
    ) -> list[Wanted]:
        """Makes the programs. Those that somebody else is making are left for later without `waits`, when they may be
        there.

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
            devices = blueprint.part.mesh.devices.flatten().tolist()
            try:
                return serialize_executable.deserialize_and_load(
                    body, given, blueprint.result_tree(key), execution_devices=devices
                )
            except Exception as error:  # whatever XLA makes of bytes that are not for it
                store.complain(f"{key[0].value} {key[1]} cannot be loaded ({error})")
                return None


def _give_way() -> None:
    """Lets other threads go before this one."""
    with contextlib.suppress(OSError, AttributeError):  # a wish only
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BEHIND_NICENESS)


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
