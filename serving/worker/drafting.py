"""What guesses the next tokens of a worker's requests, as its configuration says."""

import functools
import logging

from moonshard.serving.config.keys import SpeculationConfig
from moonshard.serving.constrained.masks import Masks
from moonshard.serving.control.drafting.drafter import Drafters
from moonshard.serving.control.drafting.fit import DraftFit
from moonshard.serving.control.drafting.guesses import Guesses, Typical
from moonshard.serving.control.drafting.lookup import Lookup
from moonshard.serving.control.drafting.worth import Worth
from moonshard.serving.control.request import Request, SequenceId

logger = logging.getLogger(__name__)


def drafters_of(config: SpeculationConfig, masks: Masks, worth: Worth, fit: DraftFit) -> Drafters | None:
    """None where nothing guesses. `worth` decides where the number of guesses is not given."""
    methods = config.methods
    if not methods:
        return None
    has_forced, has_lookup = "grammar" in methods, "lookup" in methods
    num_ahead = 0 if config.draft_model is None else config.most_tokens
    typical = Typical()
    measured = worth if config.num_tokens == "auto" else None

    def drafter(request: Request, choice: int) -> Guesses | None:
        is_forced = has_forced and bool(request.grammar)
        if not (is_forced or has_lookup or num_ahead):
            return None
        forced = functools.partial(masks.forced, SequenceId(request.id, choice)) if is_forced else None
        lookup = Lookup(request.prompt) if has_lookup else None
        return Guesses(forced, lookup, num_ahead, worth=measured, typical=typical, fit=fit)

    return drafter


class MisfitWarning:
    """Says once if a worker's draft model turns out to be of no use."""

    def __init__(self, fit: DraftFit):
        self._fit = fit
        self._is_said = False

    def look(self) -> None:
        if self._fit.is_misfit and not self._is_said:
            self._is_said = True
            logger.warning(
                "the draft model (speculation.method) fits this model badly: a step with its guesses gives %.2f "
                "tokens, and 1 without any",
                self._fit.accept_length,
            )
