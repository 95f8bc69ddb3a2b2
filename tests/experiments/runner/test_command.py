"""The command on real processes: a sweep that is killed goes on where it was, and a server that dies ends it."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest

from moonshard.experiments.common.running.deployment import STOP_TIMEOUT_S, deployed
from moonshard.experiments.reading.tables.frames import load_run
from moonshard.experiments.runner.experiment import load_experiment
from moonshard.experiments.runner.schema import CLIENT_REQUESTS, CLIENT_TOKENS
from moonshard.serving.observe.rows.parts import read_table
from moonshard.serving.observe.rows.schema import REQUESTS, STEPS
from tests.sizes import EXPERIMENT, NUM_SLOTS

MODEL = Path(__file__).parents[2] / "fixtures" / "kimi_k2"
PROGRAM = (
    "import sys, tyro; from moonshard.experiments.command import experiment; "
    "sys.exit(tyro.cli(experiment, args=sys.argv[1:]))"
)
NUM_WARMUP = 2
SLOW_PER_S = 4  # of the second point, whose trial so takes seconds
CONFIG = f"""
repeats = 2
warmup_requests = {NUM_WARMUP}
[server]
mode = "aggregated"
model.path = "{MODEL}"
{EXPERIMENT}
worker.prepare = "needed"
trace.max_age_s = 0.05
[workload]
kind = "fixed"
prompt_tokens = 20
output_tokens = 6
num_requests = 10
rate_per_s = 50
[slo]
ttft_ms = 10_000
[sweep]
workload.rate_per_s = [50, {SLOW_PER_S}]
"""
EXIT_TIMEOUT_S = 30.0
PATIENCE_S = 120.0

pytestmark = pytest.mark.xdist_group("cluster")


def runner(*arguments: object) -> subprocess.Popen[str]:
    argv = [sys.executable, "-u", "-c", PROGRAM, *map(str, arguments)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def started(folder: Path) -> dict[int, str]:
    """The processes that record below the folder, and each one's command."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            argv = (process / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if any(str(folder) in argument for argument in argv) and "moonshard.serving.cli" in argv:
            found[int(process.name)] = argv[argv.index("moonshard.serving.cli") + 1]
    return found


def all_end(pids: Sequence[int]) -> bool:
    poll, left = select.poll(), set()
    for pid in pids:
        try:
            left.add(descriptor := os.pidfd_open(pid))
        except ProcessLookupError:
            continue
        poll.register(descriptor, select.POLLIN)
    deadline_s = time.monotonic() + EXIT_TIMEOUT_S
    while left and (ready := poll.poll(max(0.0, 1e3 * (deadline_s - time.monotonic())))):
        for descriptor, _ in ready:
            poll.unregister(descriptor)
            os.close(descriptor)
            left.discard(descriptor)
    return not left


def experiment_folder(tmp_path: Path, text: str = CONFIG) -> Path:
    folder = tmp_path / "mini"
    folder.mkdir()
    (folder / "config.toml").write_text(text)
    return folder


def the_run(out: Path) -> Path:
    (run,) = (out / "mini").iterdir()
    return run


@pytest.mark.slow  # three starts
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("number", "code", "num_repeats"),
    [(signal.SIGKILL, -9, 1), pytest.param(signal.SIGTERM, 143, 2, marks=pytest.mark.slow)],
)
def test_a_runner_that_is_ended_while_it_sends_ends_its_servers_and_goes_on_at_the_next_point(
    number: signal.Signals, code: int, num_repeats: int, tmp_path: Path
):
    folder, out = experiment_folder(tmp_path), tmp_path / "results"
    arguments = ("run", folder, "--out", out, "--set", f"repeats={num_repeats}")
    with runner(*arguments) as process:
        servers = serving_below(out / "mini", "point-001-repeat-0.part", num_requests=NUM_WARMUP + 1)
        assert sorted(servers.values()) == ["gateway", "worker"]
        process.send_signal(number)
        _, errors = process.communicate()
    run = the_run(out)
    assert process.returncode == code
    assert all_end(list(servers))
    assert not started(run)
    told = json.loads((run / "run.json").read_text())
    if number == signal.SIGKILL:
        assert (run / "point-001-repeat-0.part").is_dir()
    else:
        assert errors == interrupted(run)
        left = ["pending"] * (2 * num_repeats - 2)
        assert [trial["state"] for trial in told["trials"]] == ["done", "incomplete", *left]
        assert told["trials"][1]["why"] == "interrupted"
    done = [path.name for path in run.iterdir() if re.fullmatch(r"point-\d+-repeat-\d", path.name)]
    assert done == ["point-000-repeat-0"]
    before = {path: path.read_bytes() for path in (run / "point-000-repeat-0").rglob("*") if path.is_file()}

    with runner(*arguments, "--resume", run.name) as process:
        said, errors = process.communicate()
    assert process.returncode == 0, errors
    num_trials = 2 * num_repeats
    counted = [line[:4] for line in said.splitlines() if re.match(r"\d/\d: ", line)]
    assert counted == [f"{number}/{num_trials}:" for number in range(2, num_trials + 1)]
    assert {path: path.read_bytes() for path in before} == before
    check_run(run, num_repeats)
    if number == signal.SIGKILL:
        check_comparison(run, tmp_path / "differences.json")


