"""Tests of one group run in one process: else clusters share the cores, and programs are compiled twice."""

import os

import pytest

IS_DISTRIBUTED = "PYTEST_XDIST_WORKER" in os.environ


@pytest.mark.skipif(not IS_DISTRIBUTED, reason="all tests run in this process")
@pytest.mark.xdist_group("groups")
def test_the_runner_is_told_the_group_of_a_test(request: pytest.FixtureRequest):
    assert request.node.nodeid.endswith("@groups")
