"""`moonshard experiment`: run an experiment's sweep, and compare two runs."""

import sys
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from moonshard.experiments.common.fields import ExperimentError
from moonshard.experiments.common.grid import Grid, as_markdown, as_table
from moonshard.experiments.common.signals import Interrupted, interrupting
from moonshard.experiments.runner.experiment import Experiment, load_experiment
from moonshard.experiments.runner.run import RunIncomplete, run_all
from moonshard.experiments.runner.run_folder import RunFolder, explained, new_run, resumed_run
from moonshard.experiments.runner.run_record import code_changes
from moonshard.experiments.runner.target import grpc_address
from moonshard.experiments.workload.plan import WorkloadError
from moonshard.serving.commands.options import ApiKey, Overrides, api_key_of

INTERRUPTED = 130  # the exit code of what Ctrl-C ends
PIPED_WIDTH = 200  # characters; a terminal has its own


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Run the sweep of an experiment's config.toml, and leave OUT/NAME/STAMP."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Where config.toml is: experiments/studies/NAME."""

    url: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None
    """The gRPC address of a server that runs already. Without it each trial starts its own."""

    api_key: ApiKey = None

    set: Overrides = ()
    """Set one key, for example --set workload.rate_per_s=2 or --set server.decode.max_slots=4. May be repeated."""

    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("results")
    """Where runs go."""

    resume: Annotated[Path | None, tyro.conf.arg(metavar="STAMP")] = None
    """Go on with this run, at the first trial that is not done: its folder, or its name under OUT/NAME."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compare:
    """What changed from run A to run B, with 95% intervals: latencies, rates, SLO attainment, good requests a second.

    Refused where the two measured different things, unless that is meant. Whether B is better is said from three
    repeats on.
    """

    folders: Annotated[tuple[Path, Path], tyro.conf.Positional]
    """A's folder and B's: results/NAME/STAMP. The same one twice, with --a and --b, compares two of its points."""

    a: Overrides = ()
    """Only the points of A that have this value, for example --a server.mode=aggregated. May be repeated."""

    b: Overrides = ()
    """Likewise of B. What --a and --b name may differ between the two."""

    despite: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY")] = ()
    """A key, or a table, that may differ as well, for example --despite machine.cpu. May be repeated."""

    seed: int = 0
    """Of the resampling that gives a single repeat its intervals."""

    json_file: Annotated[Path | None, tyro.conf.arg(name="json", metavar="OUT")] = None
    """Also write the differences here."""


def experiment(action: Annotated[Run | Compare, tyro.conf.arg(name="")]) -> int:
    """Run an experiment's sweep over a workload, or compare two runs with intervals."""
    try:
        return run_command(action) if isinstance(action, Run) else compare_command(action)
    except (ExperimentError, WorkloadError) as error:
        _complain(str(error))
        return 2
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED


def run_command(options: Run) -> int:
    """The exit code: 1 for an incomplete run, 130 or 143 for one that a signal ended. All of these can be resumed.

    ExperimentError or WorkloadError for what the user can mend.
    """
    if options.url is not None:
        grpc_address(options.url)
    asked = replace(
        load_experiment(options.folder, options.set, options.url),
        api_key=None if options.url is None else api_key_of(options.api_key),  # a server of our own asks for none
    )
    console = _console()
    with _folder(options, asked) as folder:
        console.print(f"run: {folder.path}", soft_wrap=True, highlight=False)
        if changes := code_changes(folder.record.starts):
            _complain(f"not all of this run is measured with the same code: {'; '.join(changes)}")
        try:
            with interrupting():
                run_all(asked, folder, console)
                grids = _summarised(folder.path)
        except (RunIncomplete, Interrupted) as error:
            with suppress(RunIncomplete, ExperimentError):  # what is told of is why the run ended
                _summarised(folder.path)
            _complain(f"incomplete: {explained(error)}\ngo on with: --resume {folder.path}")
            return error.exit_code if isinstance(error, Interrupted) else 1
    for grid in grids:
        console.print(as_table(grid))
    return 0


def _complain(text: str) -> None:
    sys.stderr.write("moonshard experiment: " + text.replace("\n", "\n                      ") + "\n")


def _summarised(path: Path) -> tuple[Grid, ...]:
    """Reads the run's tables and writes summary.md. RunIncomplete where it cannot be written."""
    from moonshard.experiments.reading.report import run_grids
    from moonshard.experiments.reading.tables.frames import load_run

    grids = run_grids(load_run(path))
    try:
        (path / "summary.md").write_text("\n\n".join(map(as_markdown, grids)) + "\n")
    except OSError as error:
        raise RunIncomplete(f"{path / 'summary.md'}: {error.strerror}") from error
    return grids


def compare_command(options: Compare) -> int:
    """Prints how two runs differ. ExperimentError where they measured different things."""
    from moonshard.experiments.reading.tables.comparing import compare, write_rows
    from moonshard.experiments.reading.tables.matching import choice

    a, b = options.folders
    chosen = choice("--a", options.a), choice("--b", options.b)
    grid, rows = compare(a, b, *chosen, options.despite, seed=options.seed)
    if options.json_file is not None:
        write_rows(options.json_file, rows)
    _console().print(as_table(grid))
    return 0


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)


def _folder(options: Run, asked: Experiment) -> AbstractContextManager[RunFolder]:
    if options.resume is None:
        return new_run(options.out, asked)
    named = options.out / asked.name / options.resume
    return resumed_run(options.resume if (options.resume / "run.json").is_file() else named, asked)


if __name__ == "__main__":
    sys.exit(tyro.cli(experiment, prog="moonshard experiment"))
