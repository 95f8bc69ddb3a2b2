"""`moonshard affinity`: what session affinity and the prefix index are worth, on real processes."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from moonshard.experiments.affinity.figures import (
    MAX_LOAD,
    MAX_POINTS_BELOW_ORACLE,
    MIN_TIMES_FASTER,
    ArmFigures,
    figures,
)
from moonshard.experiments.affinity.run import ARMS, Plan, Round, run_round
from moonshard.experiments.affinity.workload import agent_sessions
from moonshard.experiments.bench.grid import Grid, as_markdown, as_table, number
from moonshard.experiments.bench.machine import describe_commit, describe_machine, describe_versions
from moonshard.experiments.bench.server import HANDED_OVER, ServerFailed
from moonshard.experiments.bench.transport_rows import verdict
from moonshard.experiments.pocket.corpus import pocket_text
from moonshard.rpc.status import RequestError
from moonshard.serving.commands.options import Overrides
from moonshard.serving.config_file import load_config

COLUMNS = (
    "arm",
    "turns",
    "found again",
    "points below the oracle",
    "load, max / mean",
    "TTFT p50 of first turns, ms",
    "TTFT p50 of later turns, ms",
    "p90, ms",
    "`random` / this",
)
DEFAULT = Plan()


def affinity(
    sessions: int = DEFAULT.num_sessions,
    rounds: int = DEFAULT.rounds,
    seed: int = 0,
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("results/affinity"),
    set: Overrides = (),
) -> int:
    """Agents' sessions over three prefill workers: chosen at random, by a session's header, and by policy `cost`.

    Args:
        sessions: how many are played in each round.
        rounds: how often each arm is run, from empty caches.
        seed: of the sessions; another gives others.
        out: where every turn goes as JSON, and the table as Markdown.
        set: a key of the server's configuration, as for `moonshard serve`. May be repeated.
    """
    for option, value in (("--sessions", sessions), ("--rounds", rounds)):
        if value < 1:
            sys.stderr.write(f"moonshard affinity: {option} {value}: expected at least 1\n")
            return 2
    plan = Plan(num_sessions=sessions, rounds=rounds, seed=seed)
    config = load_config(None, (HANDED_OVER, *set))
    console = Console(width=None if sys.stdout.isatty() else 170)
    played = agent_sessions(pocket_text(), plan.num_sessions, plan.session_tokens, seed=plan.seed)
    found: list[Round] = []
    try:
        for index in range(plan.rounds):
            for arm in ARMS:
                console.print(f"[dim]round {index + 1} of {plan.rounds}: {arm}[/dim]")
                found.append(run_round(config, plan, arm, index, played, os.environ))
    except (ServerFailed, RequestError) as error:
        sys.stderr.write(f"moonshard affinity: {error}\n")
        return 1
    grid = grid_of(found)
    console.print(as_table(grid))
    console.print(f"written: {_write(out, plan, found, grid)}", soft_wrap=True)
    return 0


def grid_of(rounds: Sequence[Round]) -> Grid:
    """A row for each arm, and the bars of `cost`."""
    by_arm = {arm: figures(arm, rounds) for arm in ARMS}
    base = by_arm["random"].later_ttft_p50_ms
    rows = tuple(_row(found, base / found.later_ttft_p50_ms) for found in by_arm.values())
    cost = by_arm["cost"]
    bars = (
        (
            f"within {MAX_POINTS_BELOW_ORACLE:g} points of the oracle",
            cost.points_below_oracle <= MAX_POINTS_BELOW_ORACLE,
        ),
        (f"load at most {MAX_LOAD:g}", cost.load_max_over_mean <= MAX_LOAD),
        (f"TTFT {MIN_TIMES_FASTER:g} times lower than `random`", base / cost.later_ttft_p50_ms >= MIN_TIMES_FASTER),
    )
    notes = ("Bars of `cost`: " + ", ".join(f"{what}: {verdict(is_held)}" for what, is_held in bars) + ".",)
    return Grid(title="Agents' sessions, three prefill workers", columns=COLUMNS, rows=rows, notes=notes)


def _row(found: ArmFigures, times_faster: float) -> tuple[str, ...]:
    return (
        f"`{found.arm}`",
        f"{found.num_turns:,}",
        f"{found.hit_rate:.1%}",
        f"{found.points_below_oracle:.1f}",
        f"{found.load_max_over_mean:.2f}",
        number(found.first_ttft_p50_ms),
        number(found.later_ttft_p50_ms),
        number(found.later_ttft_p90_ms),
        f"{times_faster:.2f}",
    )


def _write(folder: Path, plan: Plan, rounds: Sequence[Round], grid: Grid) -> Path:
    """The JSON's path; the table as Markdown lies beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    told = {
        "commit": describe_commit(),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "plan": asdict(plan),
        "rounds": [asdict(replace(one, turns=[asdict(turn) for turn in one.turns])) for one in rounds],
    }
    path = folder / "affinity.json"
    path.write_text(json.dumps(told) + "\n")
    path.with_suffix(".md").write_text(as_markdown(grid) + "\n")
    return path
