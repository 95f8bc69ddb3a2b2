"""A draft model guesses as well behind a handoff, a hit and a failover as where all began: its KV and its first guesses
come along.

The embedded model with its draft, and held-out turns that call tools. Elsewhere a hit costs a block, and what a prefill
worker did not hand over costs acceptance (0.190 became 0.029: vLLM, issue 47254).
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from moonshard.experiments.training.texts.corpus import pocket_text
from moonshard.experiments.training.texts.tools.tasks import prompt_tokens, tool_tasks
from moonshard.models.folder.generation import load_generation_defaults
from moonshard.rpc import link_pb2
from moonshard.serving.config.keys import SpeculationConfig, embedded_model_path
from tests.serving.pd.pd_pair import Answer, Pair, run, running

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.slow]
DRAFTED = SpeculationConfig(method=("eagle3",), num_tokens=3)  # of a number that is given nobody rests
NUM_TURNS, MOST_GENERATED, LONGEST_PROMPT = 12, 100, 400
KEPT = 10  # generated tokens that a failover goes on from
CLOSE = 0.02  # of the accepted length

type Ask = Callable[[link_pb2.Run], Coroutine[Any, Any, Answer]]


def prompts() -> list[list[int]]:
    tokens = (prompt_tokens(pocket_text(), task.messages, task.tools) for task in tool_tasks(0, 100) if task.rounds)
    return [each for each in tokens if len(each) <= LONGEST_PROMPT][:NUM_TURNS]


class Accepted:
    """Steps that guessed, and what was right of their guesses, while this was open."""

    def __init__(self, pair: Pair):
        self._pair = pair
        self.num_steps = self.num_accepted = 0

    def _totals(self) -> tuple[int, int]:
        totals = self._pair.decode.engine.counters().totals
        return totals.num_drafts, totals.accepted_tokens

    def __enter__(self) -> "Accepted":
        self._before = self._totals()
        return self

    def __exit__(self, *_: object) -> None:
        self.num_steps, self.num_accepted = (now - then for now, then in zip(self._totals(), self._before, strict=True))

    @property
    def tokens_a_step(self) -> float:
        return 1 + self.num_accepted / self.num_steps


async def answers(pair: Pair, ask: Ask, runs: Sequence[link_pb2.Run]) -> tuple[list[list[int]], Accepted]:
    """One after another, so that no step depends on who else is there."""
    with Accepted(pair) as accepted:
        told = [await ask(each) for each in runs]
    return [list(answer.tokens[0]) for answer in told], accepted


def asked(prompt: Sequence[int], known: Sequence[int] = ()) -> link_pb2.Run:
    """A turn to its end, gone on with where tokens of it are known."""
    resumed = [link_pb2.Resumed(choice=0, token_ids=known)] if known else []
    stops = load_generation_defaults(embedded_model_path()).stop_token_ids
    return run(prompt, MOST_GENERATED, stop_token_ids=stops, resumed=resumed)


def fresh() -> list[link_pb2.Run]:
    return [asked(prompt) for prompt in prompts()]


async def test_as_many_guesses_are_right_behind_a_handoff_a_hit_and_a_failover():
    folder = embedded_model_path()
    async with running(folder=folder, speculation=DRAFTED) as alone:
        tokens, cold = await answers(alone, alone.ask_decode_alone, fresh())
        hit_tokens, hit = await answers(alone, alone.ask_decode_alone, fresh())
    async with running(folder=folder, speculation=DRAFTED) as pair:
        pd_tokens, pd = await answers(pair, pair.ask, fresh())
        pd_hit_tokens, pd_hit = await answers(pair, pair.ask, fresh())
    assert hit_tokens == pd_tokens == pd_hit_tokens == tokens
    assert cold.tokens_a_step > 2.5  # else what follows would say little
    for other in (hit, pd, pd_hit):
        assert other.tokens_a_step == pytest.approx(cold.tokens_a_step, rel=CLOSE)
        assert other.num_steps == pytest.approx(cold.num_steps, rel=CLOSE)  # none without a guess
    known = [(prompt, said) for prompt, said in zip(prompts(), tokens, strict=True) if len(said) > 2 * KEPT]
    assert known
    # both end alike, and so does what is cut off from their last steps
    async with running(folder=folder, speculation=DRAFTED) as alone:
        _, as_prompts = await answers(alone, alone.ask_decode_alone, [asked((*p, *s[:KEPT])) for p, s in known])
    async with running(folder=folder, speculation=DRAFTED) as alone:
        rest, resumed = await answers(alone, alone.ask_decode_alone, [asked(p, s[:KEPT]) for p, s in known])
    assert rest == [said[KEPT:] for _, said in known]
    assert resumed.tokens_a_step == pytest.approx(as_prompts.tokens_a_step, rel=CLOSE)
