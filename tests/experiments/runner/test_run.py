"""Whole runs against a gateway that answers by a script: what is said, what is kept, and what no disk takes."""

import asyncio
import io
import json
import re
import shutil
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import Iterator, Sequence
from pathlib import Path
from signal import SIGINT, SIGTERM, Signals

import pytest
from rich.console import Console

from moonshard.experiments.command import Run, experiment
from moonshard.experiments.reading.tables.frames import load_run
from moonshard.experiments.runner.experiment import load_experiment
from moonshard.experiments.runner.run import run_all
from moonshard.experiments.runner.run_folder import new_run
from moonshard.experiments.runner.run_record import read_run
from tests.experiments.runner.scripted import REFUSED, Scripted, listening, listening_aside

FIXED = """
repeats = 2
warmup_requests = 2
[workload]
kind = "fixed"
prompt_tokens = 8
output_tokens = 3
num_requests = 5
rate_per_s = 500
[sweep]
workload.rate_per_s = [500, 1000]
"""
TRACE = """
warmup_requests = 0
[workload]
kind = "trace"
path = "trace.jsonl"
clips = true
jitter_s = 0
[client]
late_ms = 0.000001
"""
CONTROL = re.compile(r"\x1b\[[?\d;]*[A-Za-z]")
MAX_FILE_BYTES = 40_000  # more than the tables of a few requests, less than those of many
LENGTHS = ((20, 4), (990, 30), (REFUSED, 2))  # of a prompt, and of its completion; the context has 1000
LIMITED = (
    "import resource, sys; from moonshard.experiments.command import Run, experiment; from pathlib import Path; "
    "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]),) * 2); "
    "sys.exit(experiment(Run(folder=Path(sys.argv[1]), out=Path(sys.argv[2]), url=sys.argv[3])))"
)


@pytest.fixture
def scripted() -> Scripted:
    scripted = Scripted()
    scripted.opened.set()
    return scripted


@pytest.fixture
def url(scripted: Scripted) -> Iterator[str]:
    with listening_aside(scripted) as address:
        yield address


def mini(tmp_path: Path, text: str) -> Path:
    folder = tmp_path / "mini"
    folder.mkdir()
    (folder / "config.toml").write_text(text)
    return folder


