"""What runs the leader's steps: its own programs, and before each launch the word to the others. Needs jax."""

from dataclasses import replace

import numpy as np

from moonshard.rpc import link_pb2
from moonshard.serving.engine.programs import Drawn, Launched, Programs
from moonshard.serving.engine.steps import Step
from moonshard.serving.gang.leader import Gang
from moonshard.serving.gang.steps import KnownMasks, StepChain, digest_of, step_message


class GangExecutor:
    """Runs the leader's own steps, each told to all followers before it is launched. For the device thread."""

    def __init__(self, programs: Programs, gang: Gang):
        self._programs = programs
        self._gang = gang
        self._chain = StepChain()

    def launch(self, step: Step) -> Launched:
        """As `Programs.launch`, but what masks wait for is waited for before the forward pass: they are told, too."""
        if step.allowed is not None:
            step = replace(step, allowed=KnownMasks(step.allowed()))
        message = step_message(step)
        self._chain.seal(message)
        self._gang.tell(link_pb2.LeaderMessage(step=message))
        return self._programs.launch(step)

    def fetch(self, launched: Launched) -> Drawn | np.ndarray | None:
        """As `Programs.fetch`."""
        if launched.step.sampling is not None:
            self._gang.drew(launched.step.number, digest_of(np.asarray(launched.results[0])))
        return self._programs.fetch(launched)
