"""The names of the routing policies, and the one number that they take: what a configuration says of them.

Reading a configuration, or showing help, needs these but not numpy, which `routing.policies` and `routing.router` load.
"""

from typing import Literal

PolicyName = Literal["cost", "affinity", "round_robin", "random", "least_tokens"]
QUEUE_WEIGHT = 0.1  # beside 1 of a token to be computed: see experiments/replay/README.md
