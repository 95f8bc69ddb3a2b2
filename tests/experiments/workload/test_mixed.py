"""Mixed requests are of their shapes and in their shares, the same ones at every rate; what cannot be is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonshard.experiments.workload.mixed import mixed
from moonshard.experiments.workload.plan import WorkloadError

TWO: dict[str, Any] = {
    "prompt_tokens": [8, 90], "output_tokens": [40, 2], "weights": [3, 1], "num_requests": 800, "rate_per_s": 5.0,
    "vocab_size": 50,
}  # fmt: skip


def two(**changes: Any) -> dict[str, Any]:
    return {**TWO, **changes}


def test_shapes_come_in_their_shares():
    requests = mixed(**TWO).requests
    shapes = [(len(one.prompt), one.max_tokens) for one in requests]
    assert set(shapes) == {(8, 40), (90, 2)}
    assert shapes.count((90, 2)) == 200
    assert requests[-1].at_s == pytest.approx(799 / 5)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=4), st.integers(1, 40), st.integers(0, 5))
def test_no_shape_is_off_its_share_by_a_whole_request_and_seeds_order_them_anew(
    weights: list[float], num_requests: int, seed: int
):
    sizes = list(range(1, len(weights) + 1))
    shapes = two(prompt_tokens=sizes, output_tokens=sizes, weights=weights)
    requests = mixed(**{**shapes, "num_requests": num_requests, "seed": seed}).requests
    found = [len(one.prompt) for one in requests]
    assert len(found) == num_requests
    for size, weight in zip(sizes, weights, strict=True):
        assert abs(found.count(size) - weight / sum(weights) * num_requests) < 1
    one, other = (mixed(**two(seed=number)).requests for number in (seed, seed + 1))
    assert [len(request.prompt) for request in one] != [len(request.prompt) for request in other]


@given(st.floats(0.1, 100), st.integers(0, 5))
def test_another_rate_sends_the_same_requests(rate_per_s: float, seed: int):
    told: dict[str, Any] = TWO | {"num_requests": 20, "seed": seed}
    one, other = mixed(**told).requests, mixed(**{**told, "rate_per_s": rate_per_s}).requests
    assert [request.prompt.tokens() for request in one] == [request.prompt.tokens() for request in other]
    assert [request.at_s for request in other] == pytest.approx([5 / rate_per_s * (r.at_s or 0) for r in one])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weights": [1]}, "an entry for each shape"),
        ({"prompt_tokens": [], "output_tokens": [], "weights": []}, "an entry for each shape"),
        ({"output_tokens": [0, 1]}, "begin at 1"),
        ({"num_requests": 0}, "begin at 1"),
        ({"weights": [0, 0]}, "weights begin at 0"),
        ({"weights": [-1, 2]}, "weights begin at 0"),
        ({"weights": [float("nan"), 2]}, "weights begin at 0"),
        ({"rate_per_s": 0.0}, "rate_per_s is 0"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], said: str):
    with pytest.raises(WorkloadError, match=said):
        mixed(**{**TWO, **change})
