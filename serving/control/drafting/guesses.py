"""All that guesses for one sequence: the grammar's own tokens first, then a draft model or lookup, whichever has been
right more often; and when to stop trying.

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
PRIOR_OF_MODEL, PRIOR_OF_LOOKUP = 1.5, 1.0  # right guesses of a step, before any are known
FIRST_REST, LONGEST_REST = 8, 32  # tokens without a guess before the next try; doubled as long as tries fail


class _Source:
    """One that guesses, and how many of its guesses are right in the mean, whether they were tried or not."""

    def __init__(self, mean_right: float):
        self.mean_right = mean_right
        self._said: tuple[int, ...] | None = None
        self._behind = 0  # generated tokens

    def say(self, num_generated: int, said: tuple[int, ...]) -> None:
        self._behind, self._said = num_generated, said

    def judge(self, generated: Sequence[int]) -> None:
        """Compares what it said last with what came. What is right as far as anybody knows speaks not against it, and
        who was asked and said nothing was right about nothing.
        """
        said, self._said = self._said, None
        if said is None or len(generated) == self._behind:
            return
        came = tuple(generated[self._behind : self._behind + len(said)])
        pairs = enumerate(zip(said, came, strict=False))
        num_right = next((place for place, (guess, token) in pairs if guess != token), len(came))
        if len(came) == num_right < len(said):
            num_right = max(num_right, self.mean_right)
        self.mean_right += WEIGHT * (num_right - self.mean_right)


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
        self._model_guesses: tuple[int, ...] = ()  # the draft model's, behind `_followed` generated tokens
        self._model_guessed_at = 0
        self._worth = worth
        self._fit = fit
        self._by_model, self._by_lookup = _Source(PRIOR_OF_MODEL), _Source(PRIOR_OF_LOOKUP)
        self._is_by_model = False  # what was proposed last
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
            self._worth.note_try()
        draft = self._best(generated, most)
        self._most = most
        if not draft and not (
            self._num_ahead and self._model_guessed_at != len(generated)
        ):  # else the model was not asked
            self.note(0, 0)
        return draft

    def _best(self, generated: Sequence[int], most: int) -> tuple[int, ...]:
        for source in (self._by_model, self._by_lookup):
            source.judge(generated)
        forced = self._forced(generated, most) if self._forced is not None else ()
        modelled = self._modelled(generated, forced, most)
        repeated = self._repeated(generated, forced, most)
        if len(forced) < most:
            self._by_lookup.say(len(generated), repeated if repeated != forced else ())
        self._is_by_model = len(modelled) > len(forced) and (repeated == forced or not self._prefers_lookup)
        if not self._is_by_model:
            return repeated
        return self._repeated(generated, modelled, most)  # what the model leaves open

    def _modelled(self, generated: Sequence[int], forced: tuple[int, ...], most: int) -> tuple[int, ...]:
        """What the draft model said, if that goes on from what is forced."""
        if self._model_guessed_at != len(generated):
            return forced
        said = self._model_guesses[:most]
        self._by_model.say(len(generated), said)
        return said if len(said) > len(forced) and said[: len(forced)] == forced else forced

    def _repeated(self, generated: Sequence[int], draft: tuple[int, ...], most: int) -> tuple[int, ...]:
        """With what lookup takes to follow a draft."""
        if self._lookup is None or len(draft) >= most:
            return draft
        return draft + self._lookup.propose(generated, draft, most - len(draft))

    @property
    def _prefers_lookup(self) -> bool:
        return self._lookup is not None and self._by_lookup.mean_right > self._by_model.mean_right

    def num_ahead(self, num_generated: int) -> int:
        return self._num_ahead if self.is_eager(num_generated) and not self._prefers_lookup else 0

    def take_guesses(self, num_generated: int, guesses: tuple[int, ...]) -> None:
        self._model_guessed_at, self._model_guesses = num_generated, guesses

    def note(self, num_guessed: int, num_accepted: int) -> None:
        self._mean_accepted += WEIGHT * (num_accepted - self._mean_accepted)
        if num_guessed and self._is_by_model and self._fit is not None:
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
