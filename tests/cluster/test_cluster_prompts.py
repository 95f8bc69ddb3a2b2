"""Several prompts in one request, and what is told of prompts: over real HTTP, in one worker and in two alike."""

import json
from collections.abc import Mapping

import httpx
import numpy as np
import pytest
from scipy.special import log_softmax

from moonshard.models.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.agreement import LOGIT_TOLERANCE, reference
from tests.cluster.conftest import FIXTURE, Cluster, wait_until
from tests.engine_room import long_text

pytestmark = pytest.mark.xdist_group("cluster")
TEXTS = ["The moon is a shard of", "An echo", "Prefill and decode, prefill and decode"]
GREEDY = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(params=["cluster", "aggregated"])
def served(request: pytest.FixtureRequest) -> Cluster:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = load_tokenizer(FIXTURE)
    assert found is not None
    return found


def complete(cluster: Cluster, path: str = "/v1/completions", **body: object) -> dict:
    with cluster.http() as http:
        answer = http.post(path, json={**GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def error_of(cluster: Cluster, path: str = "/v1/completions", **body: object) -> Mapping[str, str]:
    with cluster.http() as http:
        answer = http.post(path, json={**GREEDY, **body})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def scores(ids: list[int]) -> np.ndarray:
    """Log-probabilities [tokens - 1, vocab] of what follows each token, by the plain forward pass."""
    return log_softmax(reference().logits(ids).astype(np.float64), axis=-1)[:-1]


@pytest.mark.parametrize("num_tokens", [2, 63, 64, 65, 300])
def test_prompts_are_scored_as_the_plain_forward_pass_scores_them(served: Cluster, num_tokens: int):
    ids = long_text(num_tokens, seed=num_tokens)
    for _ in range(2):  # the second time the cache has it
        (choice,) = complete(served, prompt=ids, prompt_logprobs=2)["choices"]
        first, *others = choice["prompt_logprobs"]
        assert first is None
        expected = scores(ids)
        assert len(others) == len(expected)
        for token, said, row in zip(ids[1:], others, expected, strict=True):
            assert 2 <= len(said) <= 3
            assert str(token) in said
            for shown, record in said.items():
                assert record["logprob"] == pytest.approx(row[int(shown)], abs=LOGIT_TOLERANCE)
                assert (row > row[int(shown)] + LOGIT_TOLERANCE).sum() < record["rank"]
                assert record["rank"] <= (row > row[int(shown)] - LOGIT_TOLERANCE).sum()


def test_an_echo_is_the_prompt_before_the_answer_with_the_log_probabilities_of_both(
    served: Cluster, tokenizer: Tokenizer
):
    text = TEXTS[0]
    plain = complete(served, prompt=text, logprobs=1)["choices"][0]
    (choice,) = complete(served, prompt=text, echo=True, logprobs=1)["choices"]
    assert choice["text"] == text + plain["text"]
    ids, told = tokenizer.encode(text), choice["logprobs"]
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    rows = scores(ids)
    expected = rows[np.arange(len(rows)), ids[1:]]
    np.testing.assert_allclose(told["token_logprobs"][1 : len(ids)], expected, atol=LOGIT_TOLERANCE)
    likeliest = [max(top.values()) for top in told["top_logprobs"][1 : len(ids)]]
    np.testing.assert_allclose(likeliest, rows.max(axis=1), atol=LOGIT_TOLERANCE)
    assert told["tokens"][len(ids) :] == plain["logprobs"]["tokens"]
    assert told["token_logprobs"][len(ids) :] == pytest.approx(plain["logprobs"]["token_logprobs"], abs=LOGIT_TOLERANCE)
    for token, start in list(zip(told["tokens"], told["text_offset"], strict=True))[: len(ids)]:
        assert choice["text"][start:].startswith(token)
    assert told["text_offset"][len(ids)] == len(text)


def test_of_an_echo_without_an_answer_no_token_is_billed(served: Cluster):
    answer = complete(served, prompt=TEXTS[0], echo=True, max_tokens=0, logprobs=1)
    (choice,) = answer["choices"]
    assert choice["text"] == TEXTS[0]
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0
    assert error_of(served, prompt=TEXTS[0], max_tokens=0)["param"] == "max_tokens"


@pytest.mark.parametrize("kind", ["texts", "ids"])
def test_choices_of_several_prompts_are_those_of_each_alone(served: Cluster, tokenizer: Tokenizer, kind: str):
    prompts = TEXTS if kind == "texts" else [tokenizer.encode(text) for text in TEXTS]
    asked = {"n": 2, "seed": 5, "temperature": 1.5}
    alone = [complete(served, prompt=prompt, **asked) for prompt in prompts]
    together = complete(served, prompt=prompts, **asked)
    assert [choice["index"] for choice in together["choices"]] == list(range(6))
    expected = [choice["text"] for answer in alone for choice in answer["choices"]]
    assert [choice["text"] for choice in together["choices"]] == expected
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together["usage"][name] == sum(answer["usage"][name] for answer in alone)


def test_a_stream_of_several_prompts_has_the_choices_of_the_whole_answer(served: Cluster):
    asked = {"prompt": TEXTS, "n": 2, "seed": 5, "echo": True, "logprobs": 1, **GREEDY}
    expected = complete(served, **asked)
    texts, tokens, usage = [""] * 6, [[] for _ in range(6)], None
    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    with served.http() as http, http.stream("POST", "/v1/completions", json=streamed) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    for chunk in map(json.loads, lines[:-1]):
        usage = chunk["usage"] or usage
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            tokens[choice["index"]] += choice["logprobs"]["tokens"]
    assert texts == [choice["text"] for choice in expected["choices"]]
    assert tokens == [choice["logprobs"]["tokens"] for choice in expected["choices"]]
    assert usage is not None
    assert usage["total_tokens"] == expected["usage"]["total_tokens"]


def test_a_chat_is_scored_as_the_prompt_that_its_template_makes(served: Cluster):
    messages = [{"role": "user", "content": "hello"}]
    answer = complete(served, "/v1/chat/completions", messages=messages, prompt_logprobs=0, return_token_ids=True)
    ids, (first, *others) = answer["prompt_token_ids"], answer["prompt_logprobs"]
    assert first is None
    rows = scores(ids)
    told = [said[str(token)]["logprob"] for token, said in zip(ids[1:], others, strict=True)]
    np.testing.assert_allclose(told, rows[np.arange(len(rows)), ids[1:]], atol=LOGIT_TOLERANCE)
    assert all(len(said) == 1 for said in others)


def test_over_grpc_a_prompt_is_scored_as_over_http(served: Cluster):
    ids = long_text(70, seed=2)
    with served.client() as client:
        answer = client.generate(ids, max_tokens=1, prompt_logprobs=3)
    first, *others = answer.prompt_logprobs
    assert first is None
    for token, position, row in zip(ids[1:], others, scores(ids), strict=True):
        assert position is not None
        assert position.chosen.token_id == token
        assert position.chosen.logprob == pytest.approx(row[token], abs=LOGIT_TOLERANCE)
        assert [top.logprob for top in position.top] == pytest.approx(np.sort(row)[:-4:-1], abs=LOGIT_TOLERANCE)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": ["one", "two", ""]}, "prompt[2]"),
        ({"prompt": [[1], [1] * 5000]}, "prompt[1]"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": ["a", "b"], "echo": True, "logprobs": 21}, "logprobs"),
    ],
)
def test_what_is_not_served_is_refused_by_name_before_anything_is_generated(
    aggregated: Cluster, body: dict, field: str
):
    before = aggregated.inspect("worker").load
    assert error_of(aggregated, **body)["param"] == field
    after = aggregated.inspect("worker").load
    assert after.num_prefill_steps == before.num_prefill_steps


def test_nothing_is_left_of_several_prompts_whose_client_has_gone(served: Cluster):
    with served.http() as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json={"prompt": TEXTS * 20, "max_tokens": 800, "ignore_eos": True}, timeout=0.5)
    assert wait_until(served.is_as_it_began, 20)


def test_nothing_is_compiled_while_prompts_are_scored(served: Cluster):
    """Whoever is first to ask finds the program there."""
    for role in served.workers:
        assert served.inspect(*role).load.num_compilations_while_serving == 0
