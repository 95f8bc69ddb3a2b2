"""A draft model guesses as well behind a handoff, a hit and a failover as where all began: its KV and its first guesses
come along.

The embedded model with its draft, and held-out turns that call tools.
"""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from moonshard.experiments.training.texts.corpus import pocket_text
from moonshard.experiments.training.texts.tools.tasks import prompt_tokens, tool_tasks
from moonshard.models.folder.generation import load_generation_defaults
from moonshard.rpc import link_pb2
from moonshard.serving.config.keys import SpeculationConfig, embedded_model_path
from tests.serving.pd.pd_pair import Answer, Pair, run, running
from tests.sizes import BLOCK_SIZE

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.slow]
DRAFTED = SpeculationConfig(method=("eagle3",), num_tokens=3)  # of a number that is given nobody rests
NUM_TURNS, MOST_GENERATED, LONGEST_PROMPT = 12, 100, 400
KEPT = 8  # generated tokens that a failover goes on from
CLOSE = 0.02  # of the accepted length

FOLDER = embedded_model_path()

type Ask = Callable[[link_pb2.Run], Coroutine[Any, Any, Answer]]


def prompts() -> list[list[int]]:
    tokens = (prompt_tokens(pocket_text(), task.messages, task.tools) for task in tool_tasks(0, 100) if task.rounds)
    return [each for each in tokens if len(each) <= LONGEST_PROMPT][:NUM_TURNS]


@dataclass
class Seen:
    """What came of some runs."""

    tokens: list[list[int]] = field(default_factory=list)
    num_cached: list[int] = field(default_factory=list)
    num_steps: int = 0  # that guessed
    num_accepted: int = 0

    @property
    def tokens_a_step(self) -> float:
        return 1 + self.num_accepted / self.num_steps


async def answers(
    pair: Pair, ask: Ask, runs: Sequence[link_pb2.Run], before: Callable[[link_pb2.Run], link_pb2.Run] | None = None
) -> Seen:
    """One after another, so that no step depends on who else is there. `before`: what is asked first, and not counted.

    The cache is small, so that nothing is found again that was not asked just before.
    """
    seen, totals = Seen(), lambda: pair.decode.engine.counters().totals
    for each in runs:
        if before is not None:
            await ask(before(each))
        known = totals()
        answer = await ask(each)
        seen.tokens.append(list(answer.tokens[0]))
        seen.num_cached.append(answer.num_cached)
        seen.num_steps += totals().num_drafts - known.num_drafts
        seen.num_accepted += totals().accepted_tokens - known.accepted_tokens
    return seen


def asked(prompt: Sequence[int], known: Sequence[int] = ()) -> link_pb2.Run:
    """A turn to its end, gone on with where tokens of it are known."""
    resumed = [link_pb2.Resumed(choice=0, token_ids=known)] if known else []
    stops = load_generation_defaults(embedded_model_path()).stop_token_ids
    return run(prompt, MOST_GENERATED, stop_token_ids=stops, resumed=resumed)


def fresh() -> list[link_pb2.Run]:
    return [asked(prompt) for prompt in prompts()]


def again(each: link_pb2.Run) -> link_pb2.Run:
    return asked(each.prompt_tokens)


def elsewhere(each: link_pb2.Run) -> link_pb2.Run:
    """The same full blocks, and other tokens behind them."""
    prompt = list(each.prompt_tokens)
    end = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    return run([*prompt[:end], *((token + 1) % 1000 for token in prompt[end:])], 3)


async def cold() -> Seen:
    async with running(folder=FOLDER, speculation=DRAFTED) as alone:
        return await answers(alone, alone.ask_decode_alone, fresh())


def assert_as_good(other: Seen, cold: Seen) -> None:
    assert other.tokens == cold.tokens
    assert cold.tokens_a_step > 2.5  # else this would say little
    assert other.tokens_a_step == pytest.approx(cold.tokens_a_step, rel=CLOSE)
    assert other.num_steps == pytest.approx(cold.num_steps, rel=CLOSE)  # none was without a guess


async def test_as_many_guesses_are_right_behind_a_handoff_and_a_hit():
    seen = await cold()
    async with running(folder=FOLDER, speculation=DRAFTED) as pair:
        assert_as_good(await answers(pair, pair.ask, fresh()), seen)
        moved = await answers(pair, pair.ask, fresh(), before=again)
        assert_as_good(moved, seen)
        found = await answers(pair, pair.ask_decode_alone, fresh(), before=again)
        assert_as_good(found, seen)
        assert min(moved.num_cached + found.num_cached) > 0


async def test_a_hit_in_front_of_other_tokens_costs_no_guesses():
    """A draft's last row of a block was written for the token that followed then, and is read behind another."""
    seen = await cold()
    async with running(folder=FOLDER, speculation=DRAFTED) as pair:
        found = await answers(pair, pair.ask_decode_alone, fresh(), before=elsewhere)
    async with running(folder=FOLDER, speculation=DRAFTED) as pair:
        moved = await answers(pair, pair.ask, fresh(), before=elsewhere)
        assert min(found.num_cached + moved.num_cached) > 0
        assert_as_good(found, seen)
        assert_as_good(moved, seen)


async def test_as_many_guesses_are_right_behind_a_failover():
    """As where the known tokens were a part of the prompt: both end alike, and so does what is cut off there."""
    known = [(prompt, said[:KEPT]) for prompt, said in zip(prompts(), (await cold()).tokens, strict=True)]
    known = [(prompt, said) for prompt, said in known if len(said) == KEPT]
    assert len(known) > NUM_TURNS / 2
    async with running(folder=FOLDER, speculation=DRAFTED) as alone:
        as_prompts = await answers(alone, alone.ask_decode_alone, [asked((*prompt, *said)) for prompt, said in known])
    async with running(folder=FOLDER, speculation=DRAFTED) as alone:
        resumed = await answers(alone, alone.ask_decode_alone, [asked(prompt, said) for prompt, said in known])
    assert_as_good(resumed, as_prompts)
