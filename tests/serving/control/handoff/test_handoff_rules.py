"""Rules of a handoff that only a rare schedule would break, each on its own."""

import itertools
from dataclasses import replace

from moonshard.kv.blocks import BlockPool
from moonshard.serving.control.handoff.decode import DecodeSide, DecodeSideConfig
from moonshard.serving.control.handoff.gateway import GatewaySide, Outcome, SendDecode, SendPrefill
from moonshard.serving.control.handoff.messages import (
    Cancel,
    Cause,
    CopyIn,
    CopyOut,
    Credits,
    Drained,
    Failed,
    FirstTokens,
    Grant,
    Join,
    Manifest,
    Reserve,
    Start,
    Target,
)
from moonshard.serving.control.handoff.prefill import PrefillSide
from moonshard.serving.control.request import Request

P_EPOCH, D_EPOCH = 1, 2
HANDOFF = bytes(16)
RESERVE = Reserve(handoff=HANDOFF, writer_epoch=P_EPOCH, lease_s=100.0)
CONFIG = DecodeSideConfig(session="d", lease_s=20.0, quarantine_s=60.0, max_cells_per_handoff=2)


class Decode:
    """A decode side with one reservation of a prompt of one block."""

    def __init__(self) -> None:
        self.slab = BlockPool(1, 4, 1)
        self.side = DecodeSide(CONFIG, D_EPOCH, BlockPool(1, 4, 16), self.slab)
        target = self.reserve()
        assert isinstance(target, Target)
        self.start = Start(handoff=HANDOFF, tokens=(7,), last=manifest(target))

    def reserve(self) -> Target | None:
        return self.side.reserve(RESERVE, Request(id=HANDOFF, prompt=(0,), max_tokens=1), 0, (), now_s=0.0)

    @property
    def num_quarantined(self) -> int:
        return self.slab.counts(0).quarantined


def manifest(target: Target) -> Manifest:
    return Manifest(
        handoff=HANDOFF,
        writer_epoch=P_EPOCH,
        target_epoch=target.epoch,
        blocks=(0,),
        grants=target.grants,
        checksums=(0,),
        is_last=True,
    )


def test_a_manifest_of_another_epoch_is_nobodys():
    decode = Decode()
    for other in ({"writer_epoch": 9}, {"target_epoch": 9}):
        stray = replace(decode.start.last, **other)
        assert decode.side.landed(stray, 0.0) == ()
        assert decode.side.start(replace(decode.start, last=stray), 0.0) == ()
    assert isinstance(decode.side.landed(decode.start.last, 0.0)[0], CopyOut)


def test_a_handoff_that_has_joined_is_not_reserved_again():
    decode = Decode()
    (copy,) = decode.side.start(decode.start, 0.0)
    assert isinstance(copy, CopyOut)
    assert isinstance(decode.side.verified(copy.ticket, True, 0.0)[-1], Join)
    assert decode.reserve() is None


def a_held_prompt() -> tuple[DecodeSide, BlockPool, Target, Start]:
    """A decode side that holds both blocks of a prompt, and reserved for it without a free cell of the slab."""
    pool, slab = BlockPool(1, 4, 16), BlockPool(1, 1, 1)
    slab.lease(0, 1)
    held = pool.allocate(0, 2) or ()
    for block in held:
        pool.keep(0, block)
    pool.release(0, held[::-1])
    side = DecodeSide(CONFIG, D_EPOCH, pool, slab)
    request = Request(id=HANDOFF, prompt=(0,) * 32, max_tokens=2)
    target = side.reserve(RESERVE, request, 0, held, now_s=0.0)
    assert isinstance(target, Target)
    assert (target.num_blocks, target.num_blocks_held, target.grants) == (2, 2, ())
    last = replace(manifest(target), blocks=(), checksums=())
    return side, pool, target, Start(handoff=HANDOFF, tokens=(7,), last=last)


def test_of_a_prompt_that_is_held_nothing_moves_and_it_joins_with_what_is_held():
    side, pool, target, start = a_held_prompt()
    prefill = PrefillSide(P_EPOCH, BlockPool(1, 4, 16), BlockPool(1, 4, 1), quarantine_s=60.0)
    assert prefill.run(target, 0, 0.0)
    assert prefill.finished(HANDOFF, ((0, 0),)) == ()
    assert prefill.finished(HANDOFF, ((1, 1),)) == (start.last,)
    assert prefill.num_runs == 0
    (join,) = side.start(start, 0.0)
    assert isinstance(join, Join)
    assert join.block_table == (0, 1)
    assert pool.counts(0).used == 2


def test_a_prompt_that_is_held_is_given_back_when_its_handoff_is_given_up():
    for end in ("cancel", "expire", "corrupt"):
        side, pool, _, start = a_held_prompt()
        if end == "cancel":
            side.cancel(HANDOFF, 0.0)
        elif end == "expire":
            assert [action.cause for action in side.expire(20.0) if isinstance(action, Failed)] == [Cause.LEASE]
        else:
            unasked = replace(start.last, blocks=(0,), checksums=(0,))
            (failed,) = side.start(replace(start, last=unasked), 0.0)
            assert isinstance(failed, Failed)
        assert pool.counts(0).free == 4
        assert side.start(start, 0.0) == ()


def test_an_empty_manifest_completes_nothing_that_is_missing():
    decode = Decode()
    empty = replace(decode.start.last, blocks=(), grants=(), checksums=())
    (failed,) = decode.side.start(replace(decode.start, last=empty), 0.0)
    assert isinstance(failed, Failed)
    assert failed.cause is Cause.CORRUPT


