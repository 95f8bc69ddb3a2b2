"""What `serve` tells the person who started it: a moving line on a terminal, plain lines elsewhere. All on stderr.

With `has_timings` also where the time of the start went, process by process, once all are ready.
"""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moonshard.serving.deploy.status_pipe import ProgressThrottle, describe
from moonshard.serving.deploy.timings import StartPhase, nested, phases_told


class TerminalReporter:
    """A supervisor's reporter. After `finish` the children's progress is no longer told, but their output is, and that
    a restarted child is ready.
    """

    def __init__(self, *, has_timings: bool = False) -> None:
        self._has_timings = has_timings
        self._timings: dict[str, Sequence[StartPhase]] = {}  # per child
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._status = self._console.status("starting")
        self._is_finished = False
        self._last: dict[str, str] = {}  # per child
        self._throttles: dict[str, ProgressThrottle] = {}  # likewise
        if self._console.is_terminal:
            self._status.start()

    def event(self, child: str, event: str, fields: Mapping[str, object]) -> None:
        if event == "failed":  # told once, by whoever decides what follows from it
            return
        if event == "timings":
            self._timings[child] = [*self._timings.get(child, ()), *phases_told(fields)]
            return
        if self._is_finished:
            if event == "ready":  # a child that was restarted serves again
                self.note(f"{child}: {describe(event, fields)}")
            return
        self._last[child] = describe(event, fields)
        if self._console.is_terminal:
            self._status.update(escape("  ".join(f"{name}: {text}" for name, text in self._last.items())))
        elif event != "progress" or self._throttles.setdefault(child, ProgressThrottle()).is_due(self._last[child]):
            self.note(f"{child}: {self._last[child]}")

    def line(self, child: str, text: str) -> None:
        self._console.print(f"[{child}] {text}", markup=False)

    def note(self, text: str) -> None:
        self._console.print(f"moonshard: {text}", markup=False)

    def finish(self) -> None:
        """Of what the moving line said, what a ready child has left open stays."""
        self._status.stop()
        if self._console.is_terminal and not self._is_finished:
            for child, text in self._last.items():
                if text.startswith("ready;"):
                    self.note(f"{child}: {text}")
        self._is_finished = True

    def show_timings(self, own: Sequence[StartPhase]) -> None:
        """`own`: the phases of this process."""
        if self._has_timings:
            for name, phases in {"serve": own, **self._timings}.items():
                self._console.print(_timings_table(name, phases))


def _timings_table(name: str, phases: Sequence[StartPhase]) -> Table:
    table = Table(title=f"start of {name}", title_justify="left", box=None, pad_edge=False)
    table.add_column("begun, s", justify="right")
    table.add_column("took, s", justify="right")
    table.add_column("phase")
    for phase, depth in nested(phases):
        name = "  " * depth + f"{phase.name} {phase.detail}".strip()
        table.add_row(f"{phase.begun_s:.2f}", f"{phase.took_s:.2f}", escape(name))
    return table