def interrupted(run: Path) -> str:
    """What is said of it."""
    return f"moonshard experiment: incomplete: interrupted\n                      go on with: --resume {run}\n"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_runner_that_is_ended_while_its_first_server_starts_leaves_none(
    number: signal.Signals, code: int, tmp_path: Path
):
    folder, out = experiment_folder(tmp_path), tmp_path / "results"
    with runner("run", folder, "--out", out) as process:
        servers = serving_below(out / "mini", "point-000-repeat-0.part", num_processes=1)
        process.send_signal(number)
        _, errors = process.communicate()
    assert process.returncode == code
    assert all_end(list(servers))
    assert not started(out)
    assert errors == ("" if number == signal.SIGKILL else interrupted(the_run(out)))


@pytest.mark.timeout(300)
def test_a_second_interrupt_waits_for_no_server_that_does_not_end(tmp_path: Path):
    folder, out = experiment_folder(tmp_path), tmp_path / "results"
    slowly = f"sweep.workload.rate_per_s=[{SLOW_PER_S}]"
    with runner("run", folder, "--out", out, "--set", slowly) as process:
        servers = serving_below(out / "mini", "point-000-repeat-0.part", num_requests=NUM_WARMUP + 1)
        by_name = {name: pid for pid, name in servers.items()}
        os.kill(by_name["worker"], signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        assert all_end([by_name["gateway"]])
        begun_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert time.monotonic() - begun_s < STOP_TIMEOUT_S / 2
    assert (process.returncode, errors) == (130, interrupted(the_run(out)))
    assert all_end(list(servers))
    assert json.loads((the_run(out) / "run.json").read_text())["trials"][0]["why"] == "interrupted"


def serving_below(runs: Path, trial: str, *, num_processes: int = 2, num_requests: int = 0) -> dict[int, str]:
    """The processes of the trial that is being written, once there are so many, and so many requests have ended."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        for part in runs.glob(f"*/{trial}"):
            found = started(part)
            if len(found) >= num_processes and read_table(part / "server", REQUESTS).height >= num_requests:
                return found
        time.sleep(0.02)  # they are the runner's children, which tells nobody else
    raise TimeoutError(f"nothing serves below {runs}/*/{trial}")


def check_run(run: Path, num_repeats: int) -> None:
    """Every file of a run of two points that is done."""
    told = json.loads((run / "run.json").read_text())
    assert told["state"] == "done"
    assert [trial["name"] for trial in told["trials"]] == [
        f"point-00{point}-repeat-{repeat}" for repeat in range(num_repeats) for point in (0, 1)
    ]
    assert {trial["state"] for trial in told["trials"]} == {point["state"] for point in told["points"]} == {"done"}
    assert [point["settings"]["workload.rate_per_s"] for point in told["points"]] == [50, SLOW_PER_S]
    assert told["points"][0]["settings"]["server.decode.max_slots"] == NUM_SLOTS
    assert len(told["starts"]) == 2
    for start in told["starts"]:
        assert start["commit"]
        assert start["versions"]["jax"]
        assert start["machine"]["cores"] >= 1
    names = {trial["name"] for trial in told["trials"]}
    assert {path.name for path in run.iterdir()} == {*names, "run.json", "summary.md"}
    for name in names:
        check_trial(run / name)
    frames = load_run(run)
    prompts = {(point, repeat): trial.record.workload["seed"] for (point, repeat), trial in frames.trials.items()}
    assert prompts == {(point, repeat): repeat for repeat in range(num_repeats) for point in (0, 1)}
    assert "Goodput at 90%, as configured: " in (run / "summary.md").read_text()


def check_trial(folder: Path) -> None:
    record = json.loads((folder / "trial.json").read_text())
    assert (record["num_sent"], record["num_failed"], record["why_incomplete"]) == (10, 0, None)
    assert 0 < record["client_cpu_s"] < 2 * record["wall_s"]
    assert record["server_cpu_s"].keys() == {"worker 0", "gateway"}
    client = pl.read_parquet(folder / "requests.parquet")
    tokens = pl.read_parquet(folder / "tokens.parquet")
    assert client.columns == [column.name for column in CLIENT_REQUESTS.all_columns]
    assert tokens.columns == [column.name for column in CLIENT_TOKENS.all_columns]
    assert client["request_index"].to_list() == list(range(10))
    assert set(client["outcome"]) == {"completed"}
    assert tokens.group_by("request_index").len()["len"].to_list() == [6] * 10
    assert (client["late_ns"] == client["sent_ns"] - client["intended_ns"]).all()
    assert (client["late_ns"] > -1_000_000).all()
    assert record["num_late"] == client.filter(pl.col("late_ns") > 5_000_000).height
    assert pl.read_parquet(folder / "warmup.parquet").height == NUM_WARMUP

    names = {"trial.json", "requests.parquet", "tokens.parquet", "warmup.parquet", "server", "logs", "timeline.json"}
    assert {path.name for path in folder.iterdir()} == names
    drawn = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    titles = [event["args"]["name"].split()[0] for event in drawn if event["name"] == "process_name"]
    assert titles == ["gateway", "both"]
    begun = [event["name"] for event in drawn if event["ph"] == "b"]
    assert {f"request {name}" for name in client["request_id"]} <= set(begun)

    server = read_table(folder / "server", REQUESTS)
    assert server.height == NUM_WARMUP + 10
    both = client.join(server, on="request_id", suffix="_server")
    assert both.height == 10
    assert (both["clock"] == both["clock_server"]).all()
    assert (both["sent_ns"] <= both["received_ns"]).all()
    assert (both["e2e_ns_server"] <= both["e2e_ns"]).all()
    assert (both["cached_tokens"] == 0).all()
    assert {"prefill", "decode"} <= set(read_table(folder / "server", STEPS)["kind"])
    assert all("moonshard ready" in log.read_text() for log in (folder / "logs").iterdir())


def check_comparison(run: Path, out: Path) -> None:
    """The same run on both sides has no differences; and two of its points can be compared."""
    with runner("compare", run, run, "--json", out) as process:
        said, errors = process.communicate()
    assert process.returncode == 0, errors
    assert {one["difference"] for one in json.loads(out.read_text())} == {0}
    assert "goodput" not in said
    with runner(
        "compare", run, run, "--a", "workload.rate_per_s=50", "--b", f"workload.rate_per_s={SLOW_PER_S}"
    ) as process:
        said, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "not paired by request" in said


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("victim", "name"), [("worker", "worker 0"), ("gateway", "gateway")])
def test_a_server_that_dies_ends_the_run_with_what_it_has(victim: str, name: str, tmp_path: Path):
    folder, out = experiment_folder(tmp_path), tmp_path / "results"
    workload = ("workload.num_requests=2000", "workload.output_tokens=64")
    sets = [part for setting in ("warmup_requests=0", *workload) for part in ("--set", setting)]
    with runner("run", folder, "--out", out, *sets) as process:
        servers = serving_below(out / "mini", "point-000-repeat-0.part", num_requests=1)
        os.kill(next(pid for pid, command in servers.items() if command == victim), signal.SIGKILL)
        _, errors = process.communicate()
    run = the_run(out)
    why = f"{name} ended with code -9"
    assert process.returncode == 1
    assert errors.splitlines() == [
        f"moonshard experiment: incomplete: point-000-repeat-0: {why}",
        f"                      go on with: --resume {run}",
    ]
    told = json.loads((run / "run.json").read_text())
    assert told["state"] == told["points"][0]["state"] == "incomplete"
    assert [trial["state"] for trial in told["trials"]] == ["incomplete", "pending", "pending", "pending"]
    assert told["trials"][0]["why"] == why
    left = run / "point-000-repeat-0.incomplete"
    record = json.loads((left / "trial.json").read_text())
    rows = pl.read_parquet(left / "requests.parquet")
    assert rows.height == record["num_sent"] < record["num_planned"] == 2000
    failed = rows.filter(pl.col("outcome") != "completed")
    assert failed.height == record["num_failed"] > 0
    assert failed["error"].null_count() == 0
    assert all_end(list(servers))
    assert not started(run)


@pytest.mark.timeout(300)
def test_a_server_that_runs_already_is_measured_over_grpc_and_missed_when_it_is_gone(tmp_path: Path):
    folder, out = experiment_folder(tmp_path), tmp_path / "results"
    config = load_experiment(folder).points[0].server
    assert config is not None
    arguments = ("run", folder, "--out", out, "--set", "repeats=1")
    with deployed(config, os.environ) as deployment:
        url = deployment.server.grpc
        with runner(*arguments, "--url", f"grpc://{url}") as process:
            _, errors = process.communicate()
        assert process.returncode == 0, errors
    run = load_run(the_run(out))
    assert run.record.url == f"grpc://{url}"
    assert not any(key.startswith("server.") for key in run.record.points[0].settings)
    assert len({trial.record.workload["seed"] for trial in run.trials.values()} - {0, 1}) == 2
    for trial in run.trials.values():
        assert trial.requests["outcome"].to_list() == ["completed"] * 10
        assert trial.requests["cached_tokens"].sum() == 0
        assert trial.record.server_cpu_s == {}
    with runner(*arguments, "--url", url) as process:
        _, errors = process.communicate()
    assert process.returncode == 1
    assert "incomplete: point-000-repeat-0: " in errors
