"""The `moonshard` command line: finds the command, and turns start-up errors into one message and exit code 2.

Commands of experiments come through the entry-point group `moonshard.commands`, so that nothing here imports an
experiment. A command's module is imported only when the command is named, and the built-in ones import what is heavy
only when they run: jax takes longer to import than help may take to appear.
"""

import ast
import difflib
import functools
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points, version
from importlib.util import find_spec
from pathlib import Path

import tyro

from moonshard.serving.commands.options import check_options
from moonshard.serving.deploy.startup import STARTUP_EXIT_CODE, startup_message

ENTRY_POINT_GROUP = "moonshard.commands"
Command = Callable[..., int]

BUILT_IN = tuple(
    EntryPoint(name=name, value=f"moonshard.serving.commands.{module}:{name}", group=ENTRY_POINT_GROUP)
    for module, *names in (
        ("serve", "serve"),
        ("processes.gateway", "gateway"),
        ("processes.roles", "prefill", "decode", "worker"),
        ("processes.store", "store"),
        ("kubernetes.manifests", "manifests"),
        ("kubernetes.probe", "probe"),
        *((name, name) for name in ("keys", "chat", "score", "convert", "budget", "experts", "ledger", "trace")),
    )
    for name in names
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. 2 for what the user can mend, 130 for Ctrl-C."""
    try:
        argv = sys.argv[1:] if argv is None else argv
        is_built_in = bool(argv) and argv[0] in {point.name for point in BUILT_IN}
        return run(argv, built_in() if is_built_in else found_commands())
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, ExceptionGroup) as error:
        message = startup_message(error)
        if message is None:
            raise
        sys.stderr.write("moonshard: " + message.replace("\n", "\n           ") + "\n")
        return STARTUP_EXIT_CODE


def run(argv: Sequence[str], commands: dict[str, EntryPoint]) -> int:
    """The command that `argv` names, with the rest of `argv`. SystemExit after help or for bad usage."""
    name, arguments = (argv[0], argv[1:]) if argv else ("", [])
    if name in commands:
        command = commands[name].load()
        check_options(command, arguments)
        return tyro.cli(_interruptible(command), prog=f"moonshard {name}", args=arguments)
    return _show_commands(name, commands)


def _interruptible(command: Command) -> Command:
    """The same, with Python's handler of Ctrl-C, which the process's entry has put aside."""

    @functools.wraps(command)
    def run_command(*args: object, **kwargs: object) -> int:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return command(*args, **kwargs)

    return run_command


def found_commands() -> dict[str, EntryPoint]:
    """Every command by name: the built-in ones, which none can replace, then the installed ones."""
    installed = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name)
    own = built_in()
    return own | {point.name: point for point in installed if point.name not in own}


def built_in() -> dict[str, EntryPoint]:
    """The built-in commands by name: what a server's processes are, which need not look what else is installed."""
    return {point.name: point for point in BUILT_IN}


def _show_commands(name: str, commands: dict[str, EntryPoint]) -> int:
    """Help for `--help` or nothing at all, the version, else what `name` may have meant."""
    if name in ("", "-h", "--help"):
        sys.stdout.write(help_text(commands))
        return 0 if name else STARTUP_EXIT_CODE
    if name == "--version":
        sys.stdout.write(f"moonshard {version('moonshard')}\n")
        return 0
    near = difflib.get_close_matches(name, commands, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(commands)}"
    sys.stderr.write(f"moonshard: unknown command {name!r}; {hint}\n")
    return STARTUP_EXIT_CODE


def help_text(commands: dict[str, EntryPoint]) -> str:
    """The commands, each with the first line of its docstring."""
    width = max(map(len, commands))
    lines = [f"  {name:{width}}  {_summary(point)}" for name, point in commands.items()]
    return "\n".join(["usage: moonshard COMMAND [options]", "", *lines, "", "moonshard COMMAND --help tells more.", ""])


def _summary(point: EntryPoint) -> str:
    """The first line of the command's docstring, read from its source: an experiment may import anything at its top."""
    spec = find_spec(point.module)
    if spec is None or spec.origin is None:
        return "(not found)"
    for node in ast.parse(Path(spec.origin).read_bytes()).body:
        if isinstance(node, ast.FunctionDef) and node.name == point.attr:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""


if __name__ == "__main__":
    sys.exit(main())
