"""Drives a scheduler by hand, one launch and one completion at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from moonshard.kv.blocks import BlockPool
from moonshard.serving.control.batching.scheduler import Scheduler, SchedulerConfig
from moonshard.serving.control.drafting.drafter import CanVerify
from moonshard.serving.control.plan import DecodePlan, Delivered, Plan, PrefillChunk, PrefillPlan, Sampled
from moonshard.serving.control.request import Request, SequenceId
from moonshard.serving.control.sampling_parameters import Sampling

BLOCK_SIZE = 16
STOP = 99


def a_scheduler(num_partitions: int = 1, num_blocks: int = 64, **changes: float) -> Scheduler:
    return one_that_verifies(lambda num_rows: True, num_partitions, num_blocks, **changes)


def one_that_verifies(
    can_verify: CanVerify, num_partitions: int = 1, num_blocks: int = 64, **changes: float
) -> Scheduler:
    config = SchedulerConfig(
        slots_per_partition=4,
        chunk_tokens=64,
        max_context_tokens=1024,
        max_queued_requests=100,
        queue_timeout_s=30.0,
        has_prefix_cache=False,
    )
    pool = BlockPool(num_partitions, num_blocks, BLOCK_SIZE)
    return Scheduler(replace(config, **changes), pool, lambda request, choice: Guesser(), can_verify=can_verify)


class WithoutModel:
    """The part of a drafter that has no model."""

    @property
    def num_right(self) -> float:
        return 0.0

    @property
    def num_ahead(self) -> int:
        return 0

    def watch(self, generated: Sequence[int], most: int) -> None:
        raise AssertionError("it is always eager")

    def take_guesses(self, num_generated: int, guesses: tuple[int, ...]) -> None:
        raise AssertionError("nobody asked a model")


class Guesser(WithoutModel):
    """Always guesses as many tokens as a row may have."""

    @property
    def is_eager(self) -> bool:
        return True

    def propose(self, generated: Sequence[int], most: int) -> tuple[int, ...]:
        return (0,) * most

    def note(self, num_guessed: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_guessed


def a_request(
    name: str,
    num_prompt: int,
    max_tokens: int = 8,
    *,
    n: int = 1,
    min_tokens: int = 0,
    penalty: float = 0.0,
    priority: int = 0,
) -> Request:
    return Request(
        id=name.encode(),
        prompt=tuple(range(num_prompt)),
        sampling=Sampling(presence_penalty=penalty),
        stop_token_ids=frozenset({STOP}),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        n=n,
        priority=priority,
    )


def lease(scheduler: Scheduler, num_blocks: int, partition: int = 0) -> tuple[int, ...]:
    """Takes blocks as a handoff in progress does."""
    blocks = scheduler._pool.lease(partition, num_blocks)
    assert blocks is not None
    return blocks


def give_back(scheduler: Scheduler, blocks: tuple[int, ...], partition: int = 0) -> None:
    scheduler._pool.land(partition, blocks)
    scheduler._pool.release(partition, blocks)


def join(
    scheduler: Scheduler, request: Request, tokens: tuple[int, ...] | None = None, partition: int = 0
) -> tuple[int, ...]:
    """A request whose prompt landed in fresh blocks, which are returned; without `tokens` all choices go on."""
    blocks = lease(scheduler, -(-len(request.prompt) // BLOCK_SIZE), partition)
    scheduler._pool.land(partition, blocks)
    scheduler.join(request, partition, blocks, (7,) * request.n if tokens is None else tokens)
    return blocks


def drawn(plan: Plan) -> list[SequenceId]:
    match plan:
        case PrefillPlan():
            return [id for chunk in plan.chunks for id, _ in chunk.samples]
        case DecodePlan():
            return [row.sequence for row in plan.rows]
        case _:
            return []


def finish(scheduler: Scheduler, plan: Plan, token: int = 7) -> Delivered:
    return scheduler.complete(plan.number, {id: Sampled((token,)) for id in drawn(plan)})


def launch(scheduler: Scheduler) -> Plan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def launch_prefill(scheduler: Scheduler) -> PrefillPlan:
    plan = launch(scheduler)
    assert isinstance(plan, PrefillPlan)
    return plan


def launch_decode(scheduler: Scheduler) -> DecodePlan:
    plan = launch(scheduler)
    assert isinstance(plan, DecodePlan)
    return plan


def steps(scheduler: Scheduler, token: int = 7) -> Iterator[Plan]:
    """Runs steps one after the other, each completed before the next is launched."""
    while (plan := scheduler.schedule()) is not None:
        yield plan
        finish(scheduler, plan, token)


def chunks(plans: list[Plan]) -> list[PrefillChunk]:
    return [chunk for plan in plans if isinstance(plan, PrefillPlan) for chunk in plan.chunks]


def names(plan: Plan) -> list[str]:
    items = plan.chunks if isinstance(plan, PrefillPlan) else plan.rows if isinstance(plan, DecodePlan) else ()
    return [item.sequence.request_id.decode() for item in items]
