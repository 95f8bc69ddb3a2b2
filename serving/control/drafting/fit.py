"""Whether a draft model fits its target: one of another model, or with other taps, is hardly ever right."""

from collections.abc import Callable

NUM_JUDGED = 200  # steps that verified its guesses, before it is judged
LEAST_LENGTH = 1.1  # tokens a step; a step without guesses gives 1


class DraftFit:
    """What came of the guesses of one worker's draft model."""

    def __init__(
        self, num_drafts: int = 0, num_accepted: int = 0, on_misfit: Callable[["DraftFit"], None] | None = None
    ) -> None:
        """`on_misfit` is told once, if the model turns out not to fit."""
        self._on_misfit = on_misfit
        self.num_drafts = num_drafts  # rows whose guesses were its own
        self.num_accepted = num_accepted

    def __repr__(self) -> str:
        return f"DraftFit(num_drafts={self.num_drafts}, accept_length={self.accept_length:.2f})"

    def note(self, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_accepted += num_accepted
        if self.num_drafts == NUM_JUDGED and self.is_misfit and self._on_misfit is not None:
            self._on_misfit(self)

    @property
    def is_misfit(self) -> bool:
        return self.num_drafts >= NUM_JUDGED and self.accept_length < LEAST_LENGTH

    @property
    def accept_length(self) -> float:
        """Tokens of a step that its guesses gave; 1 where none was right, and before any was tried."""
        return 1 + self.num_accepted / max(1, self.num_drafts)
