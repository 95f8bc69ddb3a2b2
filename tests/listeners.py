"""An engine's events as functions: a test names those it listens to."""

from collections.abc import Callable
from dataclasses import dataclass

from moonshard.serving.control.batching.queue import Rejected
from moonshard.serving.control.plan import Plan, PrefillPlan
from moonshard.serving.engine.device import StepDone
from moonshard.serving.engine.events import StepReport


def ignore(*_what: object) -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Listeners:
    before_prefill: Callable[[PrefillPlan], None] = ignore
    on_prefill: Callable[[PrefillPlan], None] = ignore
    on_step: Callable[[StepReport], None] = ignore
    on_turned_down: Callable[[bytes, Rejected], None] = ignore
    on_done: Callable[[StepDone, Plan | None], None] = ignore
