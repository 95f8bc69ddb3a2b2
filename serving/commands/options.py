"""The options that commands share."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from moonshard.serving.config import Config
from moonshard.serving.config_file import load_config
from moonshard.serving.telemetry.environment import with_environment

Overrides = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY=VALUE")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
StatusFd = Annotated[
    int | None,
    tyro.conf.arg(
        metavar="N", help="Where a supervisor listens: an inherited file descriptor to write status events to."
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigOptions:
    """Where the configuration comes from."""

    config: File = None
    """A TOML file. Without one every key has its default, and the embedded model is served."""

    set: Overrides = ()
    """Set one key, for example --set decode.max_slots=32. The value is TOML, or else a string. May be repeated."""

    def load(self) -> Config:
        return with_environment(load_config(self.config, self.set), os.environ)


Configured = Annotated[ConfigOptions, tyro.conf.arg(name="")]  # its options without a prefix
