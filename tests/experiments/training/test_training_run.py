"""A run that is killed, stopped or out of room goes on from its last whole checkpoint as if nothing had happened."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moonshard.experiments.training.export import export
from moonshard.experiments.training.folder import claim
from moonshard.experiments.training.run import loop
from moonshard.experiments.training.run.journal import METRICS, RunJournal, tell
from moonshard.experiments.training.run.recipe import RunFailed
from moonshard.models.folder.checkpoint import Checkpoint
from moonshard.models.registry import model_of
from tests.experiments.training.rehearsal import RECIPE, SHAPE

pytestmark = pytest.mark.xdist_group("jax")
ROOT = Path(__file__).parents[3]
NEVER_S = 1e9
ROOM_BYTES = 20_000  # per file: enough for the journal, not for weights


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Starts the rehearsal as a process, which by default saves after every step; none outlives the tests."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # one device
    with ExitStack() as running:

        def run(folder: Path, seconds_per_checkpoint: float = 0.0) -> subprocess.Popen[str]:
            command = [
                sys.executable,
                "-m",
                "tests.experiments.training.rehearsal",
                folder,
                str(seconds_per_checkpoint),
            ]
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            running.enter_context(process)
            running.callback(process.kill)
            return process

        yield run


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate()
    return process.returncode, out, err


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / loop.CHECKPOINTS).glob("*") if path.name.isdigit())


def wait_until_saved(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    while (saved_steps(folder) or [0])[-1] < step:
        if process.poll() is not None:
            raise AssertionError(f"step {step} was not saved: {finish(process)}")


def losses(folder: Path) -> dict[int, float]:
    """By step; the tokens of the steps since the last line are in it, so a resumed run's first line may differ."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == sorted(set(steps)), "a step stands twice"
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def tensors(folder: Path, out: Path) -> dict[str, np.ndarray]:
    assert export(folder, out) == (RECIPE.num_steps,)
    opened = Checkpoint.open(out)
    model_of(opened.config)
    return {name: opened.tensor(name).astype(np.float32) for name in opened.names}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, start: Start) -> Path:
    """A run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    assert finish(start(folder, NEVER_S))[0] == 0
    return folder


def assert_went_the_same_way(folder: Path, whole: Path, tmp_path: Path) -> None:
    assert losses(folder)[RECIPE.num_steps] == losses(whole)[RECIPE.num_steps]
    ours, expected = tensors(folder, tmp_path / "ours"), tensors(whole, tmp_path / "whole")
    assert ours.keys() == expected.keys()
    for name, values in ours.items():
        np.testing.assert_array_equal(values, expected[name])


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_with_the_weights_of_one_that_was_not(
    tmp_path: Path, whole: Path, start: Start
):
    folder = tmp_path / "run"
    for step in (1, 13):
        process = start(folder)
        wait_until_saved(process, folder, step)
        process.kill()
        finish(process)
    code, out, err = finish(start(folder, NEVER_S))
    assert code == 0, err
    assert "; 0 steps are done" not in out
    assert_went_the_same_way(folder, whole, tmp_path)
    assert len(saved_steps(folder)) == 2


@pytest.mark.slow
def test_a_run_killed_while_it_saves_goes_on_from_the_checkpoint_before(tmp_path: Path, whole: Path, start: Start):
    folder = tmp_path / "run"
    process = start(folder)
    wait_until_saved(process, folder, 2)
    while not (partial := sorted((folder / loop.CHECKPOINTS).glob("*tmp*"))):
        assert process.poll() is None
    process.kill()
    finish(process)
    if not partial[0].exists():
        pytest.skip("it was done before the kill")
    before = saved_steps(folder)[-1]
    code, out, err = finish(start(folder, NEVER_S))
    assert code == 0, err
    assert f"; {before} steps are done" in out
    assert not list((folder / loop.CHECKPOINTS).glob("*tmp*"))
    assert_went_the_same_way(folder, whole, tmp_path)


@pytest.mark.slow
def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(
    tmp_path: Path, whole: Path, start: Start
):
    folder = tmp_path / "run"
    process = start(folder)
    wait_until_saved(process, folder, 3)
    process.kill()
    finish(process)
    before, newest = saved_steps(folder)[-2:]
    for manifest in (folder / loop.CHECKPOINTS / str(newest)).rglob("manifest.ocdbt"):
        manifest.unlink()
    code, out, err = finish(start(folder, NEVER_S))
    assert code == 0, err
    assert f"step {newest} cannot be read" in out
    assert f"; {before} steps are done" in out
    assert_went_the_same_way(folder, whole, tmp_path)


def test_a_second_process_in_a_folder_ends_with_a_line(tmp_path: Path, start: Start):
    with claim(tmp_path):
        code, out, err = finish(start(tmp_path))
    assert (code, out) == (1, "")
    assert err == f"error: {tmp_path}: another run is at work in this folder; give --out another one\n"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_told_to_stop_saves_first(tmp_path: Path, whole: Path, start: Start, number: signal.Signals):
    folder = tmp_path / "run"
    process = start(folder, NEVER_S)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("step"):
        assert process.poll() is None
    process.send_signal(number)
    code, _, err = finish(process)
    assert code == 128 + number
    assert err == f"stopped after {saved_steps(folder)[-1]} steps; the same command goes on from there\n"
    code, _, err = finish(start(folder, NEVER_S))
    assert code == 0, err
    assert_went_the_same_way(folder, whole, tmp_path)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", folder]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root can mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(path: Path) -> None:
    """Fills up the free space."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


