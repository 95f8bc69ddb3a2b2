"""The evaluator's greedy tokens are the plain forward pass's, however prompts share blocks and batches."""

from functools import cache
from random import Random

import numpy as np
import pytest

from moonshard.experiments.training.greedy import NUM_SLOTS, GreedyModel
from moonshard.experiments.training.greedy_blocks import BLOCK_SIZE
from moonshard.models.spec import ModelError
from tests.agreement import FIXTURES, reference

pytestmark = pytest.mark.xdist_group("jax")
FOLDER = FIXTURES / "kimi_k2"  # whose reference is `reference()`
MAX_CONTEXT_TOKENS = 512
NUM_TOKENS = 20
NEAR_TIE = 1e-3  # of logits


@cache
def model() -> GreedyModel:
    return GreedyModel(FOLDER, "float32", MAX_CONTEXT_TOKENS)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [random.randrange(200) for _ in range(num_tokens)]


def assert_greedy(tokens: list[int], answer: tuple[int, ...]) -> None:
    """Each token is the likeliest after those before it. By causality, one pass over the whole shows all steps."""
    logits = reference().logits([*tokens, *answer])[len(tokens) - 1 : -1]
    best, second = np.sort(logits, axis=-1)[:, :-3:-1].T
    assert (best - second).min() > NEAR_TIE  # else the comparison would say nothing
    assert logits.argmax(axis=-1).tolist() == list(answer)


@pytest.mark.parametrize("length", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 63, 65)), 64, 300])
def test_tokens_are_those_of_the_whole_pass(length):
    (answer,) = model().generate([prompt(length, seed=length)], NUM_TOKENS, ())
    assert len(answer) == NUM_TOKENS
    assert_greedy(prompt(length, seed=length), answer)


def test_prompts_that_begin_alike_get_the_tokens_of_the_whole_pass_and_compute_the_beginning_once():
    document = prompt(4 * BLOCK_SIZE + 10, seed=5)
    prompts = [[*document, *prompt(20, seed=seed)] for seed in range(40, 44)]
    before = model().num_computed_tokens
    answers = model().generate(prompts, NUM_TOKENS, ())
    assert model().num_computed_tokens - before == 4 * BLOCK_SIZE + 4 * 30
    for tokens, answer in zip(prompts, answers, strict=True):
        assert_greedy(tokens, answer)
    again = model().generate([prompts[0]], NUM_TOKENS, ())  # its beginning lies in the pages still
    assert again == answers[:1]


def test_a_block_of_the_same_tokens_after_another_beginning_is_another_block():
    beginnings, middle, end = (prompt(BLOCK_SIZE, seed=50), prompt(BLOCK_SIZE, seed=51)), prompt(BLOCK_SIZE, 52), [7, 8]
    prompts = [[*beginning, *middle, *end] for beginning in beginnings]
    for tokens, answer in zip(prompts, model().generate(prompts, NUM_TOKENS, ()), strict=True):
        assert_greedy(tokens, answer)


def test_a_prompt_that_ends_with_a_known_block_is_answered_from_its_last_token():
    longer = prompt(2 * BLOCK_SIZE + 5, seed=6)
    model().generate([longer], 2, ())
    (answer,) = model().generate([longer[: 2 * BLOCK_SIZE]], NUM_TOKENS, ())
    assert_greedy(longer[: 2 * BLOCK_SIZE], answer)


def test_more_prompts_than_fit_are_answered_alike_whatever_was_in_the_pages_before():
    prompts = [prompt(200 + number % 7, seed=number % 9 + 100) for number in range(2 * NUM_SLOTS + 3)]
    answers = model().generate(prompts, 4, ())
    for _ in range(3):  # the pages fill up, and are forgotten
        assert model().generate(prompts, 4, ()) == answers
    for tokens, answer in list(zip(prompts, answers, strict=True))[::20]:
        assert_greedy(tokens, answer)


def test_a_stop_token_ends_an_answer_and_is_not_of_it():
    tokens = prompt(30, seed=8)
    (free,) = model().generate([tokens], NUM_TOKENS, ())
    stop = free[5]
    (answer, other) = model().generate([tokens, prompt(31, seed=9)], NUM_TOKENS, [stop])
    assert answer == free[: free.index(stop)]
    assert other == model().generate([prompt(31, seed=9)], NUM_TOKENS, [stop])[0]
    assert model().generate([tokens], NUM_TOKENS, [free[0]]) == [()]


def test_each_expert_choice_of_a_valid_token_is_counted_once():
    fresh = GreedyModel(FOLDER, "float32", MAX_CONTEXT_TOKENS)
    fresh.generate([prompt(70)], 3, ())
    num_tokens = 70 + 2  # the last token drawn is not computed
    experts_per_token = fresh.expert_loads.sum(axis=1) / num_tokens
    assert experts_per_token.tolist() == [experts_per_token[0]] * len(experts_per_token)
    assert experts_per_token[0] == int(experts_per_token[0]) > 0


def test_a_prompt_without_room_for_its_answer_is_refused():
    with pytest.raises(ModelError, match="at most 512"):
        model().generate([prompt(500)], 13, ())
    with pytest.raises(ModelError):
        model().generate([[]], 1, ())
    with pytest.raises(ModelError, match="the tasks take"):
        GreedyModel(FOLDER, "float32", 1 << 30)
