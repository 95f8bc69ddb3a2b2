"""`moonshard trace`."""

import sys
from pathlib import Path
from typing import Annotated

import tyro

from moonshard.serving.config.keys import ConfigError


def trace(folder: Annotated[Path, tyro.conf.Positional], out: Path = Path("trace.json")) -> int:
    """Draw what a server recorded as one time line: gateway, prefill, transfer and decode.

    Open the file at https://ui.perfetto.dev or in chrome://tracing. A server that still runs may go on recording.

    Args:
        folder: as `trace.path` of the configuration names it.
        out: the JSON file to write.
    """
    import msgspec

    from moonshard.serving.observe.rows.parts import PartsError, load_polars, read_table
    from moonshard.serving.observe.rows.schema import REQUESTS, STEPS
    from moonshard.serving.observe.rows.timeline import timeline

    load_polars()
    try:
        requests, steps = (read_table(folder, table) for table in (REQUESTS, STEPS))
    except PartsError as error:
        raise ConfigError([str(error)]) from error
    if requests.is_empty() and steps.is_empty():
        raise ConfigError([f"{folder}: nothing is recorded there"])
    drawn = timeline(requests.iter_rows(named=True), steps.iter_rows(named=True))
    try:
        out.write_bytes(msgspec.json.encode(drawn))
    except OSError as error:
        raise ConfigError([f"--out {out}: {error.strerror}"]) from error
    sys.stdout.write(f"{requests.height} requests and {steps.height} steps in {out}\n")
    return 0
