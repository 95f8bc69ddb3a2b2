"""All that guesses for one sequence: the grammar's own tokens first, then a draft model or lookup, whichever has been
right more often.

A row that guesses must know all tokens before it, so that its step is launched only once the step before has come back.
That costs the gap between two steps, and more positions cost time of their own. Whether the rows of a batch guess is
for `worth` to say, from what each may expect to be right about.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moonshard.serving.control.drafting.fit import DraftFit
from moonshard.serving.control.drafting.lookup import Lookup
from moonshard.serving.control.drafting.worth import Worth

type Forced = Callable[[Sequence[int], int], tuple[int, ...]]  # generated, most -> what alone may follow

WEIGHT, WEIGHT_OF_ALL = 0.25, 0.02  # of the newest step in the mean of right guesses, of one sequence and of all
WATCHED = 4  # tokens after which lookup is judged, where it is not tried


@dataclass(slots=True)
class Mean:
    """Right guesses of a step, of one source."""

    right: float

    def take(self, num_right: float, weight: float) -> None:
        self.right += weight * (num_right - self.right)


@dataclass(frozen=True, slots=True)
class Typical:
    """Of all sequences of a worker: what a new one may expect of each source."""

    grammar: Mean = field(default_factory=lambda: Mean(1.0))
    model: Mean = field(default_factory=lambda: Mean(1.5))
    lookup: Mean = field(default_factory=lambda: Mean(1.0))


class _Source:
    """One that guesses, and how many of its guesses are right in the mean, whether they were tried or not."""

    def __init__(self, typical: Mean, *, is_there: bool):
        self._typical = typical
        self._mean = Mean(typical.right if is_there else 0.0)
        self._said: tuple[int, ...] | None = None
        self._behind = 0  # generated tokens

    @property
    def mean_right(self) -> float:
        return self._mean.right

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
        self._mean.take(num_right, WEIGHT)
        self._typical.take(num_right, WEIGHT_OF_ALL)


class Guesses:
    """A `Drafter`. `forced` and `lookup` may each be None; `num_ahead`: guesses of a draft model, 0 without one;
    `worth`: None where it always guesses; `typical`: its worker's; `fit`: that of the model, which is told what came of
    it.
    """

    def __init__(
        self,
        forced: Forced | None,
        lookup: Lookup | None,
        num_ahead: int = 0,
        *,
        worth: Worth | None = None,
        typical: Typical | None = None,
        fit: DraftFit | None = None,
    ):
        self._forced = forced
        self._lookup = lookup
        self._num_ahead = num_ahead
        self._model_guesses: tuple[int, ...] = ()  # the draft model's
        self._model_guessed_at: int | None = None  # behind so many generated tokens
        self._worth = worth
        self._fit = fit
        typical = typical or Typical()
        self._by_grammar = _Source(typical.grammar, is_there=forced is not None)
        self._by_model = _Source(typical.model, is_there=num_ahead > 0)
        self._by_lookup = _Source(typical.lookup, is_there=lookup is not None)
        self._is_by_model = False  # what was proposed last
        self._watched_at = 0  # generated tokens

    def __repr__(self) -> str:
        return f"Guesses(num_right={self.num_right:.2f}, is_eager={self.is_eager})"

    @property
    def is_eager(self) -> bool:
        return self._worth is None or self._worth.is_on

    @property
    def num_right(self) -> float:
        return max(source.mean_right for source in self._sources)

    @property
    def _sources(self) -> tuple[_Source, ...]:
        return self._by_grammar, self._by_model, self._by_lookup

    @property
    def num_ahead(self) -> int:
        return self._num_ahead if self.is_eager and not self._prefers_lookup else 0

    def propose(self, generated: Sequence[int], most: int) -> tuple[int, ...]:
        if not self.is_eager:
            return ()
        self._judge(generated)
        forced = self._forced(generated, most) if self._forced is not None else ()
        if self._forced is not None:
            self._by_grammar.say(len(generated), forced)
        modelled = self._modelled(generated, forced, most)
        repeated = self._repeated(generated, forced, most)
        if self._lookup is not None and len(forced) < most:
            self._by_lookup.say(len(generated), repeated if repeated != forced else ())
        self._is_by_model = len(modelled) > len(forced) and (repeated == forced or not self._prefers_lookup)
        if not self._is_by_model:
            return repeated
        return self._repeated(generated, modelled, most)  # what the model leaves open

    def watch(self, generated: Sequence[int], most: int) -> None:
        if self._lookup is None or len(generated) < self._watched_at + WATCHED:
            return
        self._watched_at = len(generated)
        self._judge(generated)
        self._by_lookup.say(len(generated), self._lookup.propose(generated, (), most))

    def _judge(self, generated: Sequence[int]) -> None:
        for source in self._sources:
            source.judge(generated)

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

    def take_guesses(self, num_generated: int, guesses: tuple[int, ...]) -> None:
        self._model_guessed_at, self._model_guesses = num_generated, guesses

    def note(self, num_guessed: int, num_accepted: int) -> None:
        if num_guessed and self._is_by_model and self._fit is not None:
            self._fit.note(num_accepted)
