"""Parts of tables as Parquet files: written whole or not at all, and read back as one table.

A part gets its name when the kernel has all of it, so that a reader never sees half a file and a killed process leaves
at most a `.tmp` that nobody reads. The disk is not waited for: a machine that loses its power may leave a part that is
not whole, which a reader refuses by its name. When a part is written, and by which thread, is `recorder`'s.
"""

import contextlib
import io
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonshard.serving.observe.rows.schema import VERSION, Column, ColumnKind, Table, TableRow, Value

if TYPE_CHECKING:
    import polars as pl


class PartsError(ValueError):
    """A folder whose parts cannot be read as a table; the message names it."""


class OtherVersion(PartsError):
    """A part was written by another version of the tables."""


def load_polars() -> None:
    """Import it now, with one thread of its own: what is written beside a server must not take its cores.

    Only who records or reads a recording needs it; it takes 50 MB.
    """
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    import polars as _  # noqa: F401


def encode_part(table: Table, columns: Sequence[list[Value]], origin: TableRow) -> bytes:
    """A Parquet file of these columns, with `origin` in each row.

    Python's lock is given up after each column: whoever serves waits for one column's conversion, never for a part's.
    """
    import polars as pl

    series = []
    for column, values in zip(table.columns, columns, strict=True):
        series.append(_series(column, values))
        time.sleep(0)
    frame = pl.DataFrame(series)
    constants = zip(table.all_columns[len(table.columns) :], origin, strict=True)
    frame = frame.with_columns(pl.lit(value, _dtypes()[column.kind]).alias(column.name) for column, value in constants)
    out = io.BytesIO()
    frame.write_parquet(out)
    return out.getvalue()


def without_unfit(table: Table, columns: Sequence[list[Value]]) -> Sequence[list[Value]]:
    """The rows without those that `encode_part` refuses, because a column cannot hold their values."""
    unfit = {
        index
        for column, values in zip(table.columns, columns, strict=True)
        if not _fits(column, values)
        for index, value in enumerate(values)
        if not _fits(column, [value])
    }
    return [[value for index, value in enumerate(values) if index not in unfit] for values in columns]


def write_part(path: Path, data: bytes) -> None:
    """All of it, or nothing and OSError. The folder is made where it is missing; only its owner may read the file."""
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        temporary.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def check_writable(folder: Path) -> None:
    """OSError where no part can be written to it. It is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def read_table(folder: Path, table: Table) -> "pl.DataFrame":
    """All parts that are there now, in no order of time; no rows where there are none.

    Raises:
        OtherVersion: a part is of another version of the tables. PartsError: it is no part of this table.
    """
    import polars as pl

    paths = sorted((folder / table.name).glob("*.parquet"))
    parts = [part for path in paths if (part := _read_part(path, table)) is not None]
    return pl.concat(parts) if parts else empty_table(table)


def _read_part(path: Path, table: Table) -> "pl.DataFrame | None":
    """None where its process, which may be running, has deleted it meanwhile.

    A version's columns grow in number only: of an optional one that was added later nothing is known.
    """
    import polars as pl

    try:
        part = pl.read_parquet(path)
    except FileNotFoundError:
        return None
    except (OSError, pl.exceptions.PolarsError) as error:
        raise PartsError(f"{path}: {error}") from error
    if others := set(part.get_column("version", default=pl.Series([])).unique()) - {VERSION}:
        raise OtherVersion(f"{path}: its tables are of version {', '.join(map(str, others))}, and this is {VERSION}")
    later = [column for column in table.columns if column.is_optional and column.name not in part.columns]
    part = part.with_columns(pl.lit(None, _dtypes()[column.kind]).alias(column.name) for column in later)
    schema = _schema(table)
    if any(part.schema.get(name) != dtype for name, dtype in schema.items()):
        raise PartsError(f"{path}: its columns are not those of {table.name}")
    return part.select(list(schema))


def empty_table(table: Table) -> "pl.DataFrame":
    """A table with these columns and no rows."""
    import polars as pl

    return pl.DataFrame(schema=_schema(table))


def _schema(table: Table) -> Mapping[str, Any]:
    return {column.name: _dtypes()[column.kind] for column in table.all_columns}


def _series(column: Column, values: list[Value]) -> "pl.Series":
    """Lists are made once for each that differs: polars is slow with them, and steps have few different ones."""
    import polars as pl

    dtype = _dtypes()[column.kind]
    if column.kind != "ints":
        return pl.Series(column.name, values, dtype=dtype)
    distinct = {value: index for index, value in enumerate(dict.fromkeys(values))}
    return pl.Series(column.name, list(distinct), dtype=dtype).gather([distinct[value] for value in values])


def _fits(column: Column, values: list[Value]) -> bool:
    try:
        _series(column, values)
    except Exception:  # whatever polars says of it, in any of its words
        return False
    return True


def _dtypes() -> Mapping[ColumnKind, Any]:
    import polars as pl

    return {"text": pl.String, "int": pl.Int64, "float": pl.Float64, "bool": pl.Boolean, "ints": pl.List(pl.Int64)}
