"""A grammar goes with its request: the first token and all others keep to it, wherever they are drawn."""

import asyncio

import grpc
import numpy as np
import pytest

from moonshard.serving.constrained import masks as late_masks
from moonshard.serving.control.sampling_parameters import Sampling
from tests.agreement import assert_drawn_from, reference
from tests.engine_room import grammars, long_text
from tests.serving.engine.test_engine_grammars import JSON, LETTERS, allowed
from tests.serving.pd.pd_pair import run, running, until_as_it_began

pytestmark = pytest.mark.xdist_group("jax")


def constrained(grammar: str, length: int, max_tokens: int = 60, **fields):
    ends = grammars().end_ids
    return run(long_text(length, seed=length), max_tokens, grammar=grammar, stop_token_ids=ends, **fields)


def assert_keeps_to(each, tokens: list[int], sampling: Sampling, choice: int = 0) -> None:
    may = allowed(each.grammar, tokens)
    assert_drawn_from(reference(), each.prompt_tokens, tokens, sampling, choice, allowed=may)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_handed_over_request_draws_what_its_grammar_allows_from_the_first_token_on(temperature):
    async with running() as pair:
        sampling = {"temperature": temperature, "seed": 7}
        runs = [constrained(grammar, n, sampling=sampling) for grammar in (JSON, LETTERS) for n in (15, 65, 300)]
        answers = await asyncio.gather(*(pair.ask(each) for each in runs))
        for each, answer in zip(runs, answers, strict=True):
            assert answer.cause is None
            assert_keeps_to(each, answer.tokens[0], Sampling(temperature=temperature, seed=7))


async def test_a_prefix_hit_and_a_prefill_where_it_is_decoded_keep_to_the_grammar_too():
    async with running() as pair:
        each = constrained(JSON, 130)
        first, again = await pair.ask(each), await pair.ask(constrained(JSON, 130))
        alone = await pair.ask_decode_alone(constrained(JSON, 130))
        assert again.tokens == first.tokens
        assert alone.tokens == first.tokens
        assert_keeps_to(each, first.tokens[0], Sampling(temperature=0.0))


async def test_choices_of_one_handoff_have_places_of_their_own():
    async with running() as pair:
        each = constrained(JSON, 50, sampling={"temperature": 1.5, "seed": 3}, n=3)
        answer = await pair.ask(each)
        for choice in range(3):
            assert_keeps_to(each, answer.tokens[choice], Sampling(temperature=1.5, seed=3), choice)


async def test_a_first_token_that_cannot_be_drawn_ends_its_handoff_and_no_worker(monkeypatch: pytest.MonkeyPatch):
    compute, spoilt = late_masks.Masks.compute, list[late_masks.Place]()

    def compute_and_fail(masks: late_masks.Masks, rows: list[late_masks.Row], q_len: int = 1) -> np.ndarray:
        found = compute(masks, rows, q_len)
        if not spoilt:
            spoilt.append(rows[0].place)
            rows[0].place.fault = "it is too complex"
        return found

    monkeypatch.setattr(late_masks.Masks, "compute", compute_and_fail)
    async with running() as pair:
        answer = await pair.ask(constrained(LETTERS, 300))
        assert answer.failed is not None
        assert (answer.failed.code, answer.failed.field) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], "grammar")
        assert not answer.tokens
        await until_as_it_began(pair.prefill)
        await until_as_it_began(pair.decode)
        each = constrained(LETTERS, 300)
        assert_keeps_to(each, (await pair.ask(each)).tokens[0], Sampling(temperature=0.0))
