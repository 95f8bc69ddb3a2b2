"""What an engine tells of its steps, and to whom.

Everything is told on the event loop. A listener may call the engine back, from any event: what can be launched then is
launched when the step that is being launched has been.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from moonshard.serving.control.batching.queue import Rejected
from moonshard.serving.control.plan import Plan, PrefillPlan
from moonshard.serving.control.request import Output
from moonshard.serving.engine.clocks import Phases
from moonshard.serving.engine.device import StepDone


class Emitted(NamedTuple):
    """An output, with the phases it closed: on a sequence's first token and on its last. Made for every token."""

    output: Output
    phases: Phases | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """What one step produced, and which requests ended with it."""

    number: int
    emitted: tuple[Emitted, ...]
    ended: tuple[bytes, ...]


class EngineEvents(Protocol):
    """Whoever hears of an engine's steps. An error in any of them is a fault of the engine."""

    def before_prefill(self, plan: PrefillPlan, /) -> None:
        """A prefill step is about to be launched: an export made now runs before it."""

    def on_prefill(self, plan: PrefillPlan, /) -> None:
        """A prefill step was launched: an export made now runs right behind it."""

    def on_step(self, report: StepReport, /) -> None:
        """A step that gave tokens is done, and the next has been launched."""

    def on_turned_down(self, request_id: bytes, error: Rejected, /) -> None:
        """A request waited too long for its first step, or cannot keep to its grammar, and is gone."""

    def on_done(self, done: StepDone, plan: Plan | None, /) -> None:
        """Any step is done, told last of all: with its plan, or None for an export and a land."""


class NoEvents(EngineEvents):
    """Hears everything and does nothing; a listener to some events derives from it."""
