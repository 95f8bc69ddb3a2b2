"""Where a command's `--json` goes: tried before the work begins, written when the table has been printed already."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from moonshard.serving.config.keys import ConfigError


def check_writable(out: Path) -> None:
    """Fails before the questions are asked, rather than after them. A full disk shows only then."""
    place = out if os.path.exists(out) else out.parent  # Path.exists raises for a name that is too long
    if os.path.isdir(out) or not os.access(place, os.W_OK):
        raise ConfigError([f"--json {out}: cannot be written"])


def write_json(out: Path, told: Any) -> bool:
    """Writes the JSON and says whether it could; if not, it says so on stderr, since the table is printed already."""
    try:
        out.write_text(json.dumps(told, indent=1) + "\n")
    except OSError as error:
        sys.stderr.write(f"moonshard: --json {out}: {error.strerror}\n")
        return False
    return True
