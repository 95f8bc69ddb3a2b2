"""What a prefill worker publishes after which step, and when it says that a handoff is over."""

from moonshard.kv.blocks import BlockPool
from moonshard.kv.prefix import PrefixCache
from moonshard.serving.control.handoff.messages import (
    Cause,
    CopyIn,
    Drained,
    Failed,
    FirstTokens,
    Grant,
    Manifest,
    Stop,
    Target,
    Write,
)
from moonshard.serving.control.handoff.prefill import PrefillSide
from moonshard.serving.control.handoff.publications import Over, PublicationAction, Publications, Tell, prefill_of
from moonshard.serving.control.plan import PrefillChunk, PrefillPlan
from moonshard.serving.control.request import FinishReason, Output, Request, SequenceId, SlotId

P_EPOCH, D_EPOCH = 1, 2
BLOCK_SIZE = 4
LEASE_S = 20.0


class Bench:
    def __init__(self, num_cells: int = 8):
        self.pool = BlockPool(1, 8, BLOCK_SIZE)
        self.slab = BlockPool(1, num_cells, 1)
        side = PrefillSide(P_EPOCH, self.pool, self.slab, quarantine_s=60.0)
        self.publications = Publications[str](side, pool=self.pool, cache=PrefixCache(self.pool))

    def begin(self, number: int, num_blocks: int, *, owner: str = "link", n: int = 1, max_tokens: int = 8) -> Request:
        request = Request(id=handoff(number), prompt=(0,) * num_blocks * BLOCK_SIZE, max_tokens=max_tokens, n=n)
        target = Target(
            handoff=request.id,
            epoch=D_EPOCH,
            writer_epoch=P_EPOCH,
            session="d",
            partition=0,
            num_blocks=num_blocks,
            num_blocks_held=0,
            grants=tuple(Grant(cell, cell) for cell in range(num_blocks)),
            lease_s=LEASE_S,
        )
        self.publications.begin(target, request, owner, 0.0)
        return request

    def step(self, *chunks: PrefillChunk, now_s: float = 0.0) -> tuple[PublicationAction[str], ...]:
        plan = PrefillPlan(number=0, chunks=chunks)
        return (*self.publications.launching(plan, now_s), *self.publications.launched(plan))

    def publish(self, copy: CopyIn) -> tuple[PublicationAction[str], ...]:
        (write,) = self.publications.staged(copy.ticket)
        assert isinstance(write, Write)
        return self.publications.written(write.ticket, tuple(0 for _ in write.cells))

    def allocate(self, num_blocks: int) -> tuple[int, ...]:
        blocks = self.pool.allocate(0, num_blocks)
        assert blocks is not None
        return blocks

    @property
    def is_slab_free(self) -> bool:
        return self.slab.counts(0).free == self.slab.blocks_per_partition


def handoff(number: int) -> bytes:
    return bytes([number]) * 16


def a_chunk(request: Request, blocks: tuple[int, ...], start: int, end: int) -> PrefillChunk:
    """Of tokens from `start` to `end`; the last of a prompt draws the first token of each choice."""
    sequence, slot = SequenceId(request.id, 0), SlotId(0, 0)
    is_last = end == len(request.prompt)
    samples = tuple((SequenceId(request.id, choice), SlotId(0, choice)) for choice in range(request.n))
    return PrefillChunk(
        sequence=sequence,
        request=prefill_of(request),
        slot=slot,
        start=start,
        tokens=(0,) * (end - start),
        block_table=blocks,
        samples=samples if is_last else (),
    )


def an_output(request: Request, choice: int = 0, finish: FinishReason | None = FinishReason.LENGTH) -> Output:
    return Output(sequence=SequenceId(request.id, choice), token_ids=(7 + choice,), finish=finish)


def copied(actions: tuple[PublicationAction[str], ...]) -> list[int]:
    return [block for action in actions if isinstance(action, CopyIn) for block, _ in action.pairs]


def told(actions: tuple[PublicationAction[str], ...]) -> list[object]:
    return [action.message for action in actions if isinstance(action, Tell)]


def test_blocks_are_copied_behind_the_step_that_completes_them_and_a_partly_filled_one_waits():
    bench = Bench()
    request, blocks = bench.begin(1, 3), bench.allocate(3)
    assert copied(bench.step(a_chunk(request, blocks, 0, 6))) == [blocks[0]]
    assert copied(bench.step(a_chunk(request, blocks, 6, 12))) == [*blocks[1:]]


def test_what_earlier_steps_wrote_is_copied_before_the_step_and_what_this_one_writes_behind_it():
    bench = Bench()
    first, second = bench.begin(1, 2), bench.begin(2, 3)
    blocks = bench.allocate(4)
    shared = (*blocks[:2], blocks[2])
    plan = PrefillPlan(number=0, chunks=(a_chunk(first, shared[:2], 4, 8), a_chunk(second, shared, 8, 12)))
    before = bench.publications.launching(plan, 0.0)
    assert copied(before) == [shared[0], shared[0]]  # each one's own: block 1 is what the step writes for the first
    assert copied(bench.publications.launched(plan)) == [shared[1], shared[1], shared[2]]


