"""Where an attempt of a request runs, and how one that was sent ended.

Plain data, of the attempts that make it (`attempts`) and of all who tell of it (`record`, `rows`, `spans`).
"""

from dataclasses import dataclass

from moonshard.rpc.status import RequestError


@dataclass(frozen=True, slots=True)
class Leg:
    """Where a part of an attempt runs."""

    worker: str  # its address
    epoch: bytes
    partition: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Where an attempt was sent. `prefill` is None where the worker that decodes prefills too: its KV does not move."""

    attempt_id: bytes
    prefill: Leg | None
    decode: Leg

    @property
    def is_local_prefill(self) -> bool:
        return self.prefill is None

    @property
    def prompt_leg(self) -> Leg:
        """Where its prompt is computed."""
        return self.prefill or self.decode


@dataclass(frozen=True, kw_only=True, slots=True)
class SentAttempt:
    """One that was sent and is over."""

    assignment: Assignment
    sent_ns: int
    ended_ns: int
    error: RequestError | None  # that ended it
