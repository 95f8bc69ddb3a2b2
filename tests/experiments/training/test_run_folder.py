"""What lies in a run's folder: it is one run's at a time, and what is damaged there is told in a line."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moonshard.experiments.training import export
from moonshard.experiments.training.folder import claim
from moonshard.experiments.training.run import loop
from moonshard.experiments.training.run.checkpoints import PARTIAL, Checkpoints, Parts
from moonshard.experiments.training.run.journal import METRICS, TOLD, read_shape, tell
from moonshard.experiments.training.run.loop import Rhythm, train
from moonshard.experiments.training.run.recipe import RECIPES, Recipe, RunFailed
from moonshard.models.folder.checkpoint import Checkpoint
from tests.experiments.training.rehearsal import RECIPE, SHAPE, Repeats

pytestmark = pytest.mark.xdist_group("jax")
ONCE = replace(RECIPE, stages=(replace(RECIPE.stages[0], num_rows=3, num_steps=2),))  # 3 rows on the tests' 8 devices


def rehearse(recipe: Recipe, folder: Path) -> int:
    said: list[str] = []
    return train(recipe, SHAPE, Repeats(), folder, rhythm=Rhythm(), is_stopping=lambda: False, say=said.append)


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_a_second_run_in_a_folder_fails_at_once_and_touches_nothing(tmp_path: Path) -> None:
    with claim(tmp_path):
        (tmp_path / METRICS).write_text('{"step": 20}\n{"step": 4')
        (tmp_path / loop.CHECKPOINTS / f"40{PARTIAL}-1").mkdir(parents=True)
        before = contents(tmp_path)
        with pytest.raises(RunFailed, match=rf"^{tmp_path}: another run"):
            rehearse(RECIPE, tmp_path)
        assert contents(tmp_path) == before


def test_a_folder_is_free_again_after_a_run_that_failed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), claim(tmp_path / "run"):
        raise RuntimeError
    with claim(tmp_path / "run"):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailed, match=rf"^{tmp_path}/file/run: Not a directory$"), claim(tmp_path / "file" / "run"):
        pass


@pytest.mark.slow
def test_a_run_killed_while_it_measures_its_last_step_measures_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def be_killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop, "measure", be_killed)
        with pytest.raises(KeyboardInterrupt):
            rehearse(ONCE, tmp_path)
    assert rehearse(ONCE, tmp_path) == ONCE.num_steps
    records = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert [record["step"] for record in records if "skill" in record] == [ONCE.num_steps]
    assert [record["step"] for record in records if "loss" in record] == [ONCE.num_steps]
    assert rehearse(ONCE, tmp_path) == ONCE.num_steps  # nothing is left to do, and nothing is done
    assert len((tmp_path / METRICS).read_text().splitlines()) == len(records)


def parts_of(step: int) -> Parts:
    values = np.random.default_rng(step).normal(size=(100, 100)).astype(np.float32)
    return {"weights": {"table": values}, "progress": {"moment": values + 1, "step": np.int32(step)}}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with checkpoints of the steps 10 and 20."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (10, 20):
        checkpoints.save(step, parts_of(step))
    return tmp_path / "checkpoints"


def cut_the_values_short(step: Path) -> None:
    values = max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    values.write_bytes(values.read_bytes()[:100])


def lose_the_metadata(step: Path) -> None:
    (step / "weights" / "_METADATA").unlink()
    (step / "weights" / "manifest.ocdbt").unlink()


def write_other_metadata(step: Path) -> None:
    (step / "progress" / "_METADATA").write_text("null")


def lose_a_part(step: Path) -> None:
    shutil.rmtree(step / "progress")


def lose_everything(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


DAMAGES = (cut_the_values_short, lose_the_metadata, write_other_metadata, lose_a_part, lose_everything)


@pytest.mark.parametrize("damage", DAMAGES)
def test_where_the_newest_checkpoint_cannot_be_read_the_one_before_is_taken(
    saved: Path, damage: Callable[[Path], None]
) -> None:
    damage(saved / "20")
    said: list[str] = []
    checkpoints = Checkpoints(saved)
    found = checkpoints.restore_newest(parts_of(0), said.append)
    assert found is not None
    np.testing.assert_array_equal(found["weights"]["table"], parts_of(10)["weights"]["table"])
    assert found["progress"]["step"] == 10
    (line,) = said
    assert line.startswith(f"{saved}: step 20 cannot be read: ")
    assert line.endswith("; trying step 10")
    assert "\n" not in line
    checkpoints.save(20, parts_of(20))  # the run comes to it again
    assert checkpoints.restore(Checkpoints(saved).newest() or 0, parts_of(0))["progress"]["step"] == 20


def test_where_no_checkpoint_can_be_read_the_run_fails_and_leaves_them(saved: Path) -> None:
    for step in saved.iterdir():
        cut_the_values_short(step)
    before, said = contents(saved), list[str]()
    with pytest.raises(RunFailed, match=rf"^{saved}: step 10 cannot be read: "):
        Checkpoints(saved).restore_newest(parts_of(0), said.append)
    assert len(said) == 1
    assert contents(saved) == before


def test_of_sound_checkpoints_the_newest_is_taken_and_all_are_kept(saved: Path) -> None:
    said: list[str] = []
    found = Checkpoints(saved).restore_newest(parts_of(0), said.append)
    assert found is not None
    assert found["progress"]["step"] == 20
    assert not said
    assert sorted(path.name for path in saved.iterdir()) == ["10", "20"]


def test_where_nothing_was_saved_nothing_is_restored(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path).restore_newest(parts_of(0), print) is None


DAMAGED = {
    "empty": b"",
    "cut short": b'{"recipe": {"seed": 0},',
    "not UTF-8": b"\xff\xfe",
    "a list": b"[]",
    "without a shape": b'{"recipe": {}}',
    "without a recipe": b'{"shape": {}}',
    "a shape that is a number": b'{"recipe": {}, "shape": 3}',
    "too deep": b"[" * 100_000,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_run_json_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / TOLD).write_bytes(content)
    for read in (lambda: tell(tmp_path, RECIPE, SHAPE), lambda: read_shape(tmp_path)):
        with pytest.raises(RunFailed, match=rf"^{tmp_path}/{TOLD}: damaged: ") as raised:
            read()
        assert "\n" not in str(raised.value)


def run_export(run: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["export", "--run", str(run), "--out", str(out)])
    return export.main()


def without(*names: str) -> bytes:
    return json.dumps(
        {"recipe": {}, "shape": {name: value for name, value in SHAPE.items() if name not in names}}
    ).encode()


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"{", "damaged: Expecting property name"),
        (b"{}", "damaged: there is no recipe in it"),
        (without("hidden_size"), "damaged: config.json: hidden_size"),
        (without("bos_token_id"), "damaged: there is no 'bos_token_id' in its shape"),
        (None, "No such file or directory"),
    ],
)
def test_export_says_in_a_line_what_is_wrong_with_run_json(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    cause: str,
) -> None:
    if content is not None:
        (tmp_path / TOLD).write_bytes(content)
    assert run_export(tmp_path, tmp_path / "out", monkeypatch) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / TOLD}: {cause}")
    assert not (tmp_path / "out").exists()


def test_export_names_a_run_json_that_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / TOLD).mkdir()
    assert run_export(tmp_path, tmp_path / "out", monkeypatch) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / TOLD}: Is a directory\n"


def test_export_of_a_run_that_saved_nothing_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(tmp_path, RECIPE, SHAPE)
    assert run_export(tmp_path, tmp_path / "out", monkeypatch) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has come to step 8, and whose recipe averages the weights of steps 2 and 6."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = replace(RECIPE, stages=(replace(RECIPE.stages[0], num_rows=3, num_steps=8),), averaged=(2, 6))
    rhythm = Rhythm(seconds_per_checkpoint=0.0)
    train(recipe, SHAPE, Repeats(), folder, rhythm=rhythm, is_stopping=lambda: False, say=lambda _line: None)
    return folder


@pytest.fixture
def averaged(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run, to be damaged."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.mark.slow
def test_what_is_to_be_averaged_is_kept_and_averaged(averaged: Path, tmp_path: Path) -> None:
    assert sorted(path.name for path in (averaged / loop.CHECKPOINTS).iterdir()) == ["2", "6", "7", "8"]
    assert export.export(averaged, tmp_path / "mean") == (2, 6)
    found, parts = tensors_in(tmp_path / "mean"), [weights_of(averaged, step, tmp_path) for step in (2, 6)]
    assert found.keys() == parts[0].keys()
    for name, values in found.items():
        expected = (parts[0][name] + parts[1][name]) / 2
        assert np.abs(parts[0][name] - parts[1][name]).max() > 0 or "norm" in name or "bias" in name
        rounding = 2**-8 * (np.abs(parts[0][name]) + np.abs(parts[1][name]))  # all three were, to bfloat16
        assert (np.abs(values - expected) <= rounding + 1e-30).all()


@pytest.mark.slow
def test_a_run_that_seldom_saves_saves_what_is_to_be_averaged(tmp_path: Path) -> None:
    recipe = replace(RECIPE, stages=(replace(RECIPE.stages[0], num_rows=3, num_steps=4),), averaged=(2,))
    rehearse(recipe, tmp_path)
    assert sorted(path.name for path in (tmp_path / loop.CHECKPOINTS).iterdir()) == ["2", "4"]


@pytest.mark.slow
def test_a_run_that_lost_what_is_to_be_averaged_does_not_go_on(tmp_path: Path) -> None:
    recipe = replace(RECIPE, stages=(replace(RECIPE.stages[0], num_rows=3, num_steps=4),), averaged=(2,))
    rehearse(recipe, tmp_path)
    shutil.rmtree(tmp_path / loop.CHECKPOINTS / "2")
    with pytest.raises(RunFailed, match="step 2, which is to be averaged, has no checkpoint any more"):
        rehearse(recipe, tmp_path)


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_recipe_averages_are_ends_of_its_cycles_in_order(name: str) -> None:
    recipe = RECIPES[name]
    ends = {*(restart.step for restart in recipe.restarts), recipe.num_steps}
    assert list(recipe.averaged) == sorted(set(recipe.averaged) & ends)


@pytest.mark.slow
def test_before_the_last_of_them_the_newest_step_is_exported(averaged: Path, tmp_path: Path) -> None:
    for step in (6, 7, 8):
        shutil.rmtree(averaged / loop.CHECKPOINTS / str(step))
    assert export.export(averaged, tmp_path / "out") == (2,)


@pytest.mark.parametrize("value", ['"2"', "[2.5]", "[0]", "[true]"])
@pytest.mark.slow
def test_steps_that_are_none_are_named(averaged: Path, tmp_path: Path, value: str) -> None:
    told = json.loads((averaged / TOLD).read_text())
    told["recipe"]["averaged"] = json.loads(value)
    (averaged / TOLD).write_text(json.dumps(told))
    with pytest.raises(RunFailed, match="damaged: averaged is"):
        export.export(averaged, tmp_path / "out")


def weights_of(run: Path, step: int, tmp_path: Path) -> dict[str, np.ndarray]:
    """The folder's weights, as if the run had ended there."""
    alone = tmp_path / f"until {step}"
    shutil.copytree(run / loop.CHECKPOINTS / str(step), alone / loop.CHECKPOINTS / str(step))
    tell(alone, RECIPE, SHAPE)
    assert export.export(alone, tmp_path / f"of {step}") == (step,)
    return tensors_in(tmp_path / f"of {step}")


def tensors_in(folder: Path) -> dict[str, np.ndarray]:
    opened = Checkpoint.open(folder)
    return {name: opened.tensor(name).astype(np.float32) for name in opened.names}
