"""Whether a draft model fits its target: one of another model, or with other taps, is hardly ever right."""

from dataclasses import dataclass

NUM_JUDGED = 200  # rows that verified its guesses, before it is judged
LEAST_LENGTH = 1.1  # tokens that such a row gives; one without guesses gives 1


@dataclass(kw_only=True, slots=True)
class DraftFit:
    """What came of the guesses of one worker's draft model."""

    num_drafts: int = 0  # rows whose guesses were its own
    num_accepted: int = 0  # of these guesses

    def note(self, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_accepted += num_accepted

    @property
    def accept_length(self) -> float:
        """Tokens that a row with its guesses gave; 1 where none was right, and before any was tried."""
        return 1 + self.num_accepted / max(1, self.num_drafts)

    @property
    def is_misfit(self) -> bool:
        return self.num_drafts >= NUM_JUDGED and self.accept_length < LEAST_LENGTH
