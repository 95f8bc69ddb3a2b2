"""Counts what XLA compiles in this process, so that a worker can prove that no request waits for it.

Threads that prepare programs beside the serving exempt themselves, since no request waits for them.
"""

import threading

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"  # once for every program, also one found in the persistent cache


class CompilationCounter:
    """Counts from `start` on. jax keeps listeners for the life of the process, so make one."""

    def __init__(self) -> None:
        self.num_compilations = 0
        self._num_before_serving: int | None = None
        self._thread = threading.local()

    def exempt_this_thread(self) -> None:
        """Compilations of this thread are not counted from now on: no request waits for them."""
        self._thread.is_exempt = True

    def start(self) -> None:
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def mark_serving(self) -> None:
        """From now on, a compilation is a fault."""
        self._num_before_serving = self.num_compilations

    @property
    def num_while_serving(self) -> int:
        return 0 if self._num_before_serving is None else self.num_compilations - self._num_before_serving

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        self.num_compilations += event == _EVENT and not getattr(self._thread, "is_exempt", False)
