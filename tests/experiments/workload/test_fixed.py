"""Prompts of one length, open loop or closed."""

import pytest

from moonshard.experiments.workload.fixed import closed, fixed
from moonshard.experiments.workload.plan import WorkloadError


def test_open_and_closed_have_the_same_fresh_prompts():
    options = {"prompt_tokens": 7, "output_tokens": 3, "num_requests": 10, "vocab_size": 500, "seed": 4}
    opened, shut = fixed(rate_per_s=5.0, **options), fixed(num_clients=3, **options)
    prompts = [request.prompt.tokens() for request in opened.requests]
    assert prompts == [request.prompt.tokens() for request in shut.requests]
    assert len({tuple(prompt) for prompt in prompts}) == 10
    assert opened.num_prompt_tokens == 70
    assert opened.is_open
    assert not shut.is_open
    assert [request.after for request in shut.requests] == [None, None, None, *range(7)]


@pytest.mark.parametrize("name", ["prompt_tokens", "output_tokens", "num_requests", "num_clients"])
def test_nothing_is_refused(name: str):
    options = {"prompt_tokens": 1, "output_tokens": 1, "num_requests": 1, "vocab_size": 9, name: 0}
    with pytest.raises(WorkloadError, match=name):
        fixed(**options)


def test_a_closed_loop_without_requests_is_none():
    assert closed([], 5, 3).requests == []
