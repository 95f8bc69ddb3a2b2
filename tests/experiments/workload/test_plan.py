"""A plan that no runner could follow is refused."""

import pytest

from moonshard.experiments.workload.plan import Planned, Tokens, WorkloadError, check


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ({}, "exactly one of"),
        ({"at_s": 0.0, "after": 0}, "exactly one of"),
        ({"at_s": -1.0}, "at_s is -1"),
        ({"after": 1}, "after is 1"),
    ],
)
def test_a_plan_that_no_runner_could_follow_is_refused(times: dict, said: str):
    first = Planned(prompt=Tokens((1,)), max_tokens=1, at_s=0.0)
    with pytest.raises(WorkloadError, match=f"request 1: .*{said}"):
        check([first, Planned(prompt=Tokens((1,)), max_tokens=1, **times)])
