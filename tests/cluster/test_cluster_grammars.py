"""Grammars through real processes: Mooncake, prefix hits, a killed decode worker, the embedded model's tool calls."""

import itertools
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import jsonschema
import pytest

from moonshard.serving.config.keys import embedded_model_path
from tests.cluster.conftest import Cluster, running, wait_until
from tests.cluster.test_cluster_tokens import http_completion
from tests.engine_room import long_text
from tests.serving.constrained.declarations import declaration

pytestmark = pytest.mark.xdist_group("cluster")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["a", "ü", "東京"]}, "minItems": 1, "maxItems": 4},
        "size": {"type": "integer", "minimum": -9, "maximum": 99},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}
NUM_DECLARATIONS, NUM_WITH_KILLS, NUM_COMPARED, NUM_AT_ONCE = 1000, 400, 300, 24
SAME = 0.98  # of the answers: where logits all but tie, another size of the batch may draw another token
NUM_KILLS, NUM_KILLED, NUM_WORKERS = 8, 50, 3


def asked(seed: int, temperature: float = 1.0) -> dict[str, Any]:
    return {"temperature": temperature, "seed": seed, "guided_json": SCHEMA, "max_tokens": 200}


def text_of(answer: dict[str, Any]) -> str:
    assert answer["choices"][0]["finish_reason"] == "stop", answer
    return answer["choices"][0]["text"]


def test_the_same_json_from_two_workers_and_from_one_cold_and_found_again(cluster: Cluster, aggregated: Cluster):
    prompt = long_text(150, seed=5)
    for seed in range(3):
        apart, again = (http_completion(cluster, prompt, **asked(seed)) for _ in range(2))
        together = http_completion(aggregated, prompt, **asked(seed))
        jsonschema.validate(json.loads(text_of(apart)), SCHEMA)
        assert text_of(again) == text_of(apart)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert text_of(together) == text_of(apart)


ALONE, GUESSING = "none", '["grammar", "eagle3", "lookup"]'  # what guesses


@pytest.fixture(scope="module", params=[ALONE, GUESSING], ids=["alone", "guessing"])
def embedded(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The embedded model, which calls tools, on one prefill and two decode workers."""
    with _embedded(request.param) as started:
        yield started


@contextmanager
def _embedded(method: str) -> Iterator[Cluster]:
    more = {"model.path": embedded_model_path(), "decode.replicas": 2, "routing.failover_wait_s": 60.0}
    with running(**more, **{"speculation.method": method}) as started:
        yield started


def calls_of(cluster: Cluster, tool: dict[str, Any], temperature: float, seed: int) -> list[dict[str, Any]]:
    body = {
        "messages": [{"role": "user", "content": f"Please look at number {seed}."}],
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": seed % 2 == 0,
        "temperature": temperature,
        "seed": seed,
        "max_tokens": 600,
    }
    with httpx.Client(base_url=cluster.http_url, timeout=300) as http:
        response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, (response.text, tool)
    choice = response.json()["choices"][0]
    return [] if choice["finish_reason"] == "length" else choice["message"]["tool_calls"]


def arguments_of(calls: list[dict[str, Any]]) -> list[str]:
    """Their ids are the requests' own."""
    return [call["function"]["arguments"] for call in calls]


def assert_valid(tool: dict[str, Any], calls: list[dict[str, Any]]) -> None:
    function = tool["function"]
    for call in calls:
        assert call["function"]["name"] == function["name"]
        arguments = json.loads(call["function"]["arguments"])
        jsonschema.Draft202012Validator(function["parameters"]).validate(arguments)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.timeout(3000)
def test_calls_of_generated_tools_are_valid(embedded: Cluster, temperature: float):
    """Of those that ended: one that goes on calling until it may say no more is cut off wherever it is."""
    tools = [declaration(seed) for seed in range(NUM_DECLARATIONS)]
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        found = list(pool.map(lambda seed: calls_of(embedded, tools[seed], temperature, seed), range(NUM_DECLARATIONS)))
    for tool, calls in zip(tools, found, strict=True):
        assert_valid(tool, calls)
    assert sum(map(bool, found)) >= 0.9 * NUM_DECLARATIONS


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_guesses_change_no_call():
    said = list[list[list[str]]]()
    for method in (ALONE, GUESSING):
        with _embedded(method) as cluster, ThreadPoolExecutor(NUM_AT_ONCE) as pool:
            found = pool.map(lambda seed: calls_of(cluster, declaration(seed), 1.0, seed), range(NUM_COMPARED))
            said.append([arguments_of(calls) for calls in found])
            assert (cluster.metric("vllm:spec_decode_num_accepted_tokens_total") > 0) == (method == GUESSING)
    assert sum(one == other for one, other in zip(*said, strict=True)) >= SAME * NUM_COMPARED


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_calls_are_valid_where_their_decode_worker_is_killed(embedded: Cluster):
    """One decode worker at a time: a new request is refused where there is none."""
    tools = [declaration(seed) for seed in range(NUM_WITH_KILLS)]
    num_before = embedded.metric("moonshard_request_retries_total")

    def num_killed() -> float:
        return embedded.metric("moonshard_request_retries_total") - num_before

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        asked = [pool.submit(calls_of, embedded, tools[seed], 1.0, seed) for seed in range(NUM_WITH_KILLS)]
        for index in itertools.count():  # a kill between two requests of a worker ends none
            if (index >= NUM_KILLS and num_killed() >= NUM_KILLED) or all(each.done() for each in asked):
                break
            assert wait_until(lambda: embedded.metric("moonshard_worker_up") == NUM_WORKERS, 120)
            os.kill(embedded.pid("decode", index % 2), signal.SIGKILL)
            assert wait_until(lambda: embedded.metric("moonshard_worker_up") < NUM_WORKERS, 60)
        for tool, each in zip(tools, asked, strict=True):
            assert_valid(tool, each.result())
    assert num_killed() >= NUM_KILLED
