"""The scripted server, as a fixture."""

from collections.abc import Iterator

import pytest

from tests.experiments.verification.scripted import Scripted, scripted_server


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted_server() as server:
        yield server
