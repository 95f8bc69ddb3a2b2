"""What the scheduler knows of whoever guesses a sequence's next tokens. A guess never changes what is drawn."""

from collections.abc import Callable, Sequence
from typing import Protocol

from moonshard.serving.control.request import Request


class Drafter(Protocol):
    """Guesses for one choice of one request; lives as long as it does here."""

    @property
    def is_eager(self) -> bool:
        """Whether the next row waits until all tokens are known, so that it can guess from them."""
        ...

    @property
    def num_right(self) -> float:
        """Right guesses that the next row may expect, in the mean."""
        ...

    @property
    def num_ahead(self) -> int:
        """How many tokens a draft model is to guess behind the next row."""
        ...

    def propose(self, generated: Sequence[int], most: int) -> tuple[int, ...]:
        """At most so many tokens that may follow these, which are all that the choice has generated; `most` >= 1."""
        ...

    def watch(self, generated: Sequence[int], most: int) -> None:
        """Sees the tokens of a row that is not eager, and learns what its guesses would have been worth."""
        ...

    def take_guesses(self, num_generated: int, guesses: tuple[int, ...]) -> None:
        """The draft model's guesses at the tokens after so many generated ones."""
        ...

    def note(self, num_guessed: int, num_accepted: int) -> None:
        """What became of the last proposal, of which the first `num_guessed` were tried."""
        ...


type Drafters = Callable[[Request, int], Drafter | None]
# of a batch: the right guesses that each row may expect, and whether so many rows can be verified
type Weigh = Callable[[Sequence[float], bool], None]
type CanVerify = Callable[[int], bool]  # of so many rows of a partition
