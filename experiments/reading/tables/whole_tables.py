"""How polars shows frames in a notebook. By default it is ten rows, and a table of points that is cut hides points."""

import polars as pl

MAX_ROWS = 100  # a table of points has less, a frame of requests more


def show_whole_tables() -> None:
    """From now on polars shows, in this process, all columns, texts to 200 characters, and up to MAX_ROWS rows."""
    pl.Config.set_tbl_rows(MAX_ROWS)
    pl.Config.set_tbl_cols(-1)
    pl.Config.set_tbl_width_chars(-1)
    pl.Config.set_fmt_str_lengths(200)
