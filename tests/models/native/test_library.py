"""Kernels that cannot be used are not: one line says why, and the reference serves."""

import logging
import subprocess
from pathlib import Path

import pytest

from moonshard.models.native import library
from moonshard.models.native.library import LibraryError, open_library

needs_library = pytest.mark.skipif(library.chosen() is None, reason="there are no kernels here")


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch):
    """A process that has not looked for kernels yet."""
    library.chosen.cache_clear()
    yield
    monkeypatch.undo()
    library.chosen.cache_clear()


def expect_the_reference(caplog: pytest.LogCaptureFixture, reason: str) -> None:
    with caplog.at_level(logging.INFO, "moonshard.models.native.library"):
        assert library.chosen() is None
        assert library.chosen() is None
    assert [reason in record.message for record in caplog.records] == [True]
    assert library.made_of() == ("reference",)
    with pytest.raises(LibraryError):
        library.target("experts")


@pytest.mark.usefixtures("forgetful")
def test_a_library_that_was_not_built_is_said_once(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(library, "PATH", tmp_path / "kernels.so")
    expect_the_reference(caplog, "was not built")


@pytest.mark.usefixtures("forgetful")
def test_a_file_that_is_no_library_is_said_once(monkeypatch, caplog, tmp_path):
    (tmp_path / "kernels.so").write_bytes(b"no library")
    monkeypatch.setattr(library, "PATH", tmp_path / "kernels.so")
    expect_the_reference(caplog, "does not load")


@needs_library
@pytest.mark.usefixtures("forgetful")
def test_a_library_of_another_version_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(library, "VERSION", library.VERSION + 1)
    expect_the_reference(caplog, f"has version {library.VERSION - 1}, not {library.VERSION}")


@needs_library
@pytest.mark.usefixtures("forgetful")
def test_which_form_runs_is_said_once(caplog):
    with caplog.at_level(logging.INFO, "moonshard.models.native.library"):
        found = library.chosen()
        assert found is not None
        assert library.chosen() is found
    assert [record.message for record in caplog.records] == [f"kernels for CPUs: {found.best}"]
    assert library.made_of() == (library.VERSION, found.best)


@needs_library
def test_a_form_or_a_kernel_that_is_not_there_is_an_error():
    with pytest.raises(LibraryError, match="form riscv"):
        library.target("experts", "riscv")
    with pytest.raises(LibraryError, match="no sorting"):
        library.target("sorting")


@needs_library
def test_a_library_exports_what_is_called_and_nothing_of_its_forms():
    """An inline function of a form that other code could be bound to might have instructions that it must not have."""
    found = subprocess.run(["nm", "-D", "--defined-only", library.PATH], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in found.stdout.splitlines()}
    assert names == {"moonshard_version", "moonshard_forms", "moonshard_kernels", "moonshard_handler"}


@needs_library
def test_the_version_is_the_one_in_the_sources():
    source = Path(library.__file__).parent / "csrc/library.cc"
    assert f"constexpr int version = {library.VERSION};" in source.read_text()
    assert open_library(library.PATH).forms
