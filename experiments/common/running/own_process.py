"""Asks a module of ours something in a process of its own: JSON in, JSON out."""

import subprocess
import sys
from collections.abc import Mapping

import msgspec


def ask[Found](module: str, job: object, found: type[Found], environment: Mapping[str, str]) -> Found:
    """What `python -m moonshard.<module>` says on stdout when it is given `job` on stdin.

    Raises:
        CalledProcessError: it failed. What it had to say stands on stderr.
    """
    ran = subprocess.run(
        [sys.executable, "-m", f"moonshard.{module}"],
        input=msgspec.json.encode(job),
        stdout=subprocess.PIPE,
        env=dict(environment),
        check=True,
    )
    return msgspec.json.decode(ran.stdout, type=found)
