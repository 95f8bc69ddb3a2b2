"""With drafts of whatever quality, every request gets the very tokens that it gets without."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from moonshard.serving.control.drafting.drafter import Drafters
from moonshard.serving.control.drafting.guesses import Guesses
from moonshard.serving.control.drafting.lookup import Lookup
from moonshard.serving.control.request import Request
from moonshard.serving.control.sampling_parameters import Sampling
from moonshard.sharding.shard import Shard
from tests.agreement import assert_drawn_from, assert_same_tokens, reference
from tests.engine_room import Run, long_text, request, serve
from tests.serving.control.batching.stepping import WithoutModel
from tests.serving.engine.test_engine_grammars import END_IDS, JSON, LETTERS, assert_keeps_to, constrained
from tests.serving.engine.test_engine_meshes import ONE_OF_FEW

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.unoptimised, pytest.mark.timeout(900)]
Q_LEN = 4


class Script(WithoutModel):
    """Guesses what `guess` says of a choice's tokens so far."""

    def __init__(self, guess: Callable[[Sequence[int], int], Sequence[int]]):
        self._guess = guess
        self.noted: list[tuple[int, int]] = []

    @property
    def is_eager(self) -> bool:
        return True

    def propose(self, generated: Sequence[int], most: int) -> tuple[int, ...]:
        return tuple(self._guess(generated, most))

    def note(self, num_guessed: int, num_accepted: int) -> None:
        self.noted.append((num_guessed, num_accepted))


def knowing(run: Run, right: Callable[[int], bool], most: int = Q_LEN) -> Drafters:
    """Guesses what another run drew at positions where `right` says so, and else another token."""

    def drafter(asked: Request, choice: int) -> Script:
        said = run.of(asked, choice)

        def guess(generated: Sequence[int], allowed: int) -> list[int]:
            begin = len(generated)
            guessed = said[begin : begin + min(most, allowed)]
            return [token if right(begin + n) else (token + 1) % 2000 for n, token in enumerate(guessed)]

        return Script(guess)

    return drafter


QUALITIES = {
    "always right": lambda position: True,
    "never right": lambda position: False,
    "right two times of three": lambda position: position % 3 != 0,
}
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=1.0, seed=5),
    Sampling(temperature=0.9, seed=6, top_p=0.8, top_k=40, min_p=0.01),
    Sampling(temperature=0.7, seed=7, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    Sampling(temperature=0.0, frequency_penalty=0.8, logit_bias={5: 4.0, 77: -100.0}),
)


def mixed() -> list[Request]:
    """Each of `SAMPLINGS`, one of several choices, one whose stop tokens are held back."""
    some = [request(long_text(9 + 23 * n, n), 24, sampling=sampling) for n, sampling in enumerate(SAMPLINGS)]
    several = request(long_text(40, 9), 14, sampling=SAMPLINGS[1], n=3, num_logprobs=2)
    stops = frozenset(range(0, 2000, 125))
    held = request(long_text(30, 8), 40, sampling=replace(SAMPLINGS[1], seed=9), stop_token_ids=stops, min_tokens=9)
    return [*some, several, held]


def assert_the_same(asked: Sequence[Request], plain: Run, drafted: Run) -> None:
    for each in asked:
        for choice in range(each.n):
            ours, theirs = plain.of(each, choice), drafted.of(each, choice)
            if ours != theirs:
                assert_same_tokens(reference(), each.prompt, ours, theirs, each.sampling)
    same = sum(plain.of(each, n) == drafted.of(each, n) for each in asked for n in range(each.n))
    assert same >= 0.9 * sum(each.n for each in asked)  # near ties are rare


@pytest.mark.parametrize("right", QUALITIES.values(), ids=QUALITIES.keys())
def test_drafts_of_any_quality_change_no_token(right):
    asked = mixed()
    plain = serve(asked)
    drafted = serve(asked, drafters=knowing(plain, right), q_len=Q_LEN)
    assert_the_same(asked, plain, drafted)
    assert drafted.finish == plain.finish
    if right(0):
        assert drafted.num_decode_steps < 0.5 * plain.num_decode_steps


def test_all_right_guesses_are_accepted_and_none_of_the_wrong_ones():
    asked = [request(long_text(20), 33, sampling=SAMPLINGS[1])]
    plain = serve(asked)
    right = serve(asked, drafters=knowing(plain, lambda position: True), q_len=Q_LEN)
    assert right.num_decode_steps == 8  # 32 tokens behind the first
    assert right.num_accepted == right.num_guessed == 24
    wrong = serve(asked, drafters=knowing(plain, lambda position: False), q_len=Q_LEN)
    assert (wrong.num_decode_steps, wrong.num_accepted) == (32, 0)


