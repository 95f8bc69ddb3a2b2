"""Through real processes in their default arrangement, over HTTP and gRPC, a prompt gets the reference's tokens."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from moonshard.serving.control.sampling_parameters import Sampling
from tests.agreement import Reference, assert_drawn_from, reference
from tests.cluster.conftest import wait_until
from tests.engine_room import long_text
from tests.sizes import NUM_SLOTS

pytestmark = pytest.mark.xdist_group("cluster")
SIZES = [15, 16, 17, 63, 64, 65, 300, 1500]
NUM_OUTGROWING = 600  # tokens of each of `NUM_SLOTS` choices: more than the pool's blocks hold


def http_completion(cluster, prompt, **fields) -> dict:
    with cluster.http() as http:
        answer = http.post("/v1/completions", json={"prompt": prompt, "return_token_ids": True, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def http_stream(cluster, prompt, **fields) -> list[dict]:
    body = {"prompt": prompt, "return_token_ids": True, "stream": True, **fields}
    with cluster.http() as http, http.stream("POST", "/v1/completions", json=body) as answer:
        events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


@contextmanager
def preempted(cluster, of: Reference | None = None) -> Iterator[None]:
    """A request beside the block, whose choices outgrow the pool however they overlap with the block's."""
    of = of or reference()
    sampling, prompt, before = Sampling(temperature=1.0, seed=5), long_text(300, seed=5), num_preemptions(cluster)
    options = {"temperature": 1.0, "top_p": 1.0, "seed": 5, "ignore_eos": True}
    choices: list[list[int]] = [[] for _ in range(NUM_SLOTS)]
    with cluster.client() as client:
        stream = client.stream(prompt, max_tokens=NUM_OUTGROWING, n=NUM_SLOTS, **options)
        for delta in stream:
            choices[delta.choice] += delta.token_ids
            if min(map(len, choices)) >= 2:
                break  # all of them decode
        yield
        for delta in stream:
            choices[delta.choice] += delta.token_ids
    assert num_preemptions(cluster) > before
    assert [len(tokens) for tokens in choices] == [NUM_OUTGROWING] * NUM_SLOTS
    cut_short = sum(assert_drawn_from(of, prompt, tokens, sampling, i) for i, tokens in enumerate(choices))
    assert cut_short <= 1


def num_preemptions(cluster) -> int:
    return cluster.inspect("decode").load.num_preemptions


def test_greedy_tokens_over_http_and_grpc_are_those_of_hugging_face(cluster, fixture_references):
    ref = np.load(fixture_references / "ref.npz")
    for i in range(3):
        prompt, expected = ref[f"ids{i}"].tolist(), ref[f"greedy{i}"].tolist()
        fields = {"temperature": 0, "max_tokens": len(expected), "ignore_eos": True}
        assert http_completion(cluster, prompt, **fields)["choices"][0]["token_ids"] == expected
        chunks = http_stream(cluster, prompt, **fields)
        assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == expected
        with cluster.client() as client:
            done = client.generate(prompt, temperature=0, max_tokens=len(expected), ignore_eos=True)
        assert list(done.choices[0].token_ids) == expected


def test_the_long_reference_is_reproduced(cluster, fixture_references):
    ref = np.load(fixture_references / "ref_long.npz")
    with cluster.client() as client:
        done = client.generate(ref["ids"].tolist(), temperature=0, max_tokens=64, ignore_eos=True)
    assert list(done.choices[0].token_ids) == ref["greedy"].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "seeded"])
def test_concurrent_requests_of_all_sizes_get_the_reference_tokens_though_the_pool_is_small(cluster, temperature):
    sampling = Sampling(temperature=temperature, seed=78)
    prompts = [long_text(n, seed=n) for n in [*SIZES, 200, 210, 220, 230, 240, 250]]

    def generate(prompt):
        with cluster.client() as client:
            options = {"temperature": temperature, "top_p": 1.0, "seed": 78, "ignore_eos": True}
            return client.generate(prompt, max_tokens=300, **options)

    with preempted(cluster), ThreadPoolExecutor(len(prompts)) as threads:
        done = list(threads.map(generate, prompts))
    cut_short = 0
    for prompt, completion in zip(prompts, done, strict=True):
        assert len(completion.choices[0].token_ids) == 300
        cut_short += assert_drawn_from(reference(), prompt, completion.choices[0].token_ids, sampling)
    assert cut_short <= 1
    assert wait_until(cluster.is_as_it_began, 1.5)  # the client has its last token before the workers let go


def test_http_and_grpc_agree_token_for_token_for_every_choice(cluster):
    options = {"temperature": 1.0, "top_p": 0.9, "seed": 4, "max_tokens": 20, "n": 3, "logprobs": 2, "ignore_eos": True}
    options |= {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {"17": 3.0}}
    over_http = http_completion(cluster, "def main():", **options)
    with cluster.client() as client:
        over_grpc = client.generate("def main():", **{**options, "logit_bias": {17: 3.0}})
    assert len({tuple(choice.token_ids) for choice in over_grpc.choices}) == 3
    for one, other in zip(over_http["choices"], over_grpc.choices, strict=True):
        assert one["token_ids"] == list(other.token_ids)
        assert one["text"] == other.text
        assert one["logprobs"]["token_logprobs"] == pytest.approx([p.chosen.logprob for p in other.logprobs], abs=1e-4)


def test_streamed_text_is_the_whole_text_and_every_token_has_its_chunk(cluster):
    fields = {"temperature": 0.7, "seed": 5, "max_tokens": 40, "ignore_eos": True}
    whole = http_completion(cluster, "class Foo", **fields)
    chunks = http_stream(cluster, "class Foo", **fields, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == whole["choices"][0]["text"]
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks[:-1]] == [1] * 40
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]


def test_a_stop_string_cuts_the_text_and_the_bill(cluster):
    fields = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    text = http_completion(cluster, "import os", **fields)["choices"][0]["text"]
    stop = text[len(text) // 2 :][:4]
    cut = http_completion(cluster, "import os", **fields, stop=[stop])
    assert cut["choices"][0]["text"] == text[: text.index(stop)]
    assert (cut["choices"][0]["finish_reason"], cut["choices"][0]["stop_reason"]) == ("stop", stop)
    assert cut["usage"]["completion_tokens"] < 40
    streamed = http_stream(cluster, "import os", **fields, stop=[stop])
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == cut["choices"][0]["text"]


def test_nothing_compiled_while_serving(cluster):
    with cluster.http() as http:
        metrics = http.get("/metrics").text
    lines = [line for line in metrics.splitlines() if line.startswith("moonshard_compilations_while_serving_total{")]
    assert lines
    assert all(line.endswith(" 0.0") for line in lines)