def test_a_copy_of_a_reservation_given_up_does_not_serve_its_successor():
    decode = Decode()
    (copy,) = decode.side.start(decode.start, 0.0)
    assert isinstance(copy, CopyOut)
    decode.side.cancel(HANDOFF, 0.0)
    assert isinstance(decode.reserve(), Target)
    assert decode.side.verified(copy.ticket, True, 0.0) == ()


def test_quarantine_ends_only_by_the_writers_own_word_or_a_while_after_it_was_given_up():
    decode = Decode()
    decode.side.cancel(HANDOFF, 0.0)
    decode.side.drained(HANDOFF, writer_epoch=9)
    assert decode.num_quarantined == 1
    decode.side.expire(59.0)
    assert decode.num_quarantined == 1
    decode.side.expire(60.0)
    assert decode.num_quarantined == 0
    spoken = Decode()
    spoken.side.cancel(HANDOFF, 0.0)
    spoken.side.drained(HANDOFF, P_EPOCH)
    assert spoken.num_quarantined == 0


TARGET = Target(
    handoff=HANDOFF,
    epoch=D_EPOCH,
    writer_epoch=P_EPOCH,
    session="d",
    partition=0,
    num_blocks=3,
    num_blocks_held=0,
    grants=(),
    lease_s=20.0,
)
CREDITS = Credits(handoff=HANDOFF, target_epoch=D_EPOCH, grants=(Grant(0, 0),))
DRAINED = Drained(handoff=HANDOFF, writer_epoch=P_EPOCH, target_epoch=D_EPOCH)


def publishing() -> tuple[PrefillSide, int]:
    """A prefill side that stages one of three finished blocks, and the ticket of that."""
    pool = BlockPool(1, 4, 16)
    blocks = pool.allocate(0, 3) or ()
    side = PrefillSide(P_EPOCH, pool, BlockPool(1, 4, 1), quarantine_s=60.0)
    side.run(TARGET, 0, 0.0)
    assert side.finished(HANDOFF, enumerate(blocks)) == ()
    (stage,) = side.credits(CREDITS)
    assert isinstance(stage, CopyIn)
    return side, stage.ticket


def test_credits_said_twice_are_used_once():
    side, _ = publishing()
    assert side.credits(CREDITS) == ()


def test_a_cancelled_writer_is_drained_when_its_last_write_has_ended():
    side, ticket = publishing()
    side.staged(ticket)
    assert DRAINED not in side.cancel(HANDOFF, D_EPOCH)
    assert side.cancel(HANDOFF, D_EPOCH) == ()
    assert side.written(ticket, (0,)) == (DRAINED,)


def test_a_writer_whose_write_failed_is_never_drained_before_the_quarantine_ends():
    side, ticket = publishing()
    side.staged(ticket)
    assert DRAINED not in side.write_failed(ticket, 0.0)
    assert side.cancel(HANDOFF, D_EPOCH) == ()
    side.expire(60.0)
    assert side.cancel(HANDOFF, D_EPOCH) == (DRAINED,)


def test_a_failed_leg_cancels_both_and_ends_the_request_once():
    gateway = GatewaySide()
    gateway.begin(RESERVE, D_EPOCH, 0.0)
    gateway.target(TARGET)
    stray = FirstTokens(handoff=HANDOFF, writer_epoch=9, target_epoch=D_EPOCH, tokens=(1,))
    assert gateway.first_tokens(stray) == ()
    cancel = Cancel(handoff=HANDOFF, target_epoch=D_EPOCH)
    assert set(gateway.failed(Failed(handoff=HANDOFF, epoch=D_EPOCH, cause=Cause.CORRUPT))) == {
        SendPrefill(P_EPOCH, cancel),
        SendDecode(D_EPOCH, cancel),
        Outcome(HANDOFF, Cause.CORRUPT),
    }
    assert gateway.failed(Failed(handoff=HANDOFF, epoch=P_EPOCH, cause=Cause.CORRUPT)) == ()


def test_what_is_not_started_when_its_lease_ends_is_over_and_what_decodes_goes_on():
    for has_first_tokens, has_last in itertools.product((False, True), repeat=2):
        gateway = GatewaySide()
        gateway.begin(RESERVE, D_EPOCH, 0.0)
        gateway.target(TARGET)
        if has_first_tokens:
            gateway.first_tokens(FirstTokens(handoff=HANDOFF, writer_epoch=P_EPOCH, target_epoch=D_EPOCH, tokens=(1,)))
        if has_last:
            gateway.chunk(manifest(TARGET))
        assert gateway.expire(99.0) == ()
        is_started = has_first_tokens and has_last
        outcomes = [action for action in gateway.expire(100.0) if isinstance(action, Outcome)]
        assert outcomes == ([] if is_started else [Outcome(HANDOFF, Cause.LEASE)])
        assert gateway.num_handoffs == is_started


def test_a_worker_that_takes_nothing_now_counts_as_gone_and_another_refusal_ends_the_request():
    def outcome(epoch: int, *, is_for_now: bool) -> list[Outcome]:
        gateway = GatewaySide()
        gateway.begin(RESERVE, D_EPOCH, 0.0)
        actions = gateway.refused(HANDOFF, epoch, is_for_now=is_for_now)
        assert gateway.refused(HANDOFF, epoch, is_for_now=is_for_now) == ()
        return [action for action in actions if isinstance(action, Outcome)]

    assert outcome(D_EPOCH, is_for_now=True) == [Outcome(HANDOFF, Cause.DECODE_GONE)]
    assert outcome(P_EPOCH, is_for_now=True) == [Outcome(HANDOFF, Cause.PREFILL_GONE)]
    assert outcome(3, is_for_now=True) == []  # who has no part in it says nothing of it
    assert outcome(D_EPOCH, is_for_now=False) == [Outcome(HANDOFF, Cause.CANCELLED)]
