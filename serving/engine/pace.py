"""How many steps the engine keeps in flight, from how long the last one took.

Which steps are measured is `engine`'s to say.
"""

from moonshard.serving.engine.busy import BusyTime
from moonshard.serving.engine.device import StepDone

MIN_IN_FLIGHT = 2  # one runs, one waits behind it
SHORT_STEP_NS = 5_000_000


class Pace:
    """On one stage two steps are in flight, or three while they are short.

    Two short steps may both end while the event loop sends the tokens of the one before, and the device would wait.
    Where steps are long the loop is always in time, and a third would delay a new request by its whole length. Side by
    side on two cores with steps of 0.3 to 1 ms, three gave 1.17, 1.03 and 1.07 times the tokens per second of 1, 8 and
    16 streams.
    """

    def __init__(self, num_stages: int = 1) -> None:
        """Each stage of a pipeline beyond the first adds one: it can run a step of its own."""
        self._min_in_flight = MIN_IN_FLIGHT + num_stages - 1
        self.max_in_flight = self._min_in_flight
        self._busy = BusyTime()

    def note(self, done: StepDone) -> None:
        length_ns = self._busy.added_ns(done.launched_ns, done.done_ns)
        self.max_in_flight = self._min_in_flight + (length_ns < SHORT_STEP_NS)

    def skip(self, done: StepDone) -> None:
        """A step is done that says nothing of the others' length; the next one began to run no sooner than now."""
        self._busy.added_ns(done.launched_ns, done.done_ns)
