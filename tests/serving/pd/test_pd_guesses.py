"""Guesses change no token where a prompt was prefilled elsewhere, found in a cache, or is gone on with."""

import asyncio

import pytest

from moonshard.rpc import link_pb2
from moonshard.serving.config.keys import SpeculationConfig
from moonshard.serving.control.sampling_parameters import Sampling
from tests.agreement import assert_drawn_from, reference
from tests.engine_room import grammars, long_text
from tests.serving.engine.test_engine_grammars import JSON, allowed
from tests.serving.pd.pd_pair import Pair, run, running

pytestmark = pytest.mark.xdist_group("jax")
EAGER = SpeculationConfig(method=("grammar", "lookup"), num_tokens=3)  # of a number that is given nobody rests
SAMPLINGS: tuple[dict[str, object], ...] = (
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "seed": 6, "repetition_penalty": 1.2},
)
FEW = {
    "bias_ids": (5, 77, 400),
    "bias_values": (40.0, 40.0, 40.0),
}  # of so few tokens an answer repeats itself, and lookup finds something


def sampling_of(each: link_pb2.Run) -> Sampling:
    said = each.sampling
    return Sampling(
        temperature=said.temperature,
        seed=said.seed,
        repetition_penalty=said.repetition_penalty,
        logit_bias=dict(zip(said.bias_ids, said.bias_values, strict=True)),
    )


def assert_is_the_reference_s(each: link_pb2.Run, tokens: list[int]) -> None:
    may = allowed(each.grammar, tokens) if each.grammar else None
    assert_drawn_from(reference(), each.prompt_tokens, tokens, sampling_of(each), allowed=may)


def num_guessed(pair: Pair) -> int:
    return pair.decode.engine.counters().totals.draft_tokens


async def test_handed_over_hit_and_prefilled_where_it_is_decoded_a_request_draws_the_same():
    async with running(speculation=EAGER) as pair:
        for index, sampling in enumerate({**each, **FEW} for each in SAMPLINGS):
            asked = [long_text(length, 10 * index + length) for length in (16, 70, 200)]
            runs = [run(prompt, 24, sampling=sampling) for prompt in asked]
            answers = await asyncio.gather(*map(pair.ask, runs))
            again = [await pair.ask(run(prompt, 24, sampling=sampling)) for prompt in asked]
            alone = [await pair.ask_decode_alone(run(prompt, 24, sampling=sampling)) for prompt in asked]
            for each, *found in zip(runs, answers, again, alone, strict=True):
                for answer in found:
                    assert answer.cause is None
                    assert len(answer.tokens[0]) == 24
                    assert_is_the_reference_s(each, answer.tokens[0])
            assert any(answer.num_cached for answer in again)
        assert num_guessed(pair) > 0


async def test_a_grammar_and_its_guesses_go_over_together():
    async with running(speculation=EAGER) as pair:
        ends = grammars().end_ids
        runs = [
            run(long_text(length, length), 60, grammar=JSON, stop_token_ids=ends, sampling=sampling)
            for length, sampling in zip((15, 65, 300), SAMPLINGS, strict=True)
        ]
        for each, answer in zip(runs, await asyncio.gather(*map(pair.ask, runs)), strict=True):
            assert answer.cause is None
            assert_is_the_reference_s(each, answer.tokens[0])
        assert num_guessed(pair) > 0
