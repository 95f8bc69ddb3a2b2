"""Rows written to part files are read back unchanged; parts of another table or version are refused by name."""

from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonshard.serving.observe.rows.origin import this_process
from moonshard.serving.observe.rows.parts import OtherVersion, PartsError, encode_part, read_table, write_part
from moonshard.serving.observe.rows.schema import (
    ORIGIN,
    REQUESTS,
    STEPS,
    TABLES,
    TOKENS,
    VERSION,
    Column,
    ColumnKind,
    Table,
    TableRow,
    Value,
)

_VALUES: dict[ColumnKind, st.SearchStrategy] = {
    "text": st.text(st.characters(exclude_categories=["Cs"])),
    "int": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "ints": st.lists(st.integers(0, 2**31)).map(tuple),
}


def rows_of(table: Table) -> st.SearchStrategy[list[TableRow]]:
    cells = (_VALUES[c.kind] | st.none() if c.is_optional else _VALUES[c.kind] for c in table.columns)
    return st.lists(st.tuples(*cells), max_size=5)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_rows_come_back_as_they_were(table: Table, tmp_path_factory: pytest.TempPathFactory):
    @settings(max_examples=30, deadline=None)
    @given(rows=rows_of(table))
    def check(rows: list[TableRow]):
        folder = tmp_path_factory.mktemp("recording")
        columns: list[list[Value]] = [[row[index] for row in rows] for index in range(len(table.columns))]
        origin = this_process().row()
        write_part(folder / table.name / "part.parquet", encode_part(table, columns, origin))
        expected = [[list(v) if isinstance(v, tuple) else v for v in (*row, *origin)] for row in rows]
        for frame in (pl.read_parquet(folder / table.name / "*.parquet"), read_table(folder, table)):
            assert frame.columns == [column.name for column in table.all_columns]
            assert [list(row) for row in frame.iter_rows()] == expected

    check()


def test_parts_of_another_table_are_refused_and_no_parts_are_no_rows(tmp_path: Path):
    assert read_table(tmp_path, STEPS).schema == read_table(tmp_path / "none", STEPS).schema
    assert read_table(tmp_path, REQUESTS).is_empty()
    write_part(tmp_path / "steps" / "part.parquet", encode_part(TOKENS, [[], [], [], []], this_process().row()))
    with pytest.raises(PartsError, match="not those of steps"):
        read_table(tmp_path, STEPS)
    (tmp_path / "steps" / "part.parquet").write_bytes(b"PAR1")
    with pytest.raises(PartsError, match=r"part\.parquet"):
        read_table(tmp_path, STEPS)


def test_a_part_that_is_deleted_while_the_others_are_read_is_no_fault(tmp_path: Path):
    columns: list[list[Value]] = [["a"], [0], [1], [2]]
    write_part(tmp_path / "tokens" / "1.parquet", encode_part(TOKENS, columns, this_process().row()))
    (tmp_path / "tokens" / "2.parquet").symlink_to(tmp_path / "gone")  # it has a name, and nothing behind it
    assert read_table(tmp_path, TOKENS)["index"].to_list() == [1]


def versioned(version: int) -> TableRow:
    return (*this_process().row()[:-1], version)


def test_parts_of_another_version_are_refused_by_their_name(tmp_path: Path):
    columns: list[list[Value]] = [["a"], [0], [1], [2]]
    write_part(tmp_path / "tokens" / "own.parquet", encode_part(TOKENS, columns, this_process().row()))
    assert read_table(tmp_path, TOKENS).height == 1
    write_part(tmp_path / "tokens" / "later.parquet", encode_part(TOKENS, columns, versioned(VERSION + 1)))
    with pytest.raises(OtherVersion, match=rf"later\.parquet: .*version {VERSION + 1}, and this is {VERSION}"):
        read_table(tmp_path, TOKENS)


def test_an_optional_column_that_was_added_later_is_null_in_older_parts(tmp_path: Path):
    older = Table("tokens", TOKENS.columns)
    newer = Table("tokens", (*TOKENS.columns, Column("place", "int", is_optional=True)))
    demanding = Table("tokens", (*TOKENS.columns, Column("place", "int")))
    columns: list[list[Value]] = [["a"], [0], [1], [2]]
    write_part(tmp_path / "tokens" / "1.parquet", encode_part(older, columns, this_process().row()))
    write_part(tmp_path / "tokens" / "2.parquet", encode_part(newer, [*columns, [5]], this_process().row()))
    assert read_table(tmp_path, newer)["place"].to_list() == [None, 5]
    assert read_table(tmp_path, older).columns == [column.name for column in older.all_columns]
    with pytest.raises(PartsError, match=r"1\.parquet"):
        read_table(tmp_path, demanding)


def test_the_origin_has_the_columns_of_its_table():
    assert len(this_process().row()) == len(ORIGIN)
