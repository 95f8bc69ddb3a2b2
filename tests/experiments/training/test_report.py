"""A run's curves, from a made-up journal."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moonshard.experiments.training import report
from moonshard.experiments.training.run.journal import METRICS

PNG = b"\x89PNG\r\n\x1a\n"


def step_record(step: int) -> dict[str, object]:
    stage = "short" if step <= 60 else "long"
    return {"step": step, "stage": stage, "tokens": step * 4096, "loss": 5.0 / step, "load": 1.1}


def skill_record(step: int, skill: str) -> dict[str, object]:
    return {"step": step, "skill": skill, "answers_right": step / 200, "tokens_right": 0.5, "num_answers": 3}


def journal(run: Path, *records: dict[str, object]) -> Path:
    run.mkdir(exist_ok=True)
    (run / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
    return run / METRICS


STEPS = [step_record(step) for step in range(20, 140, 20)]
SKILLS = [skill_record(step, skill) for step in (50, 100) for skill in ("recall", "tools")]


def draw(run: Path, picture: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["report", str(run), "--out", str(picture)])
    return report.main()


@pytest.mark.parametrize("records", [STEPS + SKILLS, STEPS, STEPS[:1]], ids=["a run", "unmeasured", "one line"])
def test_a_journal_becomes_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: list[dict[str, object]]
) -> None:
    journal(tmp_path, *records)
    assert draw(tmp_path, tmp_path / "curves.png", monkeypatch) == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(PNG)


def test_dashed_lines_mark_where_a_stage_ends_and_a_line_being_written_is_left_out(tmp_path: Path) -> None:
    with journal(tmp_path, *STEPS, *SKILLS).open("a") as file:
        file.write('{"step": 140, "sta')
    steps, skills = report.read(tmp_path)
    assert [record["step"] for record in steps] == [20, 40, 60, 80, 100, 120]
    assert {skill: len(records) for skill, records in skills.items()} == {"recall": 2, "tools": 2}
    for axes in report.draw(steps, skills).axes:
        dashed = [np.asarray(one.get_xdata()).tolist() for one in axes.lines if one.get_linestyle() == "--"]
        assert dashed == [[60 * 4096 / 1e6] * 2]


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("", "no step was written down yet"),
        ('{"step": 2', "no step was written down yet"),
        ("what\n", "damaged: Expecting value"),
        (None, "No such file or directory"),
    ],
)
def test_a_journal_without_a_step_is_named_and_no_picture_made(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    cause: str,
) -> None:
    if content is not None:
        (tmp_path / METRICS).write_text(content)
    assert draw(tmp_path, tmp_path / "curves.png", monkeypatch) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / METRICS}: {cause}")
    assert not (tmp_path / "curves.png").exists()


def test_the_report_loads_no_device_library() -> None:
    code = "import sys, moonshard.experiments.training.report; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
