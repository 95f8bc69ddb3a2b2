"""Prometheus' own tool finds nothing to say about the metrics, but for the names that are vLLM's."""

import shutil
import subprocess

import httpx
import pytest

from moonshard.experiments.common.running.server import RunningServer

PROMTOOL = shutil.which("promtool")
FOUND_SOMETHING = 3  # the exit code; a text that it cannot parse has another one

pytestmark = [pytest.mark.clients, pytest.mark.xdist_group("clients")]


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool: `apt-get install prometheus` brings it")
def test_promtool_finds_nothing_wrong_with_our_own_metrics(server: RunningServer):
    assert PROMTOOL is not None
    metrics = httpx.get(f"{server.http}/metrics", trust_env=False).text
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=metrics, capture_output=True, text=True, check=False)
    assert done.returncode == FOUND_SOMETHING, done.stderr
    assert [line for line in done.stderr.splitlines() if not line.startswith("vllm:")] == []
    assert "moonshard_requests_total" in metrics
