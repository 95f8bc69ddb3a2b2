"""What a stage keeps of its slots between steps: the next input of each; and that draws are made only where asked."""

import numpy as np
import pytest

from moonshard.serving.engine.programs import Drawn, Programs
from moonshard.serving.engine.steps import Step, StepKind
from tests.engine_room import Q_TILE, uncompiled_programs
from tests.sizes import MAX_CONTEXT_TOKENS, NUM_SLOTS

pytestmark = pytest.mark.xdist_group("jax")


@pytest.fixture(scope="module")
def executor() -> Programs:
    return uncompiled_programs()


def last_tokens(executor: Programs) -> list[int]:
    return np.asarray(executor.stages[0].state.last_token).tolist()


def load(executor: Programs, slot: int, history: list[int]) -> None:
    packed, fields = executor.shapes.layout(StepKind.LOAD).blank()
    fields["slot"][0], fields["num_prompt"][0], fields["num_history"][0] = slot, 1, len(history)
    fields["history"][0] = np.resize([*history, 99], MAX_CONTEXT_TOKENS)
    executor.fetch(executor.launch(Step(-1, StepKind.LOAD, 0, packed)))


def test_a_load_makes_the_last_token_of_the_history_the_slots_next_input(executor: Programs):
    before = last_tokens(executor)
    load(executor, 2, [5, 6, 7])
    assert last_tokens(executor) == [*before[:2], 7, *before[3:]]


def test_draws_become_inputs_of_their_slots_and_none_beyond_the_number_of_rows(executor: Programs):
    for slot in range(NUM_SLOTS):
        load(executor, slot, [40 + slot])
    packed, fields = executor.shapes.layout(StepKind.DECODE, NUM_SLOTS).blank()
    fields["slot"][0], fields["positions"][0] = [3, 1, 0, 2], [0, 0, -1, -1]
    sampling, draws = executor.shapes.layout(StepKind.DRAW).blank()
    draws["sample_slot"][0], draws["num_rows"][0] = [3, 1, 0, 2], 2
    drawn = executor.fetch(executor.launch(Step(-1, StepKind.DECODE, NUM_SLOTS, packed, sampling, draws=(0, 1))))
    assert isinstance(drawn, Drawn)
    assert last_tokens(executor) == [40, *drawn.tokens[1], 42, *drawn.tokens[0]]


def test_a_prefill_that_draws_nothing_is_waited_for_and_changes_no_slot(executor: Programs):
    before, pages = last_tokens(executor), np.asarray(executor.stages[0].state.pages).sum()
    packed, fields = executor.shapes.layout(StepKind.PREFILL, Q_TILE).blank()
    fields["tokens"][0, 0], fields["positions"][0, 0] = np.arange(Q_TILE), np.arange(Q_TILE)
    launched = executor.launch(Step(-1, StepKind.PREFILL, Q_TILE, packed))
    assert launched.results
    assert executor.fetch(launched) is None
    assert last_tokens(executor) == before
    assert np.asarray(executor.stages[0].state.pages).sum() != pages