@pytest.mark.slow
def test_a_full_disk_stops_the_run_with_a_line_and_the_last_checkpoint_whole(
    tmp_path: Path, disk: Path, whole: Path, start: Start
):
    folder = disk / "run"
    process = start(folder)
    wait_until_saved(process, folder, 2)
    filler = disk / "filler"
    fill(filler)
    code, _, err = finish(process)
    assert code == 1
    last = err.splitlines()[-1]  # orbax has its say before, where the disk filled up while it wrote
    assert last.startswith(f"error: {folder}")
    assert "No space left on device" in last
    newest = saved_steps(folder)[-1]
    filler.unlink()
    code, out, err = finish(start(folder, NEVER_S))
    assert code == 0, err
    assert f"; {newest} steps are done" in out
    assert_went_the_same_way(folder, whole, tmp_path)


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_leaves_the_one_before(
    tmp_path: Path, whole: Path, start: Start
):
    folder = tmp_path / "run"
    process = start(folder)
    wait_until_saved(process, folder, 2)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (ROOM_BYTES, ROOM_BYTES))
    code, _, err = finish(process)
    assert code == 1
    newest = saved_steps(folder)[-1]
    last_line = f"error: {folder / loop.CHECKPOINTS}: step {newest + 1} could not be saved: File too large"
    assert last_line in err.splitlines()  # orbax tells of it as well
    code, out, err = finish(start(folder, NEVER_S))
    assert code == 0, err
    assert f"; {newest} steps are done" in out
    assert not list((folder / loop.CHECKPOINTS).glob("*tmp*"))  # a thread may have written on while the run ended
    assert_went_the_same_way(folder, whole, tmp_path)


def test_a_run_is_not_continued_with_another_recipe_or_shape(tmp_path: Path):
    tell(tmp_path, RECIPE, SHAPE)
    tell(tmp_path, RECIPE, SHAPE)
    with pytest.raises(RunFailed, match=r"another recipe\.learning_rate; give --out"):
        tell(tmp_path, replace(RECIPE, learning_rate=5.0), SHAPE)
    with pytest.raises(RunFailed, match=r"another shape\.hidden_size; give --out"):
        tell(tmp_path, RECIPE, SHAPE | {"hidden_size": 64})


def test_a_journal_goes_on_after_the_checkpoint_and_drops_what_will_happen_again(tmp_path: Path):
    first = RunJournal(tmp_path, 0)
    for step in (20, 40, 60):
        first.append({"step": step})
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 8')
    RunJournal(tmp_path, 45).append({"step": 60, "again": True})
    assert (tmp_path / METRICS).read_text() == '{"step": 20}\n{"step": 40}\n{"step": 60, "again": true}\n'
