"""The options that commands share."""

import difflib
import inspect
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import tyro

from moonshard.serving.config.keys import Config, ConfigError
from moonshard.serving.config.reading import load_config, nearest_keys
from moonshard.serving.observe.spans.environment import with_environment


def optional_argument(metavar: str) -> Any:
    """Of an option that may be left out, and whose help then says what happens: not that it would be None."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


Overrides = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY=VALUE")]
File = Annotated[Path | None, optional_argument("FILE")]
ApiKey = Annotated[
    str | None,
    tyro.conf.arg(metavar="KEY", help="What the server knows you by; by default the variable MOONSHARD_API_KEY."),
]
API_KEY_VARIABLE = "MOONSHARD_API_KEY"
StatusFd = Annotated[
    int | None,
    tyro.conf.arg(
        metavar="N", help="Where a supervisor listens: an inherited file descriptor to write status events to."
    ),
]
OrdersFd = Annotated[
    int | None,
    tyro.conf.arg(
        metavar="N", help="Where a supervisor tells what has changed: an inherited file descriptor to read events from."
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigOptions:
    """Where the configuration comes from."""

    config: File = None
    """A TOML file. Without one every key has its default, and the embedded model is served. `moonshard keys` lists the
    keys with their defaults and meanings."""

    set: Overrides = ()
    """Set one key, for example --set decode.max_slots=32. The value is TOML, or else a string. May be repeated."""

    def load(self) -> Config:
        return with_environment(load_config(self.config, self.set), os.environ)


def api_key_of(given: str | None) -> str | None:
    """The key given on the command line, else the environment's. ConfigError for what no header can carry."""
    name, key = ("--api-key", given) if given is not None else (API_KEY_VARIABLE, os.environ.get(API_KEY_VARIABLE))
    if not key:
        return None
    if not (key.isascii() and key.isprintable()):  # not quoted: it is a secret
        raise ConfigError([f"{name}: expected printable ASCII"])
    return key


Configured = Annotated[ConfigOptions, tyro.conf.arg(name="")]  # its options without a prefix


def check_options(command: Callable[..., int], arguments: Sequence[str]) -> None:
    """ConfigError for an option that a command with a configuration does not have: most likely a key is meant."""
    parameters = inspect.signature(command).parameters
    if not any(parameter.annotation is Configured for parameter in parameters.values()):
        return
    by_place = {name for name, each in parameters.items() if tyro.conf.Positional in get_args(each.annotation)}
    names = {name.replace("_", "-") for name in {*parameters, "config", "set", "help"} - by_place}
    known = names | {f"no-{name}" for name in names}
    given = (argument[2:].partition("=")[0] for argument in arguments if argument.startswith("--") and argument != "--")
    unknown = [name for name in given if name.replace("_", "-") not in known]
    misplaced = [_misplaced(name, command.__name__) for name in unknown if name in by_place]
    if faults := [*misplaced, *(_unknown(name, known) for name in unknown if name not in by_place)]:
        raise ConfigError(faults)


def _misplaced(option: str, command: str) -> str:
    return f"--{option}: it is given without a name: moonshard {command} {option.upper()}"


def _unknown(option: str, known: Collection[str]) -> str:
    if near := difflib.get_close_matches(option, known, n=1, cutoff=0.75):
        return f"--{option}: there is no such option; did you mean --{near[0]}?"
    keys = nearest_keys(option.replace("-", "_"))
    if not keys:
        return (
            f"--{option}: there is no such option; keys are set with --set KEY=VALUE, and `moonshard keys` lists them"
        )
    meant = " or ".join(f"--set {key}=VALUE" for key in keys)
    return f"--{option}: there is no such option; did you mean {meant}? `moonshard keys` lists all keys"
