"""The engine scores prompts as the plain forward pass does, whatever the chunks, the mesh or the pool."""

import numpy as np
import pytest
from scipy.special import log_softmax  # nobody here wrote it; jax brings it along

from moonshard.serving.control.request import PromptLogprobs, Request
from moonshard.serving.control.sampling_parameters import Sampling
from moonshard.sharding.rules import DECODE
from moonshard.sharding.shape import MeshShape
from moonshard.sharding.shard import Shard
from tests.agreement import FIXTURES, LOGIT_TOLERANCE, reference
from tests.engine_room import Run, long_text, request, serve
from tests.sizes import CHUNK_TOKENS

pytestmark = pytest.mark.xdist_group("jax")
GREEDY = Sampling(temperature=0.0)


def asked_of(prompt, num_prompt_logprobs: int = 3, **options) -> Request:
    options = {"max_tokens": 2, "sampling": GREEDY, **options}
    return request(prompt, num_prompt_logprobs=num_prompt_logprobs, **options)


def assert_scored(run: Run, asked: Request) -> None:
    assert_those_of(reference().logits(asked.prompt), asked, run.prompt_logprobs[asked.id])


def assert_those_of(logits: np.ndarray, asked: Request, found: PromptLogprobs | None) -> None:
    """`logits` [T, vocab] of the whole prompt."""
    assert found is not None
    expected = log_softmax(logits.astype(np.float64), axis=-1)[:-1]
    top, targets = asked.num_prompt_logprobs or 0, np.asarray(asked.prompt[1:])
    chosen = expected[np.arange(len(targets)), targets]
    assert len(found.logprobs) == len(found.ranks) == len(targets)
    np.testing.assert_allclose(found.logprobs, chosen, atol=LOGIT_TOLERANCE)
    ids = np.reshape(found.top_ids, (len(targets), top)).astype(int)
    likeliest = -np.sort(-expected, axis=-1)[:, :top]
    np.testing.assert_allclose(np.reshape(found.top_logprobs, (len(targets), top)), likeliest, atol=LOGIT_TOLERANCE)
    # near ties may change places: what is named has the log-probability that it is said to have
    np.testing.assert_allclose(np.take_along_axis(expected, ids, axis=1), likeliest, atol=LOGIT_TOLERANCE)
    least = 1 + (expected > chosen[:, None] + LOGIT_TOLERANCE).sum(axis=1)
    most = (expected > chosen[:, None] - LOGIT_TOLERANCE).sum(axis=1)
    assert (least <= np.asarray(found.ranks)).all()
    assert (np.asarray(found.ranks) <= most).all()


@pytest.mark.parametrize("name", ["kimi_k2", "dsv3_groups"])
def test_prompts_are_scored_as_hugging_face_scores_them(name):
    ref = np.load(FIXTURES / name / "ref.npz")
    requests = [asked_of(ref[f"ids{i}"].tolist()) for i in range(3)]
    run = serve(requests, model=name)
    for i, asked in enumerate(requests):
        assert_those_of(ref[f"logits{i}"], asked, run.prompt_logprobs[asked.id])


@pytest.mark.parametrize("num_tokens", [2, 15, 16, 17, 63, 64, 65, 300])
def test_a_prompt_in_chunks_is_scored_as_the_whole_pass_scores_it(num_tokens):
    asked = asked_of(long_text(num_tokens))
    run = serve([asked])
    assert run.num_prefill_steps == -(-num_tokens // CHUNK_TOKENS)
    assert_scored(run, asked)


def test_only_who_asks_is_scored_and_by_as_many_as_it_asks():
    """Side by side in the same steps, with several choices, and of 0 most likely tokens."""
    scored = [asked_of(long_text(n, seed=n), top, n=n % 2 + 1) for n, top in ((5, 0), (70, 20), (33, 1))]
    others = [request(long_text(n, seed=n), 2, sampling=GREEDY) for n in (6, 40, 90)]
    run = serve([asked for pair in zip(scored, others, strict=True) for asked in pair])
    assert run.prompt_logprobs.keys() == {asked.id for asked in scored}
    for asked in scored:
        assert_scored(run, asked)


def test_a_prompt_that_the_cache_has_is_computed_for_its_log_probabilities_and_kept_for_others():
    prompt = long_text(100)
    first, scored, last = request(prompt, 2, sampling=GREEDY), asked_of(prompt), request(prompt, 2, sampling=GREEDY)
    follows = {first.id: scored, scored.id: last}

    def submit_next(engine, run):
        for sequence in list(run.finish):
            if (follower := follows.pop(sequence.request_id, None)) is not None:
                engine.submit(follower)

    run = serve([first], on_step=submit_next)
    assert_scored(run, scored)
    assert run.num_cached_tokens == 96  # of the last one's


def test_a_prompt_that_is_preempted_before_its_first_token_is_scored_once_and_whole():
    requests = [request(long_text(40, seed=n), 90, sampling=GREEDY) for n in range(3)]
    scored = asked_of(long_text(120, seed=9), max_tokens=20)
    run = serve([*requests, scored], num_blocks=18)
    assert run.num_preemptions > 0
    assert_scored(run, scored)


def test_a_request_that_is_cancelled_between_its_chunks_leaves_no_scores():
    cancelled, other = asked_of(long_text(300)), request(long_text(5, seed=1), 8, sampling=GREEDY)
    left: list[int] = []

    def cancel(engine, run):
        engine.cancel(cancelled.id)
        left.append(engine.num_scoring)

    run = serve([other, cancelled], on_step=cancel)
    assert cancelled.id not in run.prompt_logprobs
    assert left[-1] == 0


MESHES = [MeshShape(data=2, tensor=2), MeshShape(data=2, tensor=2, pipe=2)]


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(mesh).split("(")[0])
def test_every_partition_of_a_mesh_scores_as_one_device_does(mesh: MeshShape):
    requests = [asked_of(long_text(n, seed=n)) for n in (5, 64, 130, 33, 100)]
    run = serve(requests, shard=Shard(mesh=mesh, rules=DECODE))
    for asked in requests:
        assert_scored(run, asked)
