"""Prefill in one process, decode in another, Mooncake between: the tokens of one worker that does both.

Each answer is held against the reference, and its logprobs, usage and ends against those of an aggregated server. What
a single pair of workers can show by its own tokens stands in `test_cluster_tokens`, how the KV gets there in
`test_cluster_pd_transfers`.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from moonshard.rpc.types import Completion
from moonshard.serving.control.sampling_parameters import Sampling
from tests.agreement import LOGIT_TOLERANCE, assert_drawn_from, reference
from tests.cluster.conftest import Cluster, wait_until
from tests.cluster.test_cluster_tokens import SIZES, http_completion, http_stream, preempted
from tests.engine_room import long_text

pytestmark = pytest.mark.xdist_group("cluster")
NUM_TOKENS = 64
IDLE_WITHIN_S = 1.5
KINDS: dict[str, dict[str, Any]] = {  # of sampling, as `Sampling` and both fronts name its fields
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 2**53 - 1},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.3},
    "presence": {"temperature": 0.0, "presence_penalty": 0.7},
    "frequency": {"temperature": 1.0, "seed": 6, "frequency_penalty": 0.4},
    # One token again and again until it has been drawn too often: how long, tells whether the first one was counted.
    "counted": {"temperature": 0.0, "frequency_penalty": 2.0, "logit_bias": {17: 25.0}},
    "bias": {"temperature": 0.0, "logit_bias": {17: 2.5, 400: -3.0}},
    "all": {
        "temperature": 0.7,
        "seed": 8,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {99: 1.5},
    },
}

NO_CUT = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


def generate(cluster: Cluster, prompt: Sequence[int] | str, **options: Any) -> Completion:
    asked: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "top_p": 1.0, **options}
    with cluster.client() as client:
        return client.generate(prompt, **asked)


def assert_same_logprobs(one: Completion, other: Completion) -> None:
    """The logprobs of every choice are the same, as far as the tokens before them are."""
    for mine, theirs in zip(one.choices, other.choices, strict=True):
        for at, (here, there) in enumerate(zip(mine.logprobs, theirs.logprobs, strict=True)):
            if mine.token_ids[:at] != theirs.token_ids[:at]:
                break
            ours = {each.token_id: each.logprob for each in (here.chosen, *here.top)}
            others = {each.token_id: each.logprob for each in (there.chosen, *there.top)}
            shared = ours.keys() & others.keys()
            assert len(shared) >= 2  # the last of the likeliest may tie with the next
            assert [ours[token] for token in shared] == pytest.approx(
                [others[token] for token in shared], abs=LOGIT_TOLERANCE
            )


def test_both_arrangements_give_the_tokens_of_hugging_face(cluster, aggregated, fixture_references):
    ref = np.load(fixture_references / "ref.npz")
    for number in range(3):
        expected = ref[f"greedy{number}"].tolist()
        for each in (cluster, aggregated):
            answer = generate(each, ref[f"ids{number}"].tolist(), temperature=0.0, max_tokens=len(expected))
            assert list(answer.choices[0].token_ids) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_sampling_gives_the_tokens_of_the_reference_and_the_logprobs_of_one_worker(
    cluster, aggregated, kind
):
    prompts = [long_text(n, seed=n) for n in (16, 65, 300)]
    options = {**KINDS[kind], "logprobs": 3}
    with ThreadPoolExecutor(len(prompts)) as threads:
        moved, whole = (
            list(threads.map(lambda prompt: generate(each, prompt, **options), prompts))  # noqa: B023  # used at once
            for each in (cluster, aggregated)
        )
    for prompt, one, other in zip(prompts, moved, whole, strict=True):
        for answer in (one, other):
            assert len(answer.choices[0].token_ids) == NUM_TOKENS
            assert not assert_drawn_from(reference(), prompt, answer.choices[0].token_ids, Sampling(**KINDS[kind]))
        assert one.usage == other.usage
        assert_same_logprobs(one, other)


def test_cuts_leave_the_tokens_that_one_worker_draws(cluster, aggregated):
    prompt = long_text(33, seed=2)
    for cut in ({"top_p": 0.6}, {"top_k": 4}, {"min_p": 0.2}):
        options = {"temperature": 1.0, "seed": 31, **cut}
        free, moved, whole = (
            generate(server, prompt, **asked).choices[0].token_ids
            for server, asked in ((cluster, {**options, **NO_CUT}), (cluster, options), (aggregated, options))
        )
        assert moved == whole
        assert moved != free


def test_min_tokens_holds_across_the_handoff(cluster, aggregated):
    """The first token is drawn by one process and the others by another: neither may draw a stop token."""
    prompt = long_text(40, seed=3)
    sampling = Sampling(temperature=0.0)
    free = generate(cluster, prompt, temperature=0.0).choices[0].token_ids
    stops = sorted(set(free[:3]))
    answers = [
        generate(each, prompt, temperature=0.0, stop_token_ids=stops, min_tokens=10) for each in (cluster, aggregated)
    ]
    for answer in answers:
        tokens = answer.choices[0].token_ids
        assert not set(tokens[:10]) & set(stops)
        assert not assert_drawn_from(
            reference(), prompt, tokens, sampling, stop_token_ids=stops, min_tokens=min(10, len(tokens))
        )
    assert answers[0].choices == answers[1].choices


def test_three_choices_come_of_one_prefill_and_are_those_of_one_worker(cluster, aggregated):
    prompt = long_text(70, seed=5)
    before = cluster.inspect("decode").load.kv_transfer.num_landed_blocks
    options = {"temperature": 2.0, "seed": 12, "n": 3, "logprobs": 2, "frequency_penalty": 0.5}
    moved, whole = (generate(each, prompt, **options) for each in (cluster, aggregated))
    assert cluster.inspect("decode").load.kv_transfer.num_landed_blocks - before == 5
    assert len({choice.token_ids[0] for choice in moved.choices}) == 3  # else one might stand for all at the join
    sampling = Sampling(temperature=2.0, seed=12, frequency_penalty=0.5)
    for number, choice in enumerate(moved.choices):
        assert not assert_drawn_from(reference(), prompt, choice.token_ids, sampling, number)
    assert moved.usage == whole.usage
    assert_same_logprobs(moved, whole)


@pytest.mark.parametrize("stop_at", [1, 30])
def test_a_stop_string_ends_the_same_text_in_both_arrangements(cluster, aggregated, stop_at):
    """The string may stand in the text of the first token, before anything has been handed over."""
    text = generate(cluster, "import os", temperature=0.0).text
    stop = text[stop_at : stop_at + 3]
    fields = {"temperature": 0, "max_tokens": 1500, "ignore_eos": True, "stop": [stop]}
    moved, whole = (http_completion(each, "import os", **fields) for each in (cluster, aggregated))
    assert moved["choices"] == whole["choices"]
    assert moved["usage"] == whole["usage"]
    assert moved["choices"][0]["text"] == text[: text.index(stop)]
    streamed = http_stream(cluster, "import os", **fields)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == moved["choices"][0]["text"]
    assert wait_until(cluster.is_as_it_began, IDLE_WITHIN_S)


def test_a_request_that_its_first_token_ends_is_never_decoded(cluster, aggregated):
    prompt = long_text(100, seed=9)
    # Asked of both, so that both know as much of the prompt when it comes again.
    first, _ = (generate(each, prompt, temperature=0.0).choices[0].token_ids[0] for each in (cluster, aggregated))
    num_steps = cluster.inspect("decode").load.num_decode_steps
    for options, end in (({"max_tokens": 1}, ("length", None)), ({"stop_token_ids": [first]}, ("stop", first))):
        moved, whole = (generate(each, prompt, temperature=0.0, **options) for each in (cluster, aggregated))
        assert moved.choices == whole.choices
        assert moved.usage == whole.usage
        (choice,) = moved.choices
        assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == ((first,), *end)
        assert wait_until(cluster.is_as_it_began, IDLE_WITHIN_S)
    assert cluster.inspect("decode").load.num_decode_steps == num_steps


def test_all_kinds_and_lengths_at_once_get_the_reference_tokens_though_decode_preempts(cluster):
    asked = [
        (long_text(n, seed=n + number), KINDS[kind], (over_grpc, over_http, over_http_streamed)[number % 3])
        for number, (n, kind) in enumerate(zip([*SIZES, 200, 210, 220, 230, 240, 250], cycle(KINDS)))
    ]
    with preempted(cluster), ThreadPoolExecutor(len(asked)) as threads:
        answers = list(threads.map(lambda each: each[2](cluster, each[0], each[1]), asked))
    cut_short = 0
    for (prompt, sampling, _), tokens in zip(asked, answers, strict=True):
        assert len(tokens) == 4 * NUM_TOKENS
        cut_short += assert_drawn_from(reference(), prompt, tokens, Sampling(**sampling))
    assert cut_short <= 1
    assert wait_until(cluster.is_as_it_began, IDLE_WITHIN_S)


def over_grpc(cluster: Cluster, prompt: list[int], sampling: dict[str, Any]) -> Sequence[int]:
    return generate(cluster, prompt, max_tokens=4 * NUM_TOKENS, **sampling).choices[0].token_ids


def over_http(cluster: Cluster, prompt: list[int], sampling: dict[str, Any]) -> Sequence[int]:
    return http_completion(cluster, prompt, **_http_fields(sampling))["choices"][0]["token_ids"]


def over_http_streamed(cluster: Cluster, prompt: list[int], sampling: dict[str, Any]) -> Sequence[int]:
    chunks = http_stream(cluster, prompt, **_http_fields(sampling))
    return [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]


def _http_fields(sampling: dict[str, Any]) -> dict[str, Any]:
    bias = {str(token): value for token, value in sampling.get("logit_bias", {}).items()}
    return {**sampling, "logit_bias": bias, "top_p": 1.0, "max_tokens": 4 * NUM_TOKENS, "ignore_eos": True}
