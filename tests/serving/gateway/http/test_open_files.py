"""A gateway may open as many files as its limits on connections need."""

import logging
import resource
from collections.abc import Iterator

import pytest

from moonshard.serving.gateway.http.connections.open_files import OTHER_FILES, allow_connections

FILES = resource.RLIMIT_NOFILE


@pytest.fixture(autouse=True)
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(FILES)
    yield before
    resource.setrlimit(FILES, before)


def test_a_limit_that_is_too_low_is_raised_and_no_further():
    hard = resource.getrlimit(FILES)[1]
    resource.setrlimit(FILES, (256, hard))
    allow_connections(100)
    assert resource.getrlimit(FILES) == (100 + OTHER_FILES, hard)
    allow_connections(50)
    assert resource.getrlimit(FILES) == (100 + OTHER_FILES, hard)


def test_what_the_system_does_not_allow_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    with caplog.at_level(logging.WARNING):
        allow_connections(100)
    assert asked == [(1024, 1024)]
    assert f"{100 + OTHER_FILES - 1024} too few" in caplog.text
    monkeypatch.undo()
