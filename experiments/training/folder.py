"""A run's folder: made where there is none, and one run's at a time.

Two runs in one folder would remove each other's checkpoints and mix their lines. The lock is the operating system's, on
an open file: it goes with the process, however that ends, so that a file which a killed run left locks nobody out.
Readers (`export`, `report`) do not ask for it.
"""

import fcntl
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from moonshard.experiments.training.run.recipe import RunFailed

LOCK = "lock"


@contextmanager
def claim(folder: Path) -> Generator[None]:
    """Makes the folder and locks it. RunFailed where it cannot be written, or another run holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("ab")
    except OSError as error:
        raise RunFailed(f"{folder}: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunFailed(f"{folder}: another run is at work in this folder; give --out another one") from error
        except OSError as error:
            raise RunFailed(f"{folder / LOCK}: {error.strerror or error}") from error
        yield
