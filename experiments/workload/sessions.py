"""Sessions of turns, played by clients that think in between: agents that resend a growing context."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from moonshard.experiments.workload.plan import Planned, Tokens, Workload, WorkloadError, check


def sessions(
    prompts: Sequence[Sequence[Sequence[int]]],
    *,
    max_tokens: int,
    num_clients: int,
    mean_think_s: float,
    seed: int = 0,
) -> Workload:
    """Sessions, each the prompts of its turns: a turn is sent after the one before and some thought.

    A client begins its next session when its last one is over.
    """
    if not mean_think_s >= 0 or num_clients < 1:
        raise WorkloadError("mean_think_s begins at 0, num_clients at 1")
    random = Random(seed)
    requests: list[Planned] = []
    last_of: dict[int, int] = {}  # the number of each client's last request
    for number, turns in enumerate(prompts):
        client = number % num_clients
        for turn, prompt in enumerate(turns):
            pause_s = random.expovariate(1 / mean_think_s) if mean_think_s and client in last_of else 0.0
            planned = Planned(
                prompt=Tokens(tuple(prompt)), max_tokens=max_tokens, session=f"session {number}", turn=turn, at_s=0.0
            )
            if client in last_of:
                planned = replace(planned, at_s=None, after=last_of[client], pause_s=pause_s)
            last_of[client] = len(requests)
            requests.append(planned)
    check(requests)
    return Workload(requests=requests)
