"""Real processes with weights in the formats of their folder: Mooncake, prefix hits, preemption and a killed worker.

Every token is the one that the values have which the formats stand for, in float32.
"""

from collections.abc import Iterator

import pytest

from moonshard.serving.control.sampling_parameters import Sampling
from tests.agreement import Reference, assert_drawn_from
from tests.cluster.conftest import AGGREGATED, Cluster, running
from tests.cluster.test_cluster_faults import kill_mid_stream
from tests.cluster.test_cluster_tokens import http_completion, num_preemptions, preempted
from tests.engine_room import long_text
from tests.quantised import folders

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.slow]
GREEDY = Sampling(temperature=0.0)
ASKED = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module", params=["int4", "fp8"])
def format_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def served(format_name: str) -> Iterator[Cluster]:
    with running(**{"model.path": folders(format_name) / "stored"}) as started:
        yield started


@pytest.fixture(scope="module")
def wide(format_name: str) -> Reference:
    return Reference(folders(format_name) / "wide")


def test_a_prompt_is_handed_over_and_found_again_with_the_same_tokens(served: Cluster, wide: Reference):
    prompt = long_text(300)
    for is_again in (False, True):
        answer = http_completion(served, prompt, max_tokens=40, **ASKED)
        assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == is_again
        assert_drawn_from(wide, prompt, answer["choices"][0]["token_ids"], GREEDY)


def test_a_preempted_answer_goes_on_where_it_was(served: Cluster, wide: Reference):
    before, prompt = num_preemptions(served), long_text(64, seed=1)
    with preempted(served, wide):
        answer = http_completion(served, prompt, max_tokens=100, **ASKED)
        assert_drawn_from(wide, prompt, answer["choices"][0]["token_ids"], GREEDY)
    assert num_preemptions(served) > before


def test_an_answer_whose_worker_was_killed_goes_on_where_it_was(format_name: str, wide: Reference):
    more = {"routing.failover_wait_s": 60.0, "model.path": folders(format_name) / "stored"}
    with running(**AGGREGATED, **more) as cluster:
        kill_mid_stream(cluster, wide)