def test_log_probabilities_are_those_of_the_tokens_whatever_was_guessed():
    asked = [request(long_text(20), 21, sampling=SAMPLINGS[1], num_logprobs=3)]
    plain = serve(asked)
    drafted = serve(asked, drafters=knowing(plain, lambda position: position % 2 == 0), q_len=Q_LEN)
    (ours,), (theirs,) = plain.logprobs.values(), drafted.logprobs.values()
    assert len(ours) == len(theirs) == 21
    np.testing.assert_allclose([each.chosen for each in ours], [each.chosen for each in theirs], atol=1e-4)
    assert [[token for token, _ in each.top] for each in ours] == [[token for token, _ in each.top] for each in theirs]


def test_preempted_sequences_keep_their_tokens_with_drafts():
    asked = [request(long_text(50 + n, n), 60, sampling=SAMPLINGS[n % 4]) for n in range(6)]
    plain = serve(asked)
    tight = serve(asked, num_blocks=14, drafters=knowing(plain, lambda position: position % 4 != 0), q_len=Q_LEN)
    assert tight.num_preemptions > 0
    assert_the_same(asked, plain, tight)


@pytest.mark.parametrize("right", QUALITIES.values(), ids=QUALITIES.keys())
@pytest.mark.parametrize("grammar", [LETTERS, JSON], ids=["regex", "json"])
def test_constrained_sequences_keep_to_their_grammar_and_their_tokens(grammar, right):
    asked = [constrained(grammar, 40, prompt=20 + n, sampling=SAMPLINGS[n % 4]) for n in range(4)]
    plain = serve(asked)
    drafted = serve(asked, drafters=knowing(plain, right), q_len=Q_LEN)
    assert_the_same(asked, plain, drafted)
    assert drafted.finish == plain.finish
    for each in asked:
        if set(drafted.of(each)) & END_IDS:
            assert_keeps_to(drafted, each)


def test_behind_the_end_of_a_grammar_only_ends_are_drawn_with_drafts_too():
    """Where stops are banned the end comes all the same, and the sequence goes on until its stops may end it."""
    asked = [constrained('start: "yes" | "no"', 20, sampling=each, min_tokens=9) for each in SAMPLINGS[:2]]
    plain = serve(asked)
    drafted = serve(asked, drafters=knowing(plain, lambda position: True), q_len=Q_LEN)
    assert drafted.tokens == plain.tokens
    assert drafted.finish == plain.finish
    assert drafted.num_accepted > 0
    assert all(len(plain.of(each)) == 10 and set(plain.of(each)[-6:]) <= END_IDS for each in asked)


@pytest.mark.parametrize(("mesh", "rules"), ONE_OF_FEW, ids=lambda each: str(each).split("(")[0])
def test_over_a_mesh_each_row_of_each_partition_has_its_own_guesses_and_masks(mesh, rules):
    shard = Shard(mesh=mesh, rules=rules)
    kinds = (LETTERS, "", JSON)
    asked = [constrained(kinds[n % 3], 20, prompt=10 + 7 * n, sampling=SAMPLINGS[n % 2]) for n in range(9)]
    plain = serve(asked, shard=shard)
    drafted = serve(asked, shard=shard, drafters=knowing(plain, lambda n: n % 5 != 0), q_len=Q_LEN)
    for each in asked:
        if each.grammar:
            assert_keeps_to(drafted, each)
        else:
            assert_drawn_from(reference(), each.prompt, drafted.of(each), each.sampling)
    assert drafted.num_accepted > 0.5 * drafted.num_guessed


def test_lookup_finds_what_a_sequence_repeats_and_rests_where_nothing_does():
    asked = [request(long_text(20), 60, sampling=Sampling(temperature=0.0, logit_bias={7: 100.0}))]
    plain = serve(asked)
    drafted = serve(asked, drafters=lambda each, _: Guesses(None, Lookup(each.prompt)), q_len=Q_LEN)
    assert_the_same(asked, plain, drafted)
    assert drafted.num_decode_steps < 0.5 * plain.num_decode_steps
    free = [request(long_text(20), 60, sampling=replace(SAMPLINGS[1], temperature=3.0))]
    assert serve(free, drafters=lambda each, _: Guesses(None, Lookup(each.prompt)), q_len=Q_LEN).num_guessed < 10
