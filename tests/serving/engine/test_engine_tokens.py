"""The engine gives the tokens of the plain forward pass, whatever the batch, the chunks or the pool."""

import numpy as np
import pytest

from moonshard.serving.control.request import SequenceId
from moonshard.serving.control.sampling_parameters import Sampling
from tests.agreement import FIXTURES, LOGIT_TOLERANCE, assert_drawn_from, assert_same_tokens, reference
from tests.engine_room import long_text, prepared, programs, request, serve
from tests.sizes import CHUNK_TOKENS

pytestmark = pytest.mark.xdist_group("jax")
GREEDY = Sampling(temperature=0.0)
SIZES = [15, 16, 17, 63, 64, 65, 300, 1500]


@pytest.mark.parametrize("name", ["kimi_k2", "dsv3_groups"])
def test_greedy_tokens_are_those_of_hugging_face(name):
    ref = np.load(FIXTURES / name / "ref.npz")
    requests = [request(ref[f"ids{i}"].tolist(), len(ref[f"greedy{i}"]), sampling=GREEDY) for i in range(3)]
    run = serve(requests, model=name)
    for i, asked in enumerate(requests):
        assert run.of(asked) == ref[f"greedy{i}"].tolist()


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, seed=2**63 + 12345)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_tokens", SIZES)
def test_chunked_prefill_then_decode_equals_the_whole_pass(num_tokens, sampling):
    asked = request(long_text(num_tokens), sampling=sampling)
    run = serve([asked])
    assert len(run.of(asked)) == 64
    assert run.num_prefill_steps == -(-num_tokens // CHUNK_TOKENS)
    assert_drawn_from(reference(), asked.prompt, run.of(asked), sampling)


def test_batched_requests_get_the_tokens_they_get_alone():
    sampling = Sampling(temperature=1.0, seed=7)
    requests = [request(long_text(n, seed=n), 40, sampling=sampling) for n in (5, 17, 64, 65, 130, 300, 33, 16)]
    together = serve(requests)
    for asked in requests:
        alone = serve([asked])
        assert_same_tokens(reference(), asked.prompt, alone.of(asked), together.of(asked), sampling)


def test_preempted_requests_get_the_tokens_they_get_undisturbed():
    sampling = Sampling(temperature=1.0, seed=11, repetition_penalty=1.3, frequency_penalty=0.2)
    requests = [request(long_text(60, seed=n), 90, sampling=sampling) for n in range(6)]
    roomy, tight = serve(requests), serve(requests, num_blocks=14)
    assert roomy.num_preemptions == 0
    assert tight.num_preemptions > 0
    assert tight.tokens == roomy.tokens


def test_preempted_requests_that_share_blocks_with_others_get_the_tokens_they_get_undisturbed():
    sampling, shared = Sampling(temperature=1.0, seed=17, repetition_penalty=1.3, frequency_penalty=0.2), long_text(64)
    requests = [
        request([*shared, *long_text(20 + 5 * n, seed=n)], 70, sampling=sampling, n=1 + n % 2) for n in range(1, 6)
    ]
    roomy, tight = serve(requests), serve(requests, num_blocks=18)
    assert roomy.num_preemptions == 0
    assert tight.num_preemptions > 0
    assert min(roomy.num_cached_tokens, tight.num_cached_tokens) >= len(shared) * (len(requests) - 1)
    for asked in requests:
        for choice in range(asked.n):
            assert_same_tokens(reference(), asked.prompt, roomy.of(asked, choice), tight.of(asked, choice), sampling)


def test_forked_choices_are_those_of_separate_requests_with_the_same_noise():
    sampling = Sampling(temperature=1.0, seed=3)
    asked = request(long_text(37), 30, sampling=sampling, n=4)
    run = serve([asked])
    assert len({tuple(tokens) for tokens in run.tokens.values()}) == 4
    for choice in range(4):
        assert_drawn_from(reference(), asked.prompt, run.of(asked, choice), sampling, choice)


def test_more_choices_than_slots_all_finish_with_their_own_noise():
    sampling = Sampling(temperature=1.0, seed=5)
    asked = request(long_text(20), 12, sampling=sampling, n=7)
    run = serve([asked])
    assert set(run.finish) == {SequenceId(asked.id, choice) for choice in range(7)}
    for choice in range(7):
        assert_drawn_from(reference(), asked.prompt, run.of(asked, choice), sampling, choice)


def test_a_stop_token_ends_the_request_and_what_was_launched_after_it_is_dropped():
    free = request(long_text(20), 30, sampling=GREEDY)
    tokens = serve([free]).of(free)
    stop = next(token for i, token in enumerate(tokens) if i > 3 and token not in tokens[:i])
    asked = request(free.prompt, 30, sampling=GREEDY, stop_token_ids=frozenset({stop}))
    run = serve([asked])
    assert run.of(asked) == tokens[: tokens.index(stop) + 1]
    assert run.finish[SequenceId(asked.id, 0)] == "stop"
    assert 1 <= run.num_wasted_tokens <= 2  # as many as were launched behind it


def test_min_tokens_keeps_stop_tokens_from_being_drawn():
    free = request(long_text(20), 30, sampling=GREEDY)
    tokens = serve([free]).of(free)
    asked = request(free.prompt, 30, sampling=GREEDY, stop_token_ids=frozenset(tokens[:2]), min_tokens=10)
    run = serve([asked])
    assert len(run.of(asked)) > 10 or run.finish[SequenceId(asked.id, 0)] == "length"
    assert not set(run.of(asked)[:10]) & set(tokens[:2])


def test_logprobs_are_those_of_the_reference_distribution():
    asked = request(long_text(50), 20, sampling=Sampling(temperature=1.0, seed=1, top_k=5), num_logprobs=4)
    run = serve([asked])
    tokens, found = run.of(asked), run.logprobs[SequenceId(asked.id, 0)]
    logits = reference().logits([*asked.prompt, *tokens])[len(asked.prompt) - 1 : -1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for position, (token, logprobs) in enumerate(zip(tokens, found, strict=True)):
        assert logprobs.chosen == pytest.approx(expected[position, token], abs=LOGIT_TOLERANCE)
        best = np.argsort(-expected[position])[:4]
        assert [token for token, _ in logprobs.top] == best.tolist()


def test_cancelling_at_any_step_gives_everything_back_and_disturbs_nobody():
    sampling = Sampling(temperature=1.0, seed=9)
    kept = request(long_text(40), 30, sampling=sampling)
    expected = serve([kept]).of(kept)
    for cancel_after in (1, 2, 3, 5, 8):
        doomed = [request(long_text(100, seed=n), 50, sampling=sampling, n=2) for n in range(3)]

        def cancel(engine, run, doomed=doomed, cancel_after=cancel_after):
            if run.num_steps == cancel_after:
                for each in doomed:
                    engine.cancel(each.id)

        run = serve([doomed[0], kept, *doomed[1:]], on_step=cancel)
        assert_same_tokens(reference(), kept.prompt, expected, run.of(kept), sampling)


def test_nothing_compiles_after_the_programs_are_compiled():
    from moonshard.serving.engine.compiled.compilations import CompilationCounter

    prepared(programs())
    counter = CompilationCounter()
    counter.start()
    counter.mark_serving()
    penalised = Sampling(temperature=0.7, seed=2, top_p=0.9, top_k=100, min_p=0.01, repetition_penalty=1.1)
    biased = Sampling(temperature=0.0, logit_bias={5: 2.0})
    serve(
        [request(long_text(n), 5, sampling=s, num_logprobs=2, n=2) for n in (5, 40, 200) for s in (penalised, biased)]
    )
    assert counter.num_while_serving == 0
