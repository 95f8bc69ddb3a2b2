"""`moonshard ledger`, as a user runs it."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from moonshard.serving.cli import main
from moonshard.serving.gateway.records.accounts.ledger import Ledger
from tests.serving.gateway.records.test_ledger import ROW


def a_ledger(path: Path) -> Path:
    ledger = Ledger(path)
    ledger.start()
    for number, (tenant, day, session) in enumerate(
        (("a", "01", "s"), ("b", "01", "t"), ("a", "02", "s"), ("a", "02", ""))
    ):
        ledger.add(
            replace(ROW, request_id=str(number), tenant=tenant, ended_at=f"2026-11-{day}T00:00:00Z", session=session)
        )
    ledger.close()
    return path


@pytest.mark.parametrize(
    ("by", "requests"),
    [
        ("tenant", {("a",): 3, ("b",): 1}),
        ("day", {("2026-11-01",): 2, ("2026-11-02",): 2}),
        ("session", {("s",): 2, ("t",): 1, ("",): 1}),
        ("tenant, day", {("a", "2026-11-01"): 1, ("a", "2026-11-02"): 2, ("b", "2026-11-01"): 1}),
    ],
)
def test_it_sums_by_what_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str], by: str, requests: dict):
    file, out = a_ledger(tmp_path / "ledger"), tmp_path / "out.json"
    assert main(["ledger", str(file), "--by", by, "--json", str(out)]) == 0
    names = [name.strip() for name in by.split(",")]
    found = {tuple(record[name] for name in names): record for record in json.loads(out.read_text())}
    assert {key: record["requests"] for key, record in found.items()} == requests
    for key, record in found.items():
        assert record["prompt_tokens"] == 100 * requests[key]
        assert record["cached_tokens"] == 64 * requests[key]
        assert record["usd"] == requests[key] / 10  # and not 0.30000000000000004
    assert "requests" in capsys.readouterr().out


def test_several_files_are_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    files = [str(a_ledger(tmp_path / name)) for name in ("one", "two")]
    assert main(["ledger", *files]) == 0
    assert "600" in capsys.readouterr().out  # prompt tokens of tenant a


def test_what_cannot_be_summed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "broken").write_text("{}\n")
    for arguments, said in (
        ([], "no ledger is named"),
        (["--by", "week", "x"], "--by week: expected some of tenant, session, day"),
        ([str(tmp_path / "none")], "none: No such file"),
        ([str(tmp_path / "broken")], "broken, line 1: "),
    ):
        assert main(["ledger", *arguments]) == 2
        assert said in capsys.readouterr().err


def test_names_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "odd").write_text(json.dumps(asdict(ROW) | {"tenant": "[/b] :warning:"}) + "\n")
    assert main(["ledger", str(tmp_path / "odd")]) == 0
    assert "[/b] :warning:" in capsys.readouterr().out
