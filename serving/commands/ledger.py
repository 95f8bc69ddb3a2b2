"""`moonshard ledger`."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from moonshard.serving.config.keys import ConfigError
from moonshard.serving.gateway.records.accounts.ledger import LedgerError, LedgerRow, read_ledger

GROUPS: Mapping[str, Callable[[LedgerRow], str]] = {
    "tenant": lambda row: row.tenant,
    "session": lambda row: row.session,
    "day": lambda row: row.day,
}

USD_DIGITS = 9  # a thousandth of what a token costs at a dollar a million; what is beyond them is a sum of floats' own


@dataclass(slots=True)
class Sum:
    """Over some rows."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    usd: float = 0.0

    def add(self, row: LedgerRow) -> None:
        self.requests += 1
        self.prompt_tokens += row.prompt_tokens
        self.cached_tokens += row.cached_tokens
        self.completion_tokens += row.completion_tokens
        self.usd += row.usd


def ledger(
    files: Annotated[tuple[Path, ...], tyro.conf.Positional],
    by: Annotated[str, tyro.conf.arg(metavar="tenant,session,day")] = "tenant",
    json_file: Annotated[Path | None, tyro.conf.arg(name="json", metavar="OUT")] = None,
) -> int:
    """Sum what requests used and what it costs, over the ledgers of one gateway or of several.

    Args:
        files: as `gateway.ledger` of the configuration names them.
        by: what to sum by; several, separated by commas.
        json_file: also write the sums here.
    """
    names = [name.strip() for name in by.split(",")]
    if unknown := [name for name in names if name not in GROUPS]:
        raise ConfigError([f"--by {unknown[0]}: expected some of {', '.join(GROUPS)}"])
    if not files:
        raise ConfigError(["no ledger is named: give one or more files"])
    sums = sum_by(names, (row for file in files for row in _rows(file)))
    sys.stdout.write(_table(names, sums))
    if json_file is not None:
        records = [
            dict(zip(names, key, strict=True)) | asdict(own) | {"usd": round(own.usd, USD_DIGITS)}
            for key, own in sorted(sums.items())
        ]
        try:
            json_file.write_text(json.dumps(records, indent=1) + "\n")
        except OSError as error:
            raise ConfigError([f"--json {json_file}: {error.strerror}"]) from error
    return 0


def sum_by(names: Iterable[str], rows: Iterable[LedgerRow]) -> dict[tuple[str, ...], Sum]:
    groups, sums = [GROUPS[name] for name in names], dict[tuple[str, ...], Sum]()
    for row in rows:
        sums.setdefault(tuple(group(row) for group in groups), Sum()).add(row)
    return sums


def _rows(file: Path) -> Iterable[LedgerRow]:
    try:
        yield from read_ledger(file)
    except OSError as error:
        raise ConfigError([f"{file}: {error.strerror}"]) from error
    except LedgerError as error:
        raise ConfigError([str(error)]) from error


def _table(names: list[str], sums: Mapping[tuple[str, ...], Sum]) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in ("requests", "prompt tokens", "of these cached", "completion tokens", "USD"):
        table.add_column(name, justify="right", no_wrap=True)
    for key in sorted(sums):
        own = sums[key]
        counts = (own.requests, own.prompt_tokens, own.cached_tokens, own.completion_tokens)
        table.add_row(*key, *(f"{count:,}" for count in counts), f"{own.usd:,.6f}")
    console = Console(width=200, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
