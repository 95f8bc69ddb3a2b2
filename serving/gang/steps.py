"""A step on its way to the followers of a gang, and the digests by which the members know that they are one.

What only the leader reads is left out: which row belongs to whom. Arrays travel as their bytes; each has a row for each
partition, or for each draw.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from moonshard.rpc import link_pb2
from moonshard.serving.engine.steps import DrawMasks, Step, StepKind

DIGEST_BYTES = 16


class GangDiverged(Exception):
    """Two members of a gang do not do the same."""


@dataclass(frozen=True, slots=True)
class KnownMasks(DrawMasks):
    """Masks that were known when the step was told."""

    words: np.ndarray

    def __call__(self) -> np.ndarray:
        return self.words

    def tell(self, tokens: np.ndarray, num_emitted: np.ndarray) -> None:
        """Only the leader's masks follow what is drawn."""


class StepChain:
    """Numbers steps, and says what all of them until now were."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._digest = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def seal(self, message: link_pb2.GangStep) -> None:
        """Gives the next step its number and the digest of all."""
        message.sequence = self._num_steps
        message.digest = self._fed(message)

    def check(self, message: link_pb2.GangStep) -> None:
        """GangDiverged where it is not the next step, or those before it were others."""
        told, expected = message.digest, self._num_steps
        if message.sequence != expected:
            raise GangDiverged(f"step {message.sequence} came where {expected} was to come")
        if self._fed(message) != told:
            raise GangDiverged(f"step {message.sequence}, or one before it, is another one than was told")

    def _fed(self, message: link_pb2.GangStep) -> bytes:
        message.ClearField("digest")
        self._digest.update(message.SerializeToString(deterministic=True))
        self._num_steps += 1
        return self._digest.digest()


def step_message(step: Step) -> link_pb2.GangStep:
    """Of a step whose masks are known. KV from elsewhere is not told: each member has its part, by the step's ticket.

    ValueError where there is no ticket.
    """
    if step.payload is not None and step.ticket is None:
        raise ValueError("blocks land on each member by itself")
    return link_pb2.GangStep(
        number=step.number,
        kind=step.kind.value,
        bucket=step.bucket,
        metadata=step.metadata.tobytes(),
        sampling=_bytes(step.sampling),
        scoring=_bytes(step.scoring),
        guessing=_bytes(step.guessing),
        allowed=b"" if step.allowed is None else step.allowed().tobytes(),
        num_ahead=step.num_ahead,
        partition=step.partition,
        num_blocks=step.num_blocks,
        ticket=step.ticket,
    )


def step_from(message: link_pb2.GangStep, *, num_partitions: int, num_words: int) -> Step:
    """The step to launch, but for the payload of a land. `num_words`: of a row of masks."""

    def rows(data: bytes) -> np.ndarray | None:
        return np.frombuffer(data, np.int32).reshape(num_partitions, -1) if data else None

    metadata = rows(message.metadata)
    assert metadata is not None  # every step has some
    masks = np.frombuffer(message.allowed, np.uint32).reshape(-1, num_words) if message.allowed else None
    return Step(
        number=message.number,
        kind=StepKind(message.kind),
        bucket=message.bucket,
        metadata=metadata,
        sampling=rows(message.sampling),
        scoring=rows(message.scoring),
        guessing=rows(message.guessing),
        allowed=None if masks is None else KnownMasks(masks),
        num_ahead=message.num_ahead,
        partition=message.partition,
        num_blocks=message.num_blocks,
        ticket=message.ticket if message.HasField("ticket") else None,
    )


def digest_of(drawn: np.ndarray) -> bytes:
    """Of what a step drew, as the devices gave it."""
    return hashlib.blake2b(np.ascontiguousarray(drawn), digest_size=DIGEST_BYTES).digest()


def _bytes(array: np.ndarray | None) -> bytes:
    return b"" if array is None else array.tobytes()
