"""What runs the leader's steps: its own programs, and before each launch the word to the others. Needs jax."""

from dataclasses import replace

import numpy as np

from moonshard.rpc import link_pb2
from moonshard.serving.engine.programs import Drawn, Launched, Programs
from moonshard.serving.engine.steps import Step
from moonshard.serving.gang.leader import Gang
from moonshard.serving.gang.steps import StepChain, ToldMasks, digest_of, masks_message, step_message


class GangExecutor:
    """Runs the leader's own steps, each told to all followers before it is launched. For the device thread."""

    def __init__(self, programs: Programs, gang: Gang):
        self._programs = programs
        self._gang = gang
        self._chain = StepChain()

    def launch(self, step: Step) -> Launched:
        """As `Programs.launch`."""
        message = step_message(step)
        self._chain.seal(message)
        self._gang.tell(link_pb2.LeaderMessage(step=message))
        if step.allowed is not None:
            step = replace(step, allowed=ToldMasks(step.allowed, self._tell_masks))
        return self._programs.launch(step)

    def _tell_masks(self, words: np.ndarray) -> None:
        message = masks_message(words)
        self._chain.seal(message)
        self._gang.tell(link_pb2.LeaderMessage(masks=message))

    def fetch(self, launched: Launched) -> Drawn | np.ndarray | None:
        """As `Programs.fetch`."""
        step = launched.step
        fetched = self._programs.fetch(launched)
        self._gang.done(step.number, b"" if step.sampling is None else digest_of(np.asarray(launched.results[0])))
        return fetched
