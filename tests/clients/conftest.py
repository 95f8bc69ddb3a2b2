"""One `moonshard serve` of the embedded model, which all clients ask, and the large ones only where they are wanted."""

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from moonshard.experiments.common.running.server import RunningServer, serving
from tests.clients.environments import LARGE, python_environment

MAX_CONTEXT_TOKENS = 2048
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "VLLM_NO_USAGE_STATS": "1",
    "OPENAI_API_KEY": "none",  # where a client insists on one
    "NO_PROXY": "127.0.0.1",
}
Installed = Callable[[str], Path]
Run = Callable[..., str]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--large", action="store_true", help="also clients that take several GB each")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    batches = f"batches.path={tmp_path_factory.mktemp('batches')}"
    overrides = ("mode=aggregated", f"model.max_context_tokens={MAX_CONTEXT_TOKENS}", batches)
    with serving(overrides, os.environ) as running:
        yield running


@pytest.fixture
def installed(pytestconfig: pytest.Config) -> Installed:
    """The folder of the programs of a client."""

    def programs(name: str) -> Path:
        if name in LARGE and not pytestconfig.getoption("large", default=False):
            pytest.skip(f"{name} takes several GB: `make clients LARGE=1`")
        return python_environment(name)

    return programs


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """What a program says on its standard output, run in an empty folder that is its home; it has to succeed."""

    def output(argv: Sequence[str | Path | int], **variables: str) -> str:
        environment = {**os.environ, **OFFLINE, "HOME": str(tmp_path), **variables}
        done = subprocess.run(
            list(map(str, argv)), capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    return output
