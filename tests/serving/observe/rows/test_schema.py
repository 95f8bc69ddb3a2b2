"""The document names the columns that there are, in their order, and no others."""

import re
from pathlib import Path

from moonshard.serving.observe.rows.schema import ORIGIN, PHASES, REQUESTS, TABLES, VERSION, Column

DOCUMENT = (Path(__file__).parents[4] / "experiments" / "SCHEMA.md").read_text()
_ROW = re.compile(r"^\| `(?P<name>\w+)` \| (?P<type>[a-z, ]+) \|(?P<unit>[^|]*)\|[^|]*\|$", re.MULTILINE)


def documented(title: str) -> list[tuple[str, str, str]]:
    (section,) = (part for part in DOCUMENT.split("\n## ") if part.startswith(f"{title}\n"))
    return [(row["name"], row["type"], row["unit"].strip()) for row in _ROW.finditer(section)]


def in_code(columns: tuple[Column, ...]) -> list[tuple[str, str, str]]:
    return [(c.name, f"{c.kind}, optional" if c.is_optional else c.kind, c.unit) for c in columns]


def test_every_column_is_documented_with_its_type_and_unit():
    assert documented("Every table") == in_code(ORIGIN)
    for table in TABLES:
        assert documented(table.name) == in_code(table.columns)


def test_units_are_those_of_names():
    for column in (*ORIGIN, *(column for table in TABLES for column in table.columns)):
        if column.unit:
            assert column.name.endswith(column.unit.split()[-1])
        assert column.name not in {c.name for c in ORIGIN} or column in ORIGIN


def test_the_phases_are_columns_and_the_version_is_documented():
    assert set(PHASES) <= {column.name for column in REQUESTS.columns}
    assert f"of these tables: {VERSION} |" in DOCUMENT
