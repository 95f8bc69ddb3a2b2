"""The engine serves a model of two KV groups: the reference's tokens, and a bounded number of blocks for the window."""

from pathlib import Path

import pytest

from moonshard.serving.config.keys import ConfigError
from moonshard.serving.control.request import SequenceId
from moonshard.serving.control.sampling_parameters import Sampling
from moonshard.serving.engine.loading.model import load_model
from tests.engine_room import request
from tests.windowed.folder import WINDOW, a_prompt
from tests.windowed.reference import Reference
from tests.windowed.room import BLOCK_SIZE, GREEDY, NUM_SLOTS, assert_drawn_from, config, most_window_blocks, serve

pytestmark = pytest.mark.xdist_group("jax")
LENGTHS = [1, 5, 15, 16, 17, 39, 40, 41, 64, 65, 150, 500]
CHUNKS = [32, *(pytest.param(chunk_tokens, marks=pytest.mark.slow) for chunk_tokens in (64, 128))]
SEEDED = Sampling(temperature=1.0, seed=2**63 + 12345)


@pytest.mark.parametrize(
    ("length", "chunk_tokens"),
    [*((length, 32) for length in LENGTHS), (500, 64), pytest.param(500, 128, marks=pytest.mark.slow)],
)
def test_greedy_tokens_are_the_reference_s_whatever_the_chunks(folder, reference, length, chunk_tokens):
    asked = request(a_prompt(length, seed=length), 100, sampling=GREEDY)
    run = serve(folder, [asked], chunk_tokens=chunk_tokens)
    assert run.of(asked) == reference.greedy(asked.prompt, 100)
    assert run.num_prefill_steps == -(-length // chunk_tokens)


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_requests_served_together_get_the_reference_s_tokens(folder, reference, chunk_tokens):
    requests = [request(a_prompt(length, seed=length), 100, sampling=GREEDY) for length in LENGTHS]
    run = serve(folder, requests, chunk_tokens=chunk_tokens)
    assert run.num_preemptions == 0
    for asked in requests:
        assert run.of(asked) == reference.greedy(asked.prompt, 100)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_preempted_requests_get_the_reference_s_tokens(folder, reference, chunk_tokens, sampling):
    requests = [request(a_prompt(60 + n, seed=n), 120, sampling=sampling) for n in range(6)]
    largest = -(-185 // BLOCK_SIZE)  # columns
    run = serve(folder, requests, chunk_tokens=chunk_tokens, num_blocks=largest + most_window_blocks(chunk_tokens) + 6)
    assert run.num_preemptions > 0
    for asked in requests:
        assert len(run.of(asked)) == 120
        assert_drawn_from(reference, asked.prompt, run.of(asked), sampling)


@pytest.mark.parametrize(
    "length", [30, pytest.param(48, marks=pytest.mark.slow), 133, pytest.param(160, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("num_choices", [2, pytest.param(NUM_SLOTS, marks=pytest.mark.slow), NUM_SLOTS + 3])
def test_choices_of_one_prompt_are_each_drawn_with_their_own_noise(folder, reference, length, num_choices):
    asked = request(a_prompt(length, seed=length), 50, sampling=SEEDED, n=num_choices)
    run = serve(folder, [asked])
    assert set(run.finish) == {SequenceId(asked.id, choice) for choice in range(num_choices)}
    assert len({tuple(tokens) for tokens in run.tokens.values()}) == num_choices
    for choice in range(num_choices):
        assert_drawn_from(reference, asked.prompt, run.of(asked, choice), SEEDED, choice)


def test_choices_that_find_no_room_or_are_preempted_get_the_reference_s_tokens(folder, reference):
    requests = [request(a_prompt(70 + 9 * n, seed=n), 60, sampling=SEEDED, n=1 + n % 3) for n in range(6)]
    run = serve(folder, requests, num_blocks=24)
    assert run.num_preemptions > 0
    for asked in requests:
        for choice in range(asked.n):
            assert len(run.of(asked, choice)) == 60
            assert_drawn_from(reference, asked.prompt, run.of(asked, choice), SEEDED, choice)


@pytest.mark.parametrize("cancel_after", [1, 2, 3, 5, 8, 40])
def test_cancelling_at_any_step_gives_everything_back_and_disturbs_nobody(folder, reference, cancel_after):
    kept = request(a_prompt(150, seed=150), 100, sampling=GREEDY)
    doomed = [request(a_prompt(100 + 50 * n, seed=n), 60, sampling=GREEDY, n=2) for n in range(3)]

    def cancel(engine, blocks, run):
        if run.num_steps == cancel_after:
            for each in doomed:
                engine.cancel(each.id)

    run = serve(folder, [doomed[0], kept, *doomed[1:]], on_step=cancel)
    assert run.of(kept) == reference.greedy(kept.prompt, 100)
    assert len(run.finish) < 1 + 2 * len(doomed), "nothing was cancelled"


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("length", [5, 400])
def test_a_long_sequence_holds_no_more_of_the_window_than_its_bound(folder, length, chunk_tokens):
    asked, bound = request(a_prompt(length, seed=length), 200, sampling=GREEDY), most_window_blocks(chunk_tokens)
    held = list[tuple[int, int]]()  # columns of the tokens so far, and blocks

    def count(engine, blocks, run):
        num_tokens = length + len(run.of(asked))
        held.append((-(-num_tokens // BLOCK_SIZE), blocks.counts(0).used))

    serve(folder, [asked], chunk_tokens=chunk_tokens, on_step=count)
    running = held[:-1]  # with the last token it may have given everything back
    assert len(running) > 100
    for num_columns, num_blocks in running:
        ahead = num_columns + 1  # of what is launched before its results are known
        assert num_columns + min(num_columns, WINDOW // BLOCK_SIZE) <= num_blocks <= ahead + min(ahead, bound)
    assert max(num_columns for num_columns, _ in running) > bound, "the bound was never reached"


def test_chunks_that_begin_within_a_block_give_the_reference_s_tokens(folder, reference):
    """Beside a short prompt a long one has half of a step, so that its next chunks begin in the middle of blocks."""
    long = request(a_prompt(500, seed=500), 60, sampling=GREEDY)
    short = request(a_prompt(5, seed=5), 60, sampling=GREEDY)
    chunks = list[tuple[int, int]]()  # of the long one: how far into a block each begins, and how long it is

    def note(plan):
        own = (chunk for chunk in plan.chunks if chunk.request is long)
        chunks.extend((chunk.start % 64, len(chunk.tokens)) for chunk in own)

    run = serve(folder, [long, short], chunk_tokens=64, block_size=64, on_prefill=note)
    assert (32, 64) in chunks
    for asked in (long, short):
        assert run.of(asked) == reference.greedy(asked.prompt, 60)


def test_a_model_whose_every_layer_has_a_window_holds_its_bound_however_long_it_goes_on(sliding_folder):
    reference, bound, most = Reference(sliding_folder), most_window_blocks(32), 0

    def count(engine, blocks, run):
        nonlocal most
        most = max(most, blocks.counts(0).used)

    asked = request(a_prompt(400, seed=400), 200, sampling=SEEDED)
    run = serve(sliding_folder, [asked], on_step=count)
    assert 0 < most <= bound
    assert_drawn_from(reference, asked.prompt, run.of(asked), SEEDED)
    crowd = [request(a_prompt(60 + n, seed=n), 120, sampling=SEEDED, n=1 + n % 2) for n in range(6)]
    run = serve(sliding_folder, crowd, num_blocks=2 * bound + 2)
    for asked in crowd:
        for choice in range(asked.n):
            assert len(run.of(asked, choice)) == 120
            assert_drawn_from(reference, asked.prompt, run.of(asked, choice), SEEDED, choice)


def test_a_pool_that_holds_one_long_sequence_only_because_of_the_bound_serves_it(folder, reference):
    asked = request(a_prompt(500, seed=500), 120, sampling=GREEDY)
    num_columns = -(-620 // BLOCK_SIZE)
    run = serve(folder, [asked], num_blocks=num_columns + most_window_blocks(32))
    assert run.of(asked) == reference.greedy(asked.prompt, 120)


def test_a_pool_without_a_block_for_each_group_is_refused_by_its_key(folder: Path):
    with pytest.raises(ConfigError, match=r"^kv\.num_blocks: 1 are fewer than the 2 KV groups of the model"):
        load_model(config(folder, 32, num_blocks=1), "both", lambda message: None, prepares="none")
