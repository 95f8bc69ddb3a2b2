"""Rows for every request, step and start, as Parquet files. Begin with `schema`, the columns, and `recorder`."""
