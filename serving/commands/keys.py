"""`moonshard keys`."""

import sys
from typing import Annotated

import tyro

from moonshard.serving.config.keys import ConfigError


def keys(prefix: Annotated[str, tyro.conf.Positional] = "") -> int:
    """List the configuration's keys, each with its default and meaning, as a TOML file may have them.

    Args:
        prefix: only the keys that begin like this, for example gateway or kv.slab.
    """
    from moonshard.serving.config.listing import as_lines, listed_keys
    from moonshard.serving.config.reading import did_you_mean, nearest_keys

    found = listed_keys(prefix)
    if not found:
        raise ConfigError([f"{prefix}: no key begins like this" + did_you_mean(nearest_keys(prefix))])
    sys.stdout.write("\n".join(as_lines(found)) + "\n")
    return 0
