"""A step on its way to the followers of a gang, its masks behind it, and the digests by which the members know that
they are one.

What only the leader reads is left out: which row belongs to whom. Arrays travel as their bytes; each has a row for each
partition, or for each draw.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from moonshard.rpc import link_pb2
from moonshard.serving.constrained.masks import ANY_TOKEN
from moonshard.serving.engine.steps import DrawMasks, Step, StepKind

DIGEST_BYTES = 16

type Sealed = link_pb2.GangStep | link_pb2.GangMasks


class GangDiverged(Exception):
    """Two members of a gang do not do the same."""


class ToldMasks(DrawMasks):
    """The leader's masks of a step: told to the others as soon as they are known."""

    def __init__(self, masks: DrawMasks, tell: Callable[[np.ndarray], None]):
        self._masks = masks
        self._tell = tell

    def __call__(self) -> np.ndarray:
        words = self._masks()
        self._tell(words)
        return words

    def tell(self, tokens: np.ndarray, num_emitted: np.ndarray) -> None:
        self._masks.tell(tokens, num_emitted)


class AwaitedMasks(DrawMasks):
    """A follower's, which come behind the step. Put on the event loop, waited for on the device's thread."""

    def __init__(self, num_words: int):
        """`num_words`: of a row."""
        self._num_words = num_words
        self._words = Future[np.ndarray]()

    def put(self, message: link_pb2.GangMasks) -> None:
        words = np.full((message.num_rows, self._num_words), ANY_TOKEN, np.uint32)
        words[list(message.rows)] = np.frombuffer(message.allowed, np.uint32).reshape(-1, self._num_words)
        self._words.set_result(words)

    def __call__(self) -> np.ndarray:
        return self._words.result()

    def tell(self, tokens: np.ndarray, num_emitted: np.ndarray) -> None:
        """Only the leader's masks follow what is drawn."""


def masks_message(words: np.ndarray) -> link_pb2.GangMasks:
    """Of masks [draws, words]. Few rows are constrained, each as long as the vocabulary: only these are told."""
    rows = np.flatnonzero((words != ANY_TOKEN).any(axis=1))
    return link_pb2.GangMasks(num_rows=len(words), rows=rows, allowed=words[rows].tobytes())


class StepChain:
    """Numbers steps and masks, and says what all of them until now were."""

    def __init__(self) -> None:
        self._num_told = 0
        self._digest = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def seal(self, message: Sealed) -> None:
        """Gives the next one its number and the digest of all."""
        message.sequence = self._num_told
        message.digest = self._fed(message)

    def check(self, message: Sealed) -> None:
        """GangDiverged where it is not the next one, or those before it were others."""
        told, expected = message.digest, self._num_told
        if message.sequence != expected:
            raise GangDiverged(f"message {message.sequence} came where {expected} was to come")
        if self._fed(message) != told:
            raise GangDiverged(f"message {message.sequence}, or one before it, is another one than was told")

    def _fed(self, message: Sealed) -> bytes:
        message.ClearField("digest")
        self._digest.update(message.SerializeToString(deterministic=True))
        self._num_told += 1
        return self._digest.digest()


def step_message(step: Step) -> link_pb2.GangStep:
    """Masks come behind it. KV from elsewhere is not told: each member has its part, by the step's ticket.

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
        is_masked=step.allowed is not None,
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
    return Step(
        number=message.number,
        kind=StepKind(message.kind),
        bucket=message.bucket,
        metadata=metadata,
        sampling=rows(message.sampling),
        scoring=rows(message.scoring),
        guessing=rows(message.guessing),
        allowed=AwaitedMasks(num_words) if message.is_masked else None,
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
