"""Whether the other members of a gang still live and go on, as one member sees it: a state machine.

A member that beats may be stuck all the same: what hangs is a collective, on a thread of its own. So of followers the
leader also asks whether they finish steps. Silence is counted in looks: a stall of this process is one look, and no
silence of the others'. Source of the problem: jax, where a rank that is alive and stuck hangs all for ever.
"""

from dataclasses import dataclass

LOOKS_PER_TIMEOUT = 8
KEY = "worker.gang_timeout_s"


@dataclass(slots=True)
class Watched:
    """One other member."""

    name: str
    num_heard: int = 0  # messages of any kind
    num_told: int = 0  # steps
    num_done: int = 0  # of these
    _seen_heard: int = -1
    _seen_done: int = 0
    _num_silent: int = 0  # looks, one after another
    _num_stuck: int = 0

    def heard(self) -> None:
        self.num_heard += 1

    def done(self) -> None:
        self.num_done += 1

    def look(self, timeout_s: float) -> str | None:
        """To be called every `timeout_s / LOOKS_PER_TIMEOUT`. What is wrong with it, in words."""
        self._num_silent = self._num_silent + 1 if self.num_heard == self._seen_heard else 0
        is_waiting = self.num_done < self.num_told and self.num_done == self._seen_done
        self._num_stuck = self._num_stuck + 1 if is_waiting else 0
        self._seen_heard, self._seen_done = self.num_heard, self.num_done
        if self._num_silent >= LOOKS_PER_TIMEOUT:
            return f"nothing came from {self.name} for {timeout_s:g} s ({KEY})"
        if self._num_stuck >= LOOKS_PER_TIMEOUT:
            return f"{self.name} finished no step for {timeout_s:g} s ({KEY}; it must be longer than the longest step)"
        return None
