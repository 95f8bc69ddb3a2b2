"""All that guesses for one sequence: the grammar's own tokens first, then what a draft model takes to follow if that
goes on from them, else lookup; and when to stop trying.

A row that guesses must know all tokens before it, so that its step is launched only once the step before has come back.
That costs the gap between two steps, and more positions cost time of their own. So a sequence whose guesses are too
rarely right for what `worth` measured goes ahead without for a while, and tries again later.
"""

from collections.abc import Callable, Sequence

from moonshard.serving.control.drafting.fit import DraftFit
from moonshard.serving.control.drafting.lookup import Lookup
from moonshard.serving.control.drafting.worth import Worth

type Forced = Callable[[Sequence[int], int], tuple[int, ...]]  # generated, most -> what alone may follow

WEIGHT = 0.25  # of the newest step in the mean of accepted tokens
FIRST_REST, LONGEST_REST = 8, 32  # tokens without a guess before the next try; doubled as long as tries fail


class Guesses:
    """A `Drafter`. `forced` and `lookup` may each be None; `num_ahead`: guesses of a draft model, 0 without one;
    `worth`: None where it never rests; `fit`: that of the model, which is told what came of it.
    """

    def __init__(
        self,
        forced: Forced | None,
        lookup: Lookup | None,
        num_ahead: int = 0,
        *,
        worth: Worth | None = None,
        fit: DraftFit | None = None,
    ):
        self._forced = forced
        self._lookup = lookup
        self._num_ahead = num_ahead
        self._following: tuple[int, ...] = ()  # the draft model's, behind `_followed` generated tokens
        self._followed = 0
        self._worth = worth
        self._fit = fit
        self._is_model_s = False  # the last proposal
        self._most = 0  # tokens of it
        self._mean_accepted = 1.0  # of a step, steps that had nothing to guess counted as 0
        self._rest = FIRST_REST
        self._rests_until = 0  # number of generated tokens
        self._num_generated = 0  # at the last proposal

    def __repr__(self) -> str:
        return f"Guesses(mean_accepted={self._mean_accepted:.2f}, rests_until={self._rests_until})"

    def is_eager(self, num_generated: int) -> bool:
        return num_generated >= self._rests_until and not (self._worth is not None and self._worth.must_measure)

    def propose(self, generated: Sequence[int], most: int) -> tuple[int, ...]:
        self._num_generated = len(generated)
        if not self.is_eager(len(generated)):
            return ()
        if self._worth is not None:
            self._worth.tries()
        forced = draft = self._forced(generated, most) if self._forced is not None else ()
        if self._followed == len(generated) and self._following[: len(draft)] == draft:
            draft = max(draft, self._following[:most], key=len)
        self._is_model_s, self._most = len(draft) > len(forced), most
        if self._lookup is not None and len(draft) < most:
            draft += self._lookup.propose(generated, draft, most - len(draft))
        if not draft and not (self._num_ahead and self._followed != len(generated)):  # else the model was not asked
            self.note(0, 0)
        return draft

    def num_ahead(self, num_generated: int) -> int:
        return self._num_ahead if self.is_eager(num_generated) else 0

    def follow(self, num_generated: int, guesses: tuple[int, ...]) -> None:
        self._followed, self._following = num_generated, guesses

    def note(self, num_guessed: int, num_accepted: int) -> None:
        self._mean_accepted += WEIGHT * (num_accepted - self._mean_accepted)
        if num_guessed and self._is_model_s and self._fit is not None:
            self._fit.note(num_accepted)
        if self._worth is None:
            return
        least_accepted = self._worth.least_accepted()
        if self._mean_accepted >= least_accepted:
            self._rest = FIRST_REST
            return
        # all that rest as long try again at the same step, as they share its cost
        self._rests_until = self._num_generated + self._rest - self._worth.num_steps % self._rest
        self._rest = min(2 * self._rest, LONGEST_REST)
        self._mean_accepted = min(least_accepted, self._most)  # one more failure rests again, one success does not
