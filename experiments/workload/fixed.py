"""Fresh prompts of one length: summarising, generating, and what lies between."""

from collections.abc import Iterable
from random import Random

from moonshard.experiments.workload.arrivals import arrivals
from moonshard.experiments.workload.blocks import BlockPrompt
from moonshard.experiments.workload.plan import Planned, Prompt, Workload, WorkloadError


def fixed(
    *,
    prompt_tokens: int,
    output_tokens: int,
    num_requests: int,
    vocab_size: int,
    rate_per_s: float | None = None,
    interval_cv: float = 1.0,
    num_clients: int = 1,
    seed: int = 0,
) -> Workload:
    """An open loop where there is a rate, else `num_clients` clients that wait for their answers."""
    if min(prompt_tokens, output_tokens, num_requests, num_clients) < 1:
        raise WorkloadError("prompt_tokens, output_tokens, num_requests and num_clients begin at 1")
    prompts = [
        BlockPrompt(
            blocks=(number,), num_tokens=prompt_tokens, block_tokens=prompt_tokens, vocab_size=vocab_size, seed=seed
        )
        for number in range(num_requests)
    ]
    if rate_per_s is None:
        return closed(prompts, output_tokens, num_clients)
    times = arrivals(rate_per_s, interval_cv, num_requests, Random(seed))
    return Workload(
        requests=[
            Planned(prompt=prompt, max_tokens=output_tokens, at_s=at_s)
            for prompt, at_s in zip(prompts, times, strict=True)
        ]
    )


def closed(prompts: Iterable[Prompt], max_tokens: int, num_clients: int) -> Workload:
    """Each client sends its next request when its last one has ended."""
    requests = [
        Planned(prompt=prompt, max_tokens=max_tokens, at_s=0.0)
        if number < num_clients
        else Planned(prompt=prompt, max_tokens=max_tokens, after=number - num_clients)
        for number, prompt in enumerate(prompts)
    ]
    return Workload(requests=requests)
