"""What a process that runs steps on a device sets of its own interpreter: a worker, or a member of its gang."""

import sys

from moonshard.serving.deploy.heap import share_one_arena

# The device threads hold Python's lock for microseconds, the event loop for milliseconds: at the default of 5 ms a step
# that is done waits for the loop. Side by side on two cores, 8 streams gave 1.4 to 1.6 times the tokens per second.
SWITCH_INTERVAL_S = 0.0002


def begin_device_process() -> None:
    """Called once, while there is only one thread."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    share_one_arena()
