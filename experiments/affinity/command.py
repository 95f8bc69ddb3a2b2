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

from moonshard.experiments.affinity.report import grid_of
from moonshard.experiments.affinity.rounds import Round
from moonshard.experiments.affinity.run import ARMS, Plan, run_round
from moonshard.experiments.affinity.workload import agent_sessions
from moonshard.experiments.bench.grid import Grid, as_markdown, as_table
from moonshard.experiments.bench.machine import describe_commit, describe_machine, describe_versions
from moonshard.experiments.bench.server import HANDED_OVER, ServerFailed
from moonshard.experiments.pocket.corpus import pocket_text
from moonshard.rpc.status import RequestError
from moonshard.serving.commands.options import Overrides
from moonshard.serving.config_file import load_config

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
