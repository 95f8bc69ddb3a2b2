"""KV blocks that leave the device pages and come into them, as steps between the scheduler's own.

Unlike the engine's own steps, these have no plan and give no tokens, and the scheduler never hears of them. They are
numbered downwards from `FIRST_NUMBER`, so that no number is one of the scheduler's. Since the device runs its steps in
order, an export reads what was written by every step submitted before it and by none after, and what is decided after a
land reads the landed blocks. Whose blocks they are, and where the bytes go, is the caller's.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from moonshard.serving.engine.device import StepDone
from moonshard.serving.engine.encoder import StepEncoder
from moonshard.serving.engine.steps import Step

FIRST_NUMBER = -2  # -1 is a step of the compilation


class BlockExchange:
    """The exports and lands of one engine. Runs on its event loop, the callbacks too."""

    def __init__(self, encoder: StepEncoder, submit: Callable[[Step], None]):
        self._encoder = encoder
        self._submit = submit
        self._numbers = itertools.count(FIRST_NUMBER, -1)
        self._in_flight: dict[int, Callable[[StepDone], None]] = {}

    @property
    def is_idle(self) -> bool:
        return not self._in_flight

    def owns(self, number: int) -> bool:
        return number in self._in_flight

    def complete(self, done: StepDone) -> None:
        """Takes an export or a land that is done."""
        self._in_flight.pop(done.number)(done)

    def export(
        self,
        partition: int,
        blocks: Sequence[int],
        on_done: Callable[[np.ndarray], None],
        ticket: int | None = None,
    ) -> None:
        """Reads blocks; `on_done` gets them as one array [len(blocks), layers, block_size, features]."""
        parts: list[np.ndarray] = []

        def take(num_blocks: int, is_last: bool, done: StepDone) -> None:
            assert done.exported is not None  # the device's own kind of answer
            parts.append(done.exported[:num_blocks])
            if is_last:
                on_done(parts[0] if len(parts) == 1 else np.concatenate(parts))

        for start, end in self._pieces(blocks):
            step = self._encoder.encode_export(next(self._numbers), partition, blocks[start:end], ticket)
            self._launch(step, functools.partial(take, end - start, end == len(blocks)))

    def land(
        self,
        partition: int,
        blocks: Sequence[int],
        payload: np.ndarray,
        on_done: Callable[[], None],
        ticket: int | None = None,
    ) -> None:
        """Overwrites blocks with `payload` [len(blocks), layers, block_size, features], which stays as it is till then.

        Raises:
            ValueError: the payload is of another number of blocks.
        """
        if len(payload) != len(blocks):
            raise ValueError(f"{len(payload)} blocks of payload for {len(blocks)} blocks")

        def take(is_last: bool, _: StepDone) -> None:
            if is_last:
                on_done()

        for start, end in self._pieces(blocks):
            own, part = blocks[start:end], payload[start:end]
            step = self._encoder.encode_land(next(self._numbers), partition, own, part, ticket)
            self._launch(step, functools.partial(take, end == len(blocks)))

    def _pieces(self, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Where each step's blocks begin and end. ValueError for no blocks: no step would tell of the end."""
        if not blocks:
            raise ValueError("an exchange of no blocks")
        largest = self._encoder.max_transfer_blocks
        return ((start, min(start + largest, len(blocks))) for start in range(0, len(blocks), largest))

    def _launch(self, step: Step, take: Callable[[StepDone], None]) -> None:
        self._in_flight[step.number] = take
        self._submit(step)