def test_the_first_tokens_of_all_choices_are_told_together_and_a_cut_one_has_not_ended():
    bench = Bench()
    request = bench.begin(1, 1, n=2)
    bench.step(a_chunk(request, bench.allocate(1), 0, 4))
    assert bench.publications.emitted(an_output(request, 0)) == ()
    (first,) = told(bench.publications.emitted(an_output(request, 1)))
    assert isinstance(first, FirstTokens)
    assert (first.tokens, first.is_finished) == ((7, 8), False)


def test_first_tokens_that_end_the_request_say_so():
    for finish, max_tokens in ((FinishReason.STOP, 8), (FinishReason.LENGTH, 1)):
        bench = Bench()
        request = bench.begin(1, 1, max_tokens=max_tokens)
        bench.step(a_chunk(request, bench.allocate(1), 0, 4))
        (first,) = told(bench.publications.emitted(an_output(request, finish=finish)))
        assert isinstance(first, FirstTokens)
        assert first.is_finished


def test_a_handoff_is_over_when_all_was_published_and_told_in_either_order():
    for is_told_first in (False, True):
        bench = Bench()
        request = bench.begin(1, 1)
        (copy,) = bench.step(a_chunk(request, bench.allocate(1), 0, 4))
        assert isinstance(copy, CopyIn)
        actions = [bench.publications.emitted(an_output(request))] if is_told_first else []
        actions.append(bench.publish(copy))
        if not is_told_first:
            actions.append(bench.publications.emitted(an_output(request)))
        *before, over = [action for each in actions for action in each]
        assert over == Over(request.id, is_done=True)
        assert not any(isinstance(action, Over) for action in before)
        assert {type(message) for message in told(tuple(before))} == {FirstTokens, Manifest}
        assert bench.is_slab_free
        assert bench.publications.num_handoffs == 0


def test_what_is_given_up_stops_its_prefill_and_tells_no_first_tokens():
    bench = Bench()
    request = bench.begin(1, 2)
    (copy,) = bench.step(a_chunk(request, bench.allocate(2), 0, 4))
    assert isinstance(copy, CopyIn)
    assert bench.publications.cancel(request.id, D_EPOCH, "link") == (Stop(handoff=request.id),)
    assert bench.publications.emitted(an_output(request)) == ()
    drained = Drained(handoff=request.id, writer_epoch=P_EPOCH, target_epoch=D_EPOCH)
    assert bench.publications.staged(copy.ticket) == (Tell("link", drained), Over(request.id, is_done=False))
    assert bench.is_slab_free


def test_what_is_given_up_before_its_first_step_is_drained_at_once():
    bench = Bench()
    request = bench.begin(1, 2)
    drained = Drained(handoff=request.id, writer_epoch=P_EPOCH, target_epoch=D_EPOCH)
    expected = (Stop(handoff=request.id), Tell("link", drained), Over(request.id, is_done=False))
    assert bench.publications.cancel(request.id, D_EPOCH, "link") == expected
    assert bench.publications.cancel(request.id, D_EPOCH, "other") == (Tell("other", drained),)


def test_what_another_says_of_a_handoff_changes_nothing():
    bench = Bench()
    request = bench.begin(1, 2)
    assert bench.publications.cancel(request.id, D_EPOCH, "other") == ()
    assert bench.publications.give_up(request.id, "other") == ()
    assert bench.publications.close("other") == ()
    assert not bench.publications.is_of(request.id, "other")
    assert bench.publications.is_of(request.id, "link")


def test_a_lease_counts_from_the_run_and_not_from_the_first_step():
    bench = Bench()
    request = bench.begin(1, 2)
    bench.step(a_chunk(request, bench.allocate(2), 0, 4), now_s=15.0)
    assert told(bench.publications.expire(LEASE_S - 0.1)) == []
    failed = Failed(handoff=request.id, epoch=P_EPOCH, cause=Cause.LEASE)
    assert failed in told(bench.publications.expire(LEASE_S))


def test_of_all_that_expires_at_once_none_is_published_further():
    """Stopping one lets the engine launch another's next step, which must not be published then."""
    bench = Bench()
    requests = [bench.begin(number, 2) for number in (1, 2)]
    tables = [bench.allocate(2) for _ in requests]
    bench.step(*(a_chunk(request, table, 0, 4) for request, table in zip(requests, tables, strict=True)))
    bench.publications.expire(LEASE_S)
    assert bench.step(*(a_chunk(r, t, 4, 8) for r, t in zip(requests, tables, strict=True))) == ()


def test_a_turned_down_prefill_leaves_nothing():
    bench = Bench()
    request = bench.begin(1, 2)
    assert bench.publications.withdraw(request.id) == "link"
    assert bench.publications.num_handoffs == 0
    assert not bench.publications.is_being_given_up(request.id)
    bench.begin(1, 2, owner="other")
    assert bench.publications.is_of(request.id, "other")