def traced(tmp_path: Path) -> Path:
    folder = mini(tmp_path, TRACE)
    lines = [
        {
            "timestamp": 0,
            "input_length": size,
            "output_length": most,
            "hash_ids": [number * 10 + block for block in range(-(-size // 512))],
        }
        for number, (size, most) in enumerate(LENGTHS)
    ]
    (folder / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def the_run(out: Path) -> Path:
    (run,) = (out / "mini").iterdir()
    return run


@pytest.mark.parametrize("left", [["point-001-repeat-1"], ["point-001-repeat-0", "point-001-repeat-1"]])
def test_a_run_does_not_go_on_at_a_server_that_has_another_model_by_now(
    tmp_path: Path, scripted: Scripted, url: str, capsys, left: Sequence[str]
):
    folder, out = mini(tmp_path, FIXED), tmp_path / "results"
    assert experiment(Run(folder=folder, out=out, url=url)) == 0
    run = the_run(out)
    for name in left:
        shutil.rmtree(run / name)
    scripted.fingerprint = "another"
    assert experiment(Run(folder=folder, out=out, url=url, resume=Path(run.name))) == 1
    assert f"{left[0]}: model.fingerprint was one and is another; a run goes on" in capsys.readouterr().err
    scripted.fingerprint = "one"
    assert experiment(Run(folder=folder, out=out, url=url, resume=Path(run.name))) == 0


def test_what_failed_was_late_or_was_cut_is_said_while_it_runs_and_in_the_summary(tmp_path: Path, url: str, capsys):
    out = tmp_path / "results"
    assert experiment(Run(folder=traced(tmp_path), out=out, url=url)) == 0
    said = capsys.readouterr().out
    assert "1/1: as configured, repeat 1: 3 requests, 1 failed, 3 late, 1 cut to the context, " in said
    summary = (the_run(out) / "summary.md").read_text()
    assert "as configured: 1 request was cut to the context." in summary
    titles, row = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in summary.splitlines()
        if line.startswith(("| point | requests", "| as configured | 3"))
    )
    told = dict(zip(titles, row, strict=True))
    assert (told["requests"], told["failed"], told["late"]) == ("3", "1", "3")
    (trial,) = load_run(the_run(out)).trials.values()
    assert trial.requests["outcome"].to_list() == ["completed", "completed", "resource_exhausted"]
    assert trial.requests["error"].to_list() == [None, None, "no room"]
    assert (trial.requests["planned_prompt_tokens"] + trial.requests["max_tokens"]).to_list() == [24, 1000, 15]


def test_a_server_that_keeps_its_cache_is_never_sent_a_prompt_twice(tmp_path: Path, scripted: Scripted, url: str):
    folder = mini(tmp_path, FIXED)
    for _ in range(2):
        assert experiment(Run(folder=folder, out=tmp_path / "results", url=url)) == 0
    prompts = [tuple(request.tokens.ids) for request in scripted.came]
    assert len(prompts) == 2 * 4 * (5 + 2)
    assert len({prompt[:6] for prompt in prompts}) == len(prompts)  # nor one that begins like another


@pytest.mark.parametrize("width", [40, 100])
def test_progress_is_one_line_of_any_terminal_which_begins_with_the_counts(tmp_path: Path, url: str, width: int):
    asked = load_experiment(mini(tmp_path, FIXED), ("sweep.workload.rate_per_s=[900]", "repeats=1"), url)
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=width, color_system=None, _environ={})
    with new_run(tmp_path / "results", asked) as run:
        run_all(asked, run, console)
    drawn = re.split(r"[\r\n]+", CONTROL.sub("", terminal.getvalue()))
    live = [line for line in drawn if " sent, " in line or line.endswith("…")]
    assert any("1/1: 5 sent" in line for line in live), drawn
    assert max(map(len, live)) <= width
    assert any(line.startswith("1/1: rate_per_s=900, repeat 1: 5 requests, 0 failed, ") for line in drawn)


def test_a_pipe_gets_a_line_for_each_trial_with_its_label_as_it_is(tmp_path: Path, url: str, capsys):
    folder, name = traced(tmp_path), f"[bold]{'x' * 200}.jsonl"
    (folder / "trace.jsonl").rename(folder / name)
    swept = f"sweep.workload.path={json.dumps([str(folder / name)])}"
    text = (folder / "config.toml").read_text().replace('path = "trace.jsonl"\n', "")
    (folder / "config.toml").write_text(text)
    assert experiment(Run(folder=folder, out=tmp_path / "results", url=url, set=(swept,))) == 0
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.startswith("1/1: ")]
    assert line.startswith(f"1/1: path={folder / name}, repeat 1: 3 requests, 1 failed, ")
    assert line.endswith(" s")


async def begun(folder: Path, out: Path, url: str, *arguments: str) -> Process:
    """The command as a process of its own."""
    command = (sys.executable, "-m", "moonshard.experiments.command", "run", folder, "--out", out, "--url", url)
    argv = map(str, (*command, *arguments))
    return await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize(
    ("numbers", "code"),
    [((SIGINT,), 130), ((SIGTERM,), 143), ((SIGINT, SIGINT), 130), ((SIGTERM, SIGTERM, SIGTERM), 143)],
)
async def test_a_signal_ends_a_run_in_order_however_often_it_comes(
    tmp_path: Path, numbers: Sequence[Signals], code: int
):
    folder, out, scripted = mini(tmp_path, FIXED), tmp_path / "results", Scripted()
    scripted.awaited = 5
    async with listening(scripted) as url:
        process = await begun(folder, out, url, "--set", "warmup_requests=0")
        await scripted.all_came.wait()
        for number in numbers:
            process.send_signal(number)
        _, errors = await process.communicate()
    run = the_run(out)
    assert errors.decode().splitlines() == [
        "moonshard experiment: incomplete: interrupted",
        f"                      go on with: --resume {run}",
    ]
    assert process.returncode == code
    record = read_run(run)
    assert [trial.state for trial in record.trials] == ["incomplete", "pending", "pending", "pending"]
    assert record.trials[0].why == "interrupted"
    assert [path.name for path in run.iterdir() if path.is_dir()] == ["point-000-repeat-0.incomplete"]


async def test_one_run_is_run_by_one_process_at_a_time(tmp_path: Path):
    folder, out, scripted = mini(tmp_path, FIXED), tmp_path / "results", Scripted()
    scripted.awaited = 5
    async with listening(scripted) as url:
        first = await begun(folder, out, url, "--set", "warmup_requests=0")
        await scripted.all_came.wait()
        run = the_run(out)
        second = await begun(folder, out, url, "--set", "warmup_requests=0", "--resume", run.name)
        _, errors = await second.communicate()
        assert (second.returncode, errors.decode()) == (
            2,
            f"moonshard experiment: {run}: another process runs it at this moment\n",
        )
        scripted.opened.set()
        _, errors = await first.communicate()
    assert (first.returncode, errors.decode()) == (0, "")
    assert read_run(run).state == "done"


def limited(folder: Path, out: Path, url: str, max_file_bytes: int) -> tuple[int, str]:
    """The command in a process whose files may only be so large: its exit code and complaints."""
    argv = [sys.executable, "-c", LIMITED, str(folder), str(out), url, str(max_file_bytes)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_a_disk_that_takes_no_more_ends_the_run_and_loses_no_trial_that_is_done(tmp_path: Path, url: str):
    """The second point's tokens are more than a file may hold."""
    text = FIXED.replace("repeats = 2", "repeats = 1").replace("output_tokens = 3", "output_tokens = 100")
    text = text.replace("workload.rate_per_s = [500, 1000]", "workload.num_requests = [2, 200]")
    folder, out = mini(tmp_path, text), tmp_path / "results"
    code, errors = limited(folder, out, url, MAX_FILE_BYTES)
    run = the_run(out)
    assert errors.splitlines() == [
        "moonshard experiment: incomplete: point-001-repeat-0: File too large",
        f"                      go on with: --resume {run}",
    ]
    assert code == 1
    record = read_run(run)
    assert [(trial.state, trial.why) for trial in record.trials] == [("done", None), ("incomplete", "File too large")]
    before = load_run(run).trials[0, 0].requests
    assert experiment(Run(folder=folder, out=out, url=url, resume=run)) == 0
    after = load_run(run)
    assert after.trials[0, 0].requests.equals(before)
    assert after.trials[1, 0].requests.height == 200


def test_a_disk_that_takes_nothing_is_said_before_anything_is_sent(tmp_path: Path, scripted: Scripted, url: str):
    out = tmp_path / "results"
    code, errors = limited(mini(tmp_path, FIXED), out, url, 0)
    assert (code, errors) == (2, f"moonshard experiment: --out {out}: File too large\n")
    assert list((out / "mini").iterdir()) == []
    assert scripted.came == []
