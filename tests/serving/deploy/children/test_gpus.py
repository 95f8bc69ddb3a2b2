"""Which cards each process sees; how it is where there are any nobody has tried."""

from pathlib import Path

import pytest

from moonshard.serving.deploy.children import gpus
from moonshard.serving.deploy.children.gpus import MEMORY, VISIBLE, gpus_here, shared_out

NEEDS = {"prefill 0": 2, "decode 0": 1, "decode 0.1": 1}


def test_no_two_processes_see_the_same_card():
    assert shared_out(NEEDS, ("0", "1", "2", "3", "4")) == {
        "prefill 0": {VISIBLE: "0,1"},
        "decode 0": {VISIBLE: "2"},
        "decode 0.1": {VISIBLE: "3"},
    }


def test_too_few_are_shared_by_all_each_with_a_part_of_their_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(MEMORY, raising=False)
    assert shared_out(NEEDS, ("0",)) == {name: {MEMORY: "0.30"} for name in NEEDS}
    monkeypatch.setenv(MEMORY, "0.2")  # what the user has said stays
    assert shared_out(NEEDS, ("0",)) == {}


def test_without_cards_nothing_is_set():
    assert shared_out(NEEDS, ()) == {}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, ("0", "1", "10")),
        ({VISIBLE: "3,5"}, ("3", "5")),
        ({VISIBLE: ""}, ()),
        ({"JAX_PLATFORMS": "cpu"}, ()),
        ({"JAX_PLATFORMS": "cuda,cpu"}, ("0", "1", "10")),
    ],
)
def test_there_are_as_many_as_the_driver_has_and_jax_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], found: tuple[str, ...]
):
    for name in ("nvidia10", "nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(gpus, "find_spec", lambda name: name == "jax_cuda13_plugin" or None)
    assert gpus_here(environ, tmp_path) == found
    monkeypatch.setattr(gpus, "find_spec", lambda name: None)
    assert gpus_here(environ, tmp_path) == ()
