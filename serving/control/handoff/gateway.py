"""The gateway's side of handoffs: the two legs of a request, tied so that neither outlives the other.

A pure state machine with one verb per message. It carries the metadata between P and D and decides three things: when
decode starts (first tokens and last manifest are both here, before the lease ends), who is told when a leg fails (both,
at once), and the one outcome. Whoever speaks of a handoff that is over is told to cancel. The requests themselves go by
another way. What follows a failure is for the caller to decide from the outcome; another attempt is another handoff.
"""

from dataclasses import dataclass

from moonshard.serving.control.handoff.messages import (
    Cancel,
    Cause,
    CreditsHeader,
    Drained,
    Failed,
    Finished,
    FirstTokens,
    ManifestHeader,
    Reserve,
    Run,
    Start,
    TargetHeader,
    ToDecode,
    ToPrefill,
)


@dataclass(frozen=True, slots=True)
class SendPrefill:
    epoch: int
    message: ToPrefill


@dataclass(frozen=True, slots=True)
class SendDecode:
    epoch: int
    message: ToDecode


@dataclass(frozen=True, slots=True)
class Deliver:
    """The first tokens, to the client."""

    handoff: bytes
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A handoff is over. `cause` is None where its request finished."""

    handoff: bytes
    cause: Cause | None


type GatewayAction = SendPrefill | SendDecode | Deliver | Outcome


@dataclass(kw_only=True, slots=True)
class _Legs:
    handoff: bytes
    prefill_epoch: int
    decode_epoch: int
    lease_end_s: float
    is_running: bool = False  # Run was sent
    first_tokens: FirstTokens | None = None
    last: ManifestHeader | None = None

    @property
    def is_started(self) -> bool:
        return self.first_tokens is not None and self.last is not None


class GatewaySide:
    """The handoffs that one gateway began."""

    def __init__(self) -> None:
        self._legs: dict[bytes, _Legs] = {}

    @property
    def num_handoffs(self) -> int:
        return len(self._legs)

    def begin(self, reserve: Reserve, decode_epoch: int, now_s: float) -> tuple[GatewayAction, ...]:
        self._legs[reserve.handoff] = _Legs(
            handoff=reserve.handoff,
            prefill_epoch=reserve.writer_epoch,
            decode_epoch=decode_epoch,
            lease_end_s=now_s + reserve.lease_s,
        )
        return (SendDecode(decode_epoch, reserve),)

    # ---- what D says

    def target(self, target: TargetHeader) -> tuple[GatewayAction, ...]:
        legs = self._legs.get(target.handoff)
        if legs is None:
            # No Run was sent for it, or its legs were cancelled before: either way this P will not write.
            cancel = Cancel(handoff=target.handoff, target_epoch=target.epoch)
            unused = Drained(handoff=target.handoff, writer_epoch=target.writer_epoch, target_epoch=target.epoch)
            return (SendDecode(target.epoch, cancel), SendDecode(target.epoch, unused))
        if legs.is_running or target.epoch != legs.decode_epoch:
            return ()
        legs.is_running = True
        return (SendPrefill(legs.prefill_epoch, Run(target=target)),)

    def credits(self, credits: CreditsHeader) -> tuple[GatewayAction, ...]:
        legs = self._legs.get(credits.handoff)
        return () if legs is None else (SendPrefill(legs.prefill_epoch, credits),)

    def finished(self, finished: Finished) -> tuple[GatewayAction, ...]:
        legs = self._legs.get(finished.handoff)
        if legs is None or finished.epoch != legs.decode_epoch:
            return ()
        del self._legs[legs.handoff]
        return (Outcome(legs.handoff, None),)

    # ---- what P says

    def chunk(self, manifest: ManifestHeader) -> tuple[GatewayAction, ...]:
        """A manifest is passed on to D as Landed; the last one goes with Start."""
        legs = self._legs.get(manifest.handoff)
        if legs is None:
            return _cancel_stray(manifest)
        if not manifest.is_last:
            return (SendDecode(legs.decode_epoch, manifest),)
        if legs.last is not None or manifest.writer_epoch != legs.prefill_epoch:
            return ()
        legs.last = manifest
        return _start(legs)

    def first_tokens(self, first: FirstTokens) -> tuple[GatewayAction, ...]:
        """First tokens are delivered to the client at once: they never wait for the transfer."""
        legs = self._legs.get(first.handoff)
        if legs is None:
            return _cancel_stray(first)
        if legs.first_tokens is not None or first.writer_epoch != legs.prefill_epoch:
            return ()
        legs.first_tokens = first
        deliver = Deliver(first.handoff, first.tokens)
        return (deliver, *(self._end(legs, None) if first.is_finished else _start(legs)))

    def drained(self, drained: Drained) -> tuple[GatewayAction, ...]:
        """P has drained. D must be told, even when the handoff is over here."""
        return (SendDecode(drained.target_epoch, drained),)

    # ---- what ends a handoff early

    def failed(self, failed: Failed) -> tuple[GatewayAction, ...]:
        """A worker gave its leg up. Once decode was started P's failure no longer counts, since everything was
        published.
        """
        legs = self._legs.get(failed.handoff)
        if legs is None or failed.epoch not in _epochs(legs):
            return ()
        return self._end(legs, failed.cause)

    def refused(self, handoff: bytes, epoch: int, *, is_for_now: bool) -> tuple[GatewayAction, ...]:
        """A worker turned its part of a request down. One that takes nothing now counts as gone; any other refusal is
        about the request itself, which ends.
        """
        legs = self._legs.get(handoff)
        if legs is None or not is_for_now:
            return self.cancel(handoff)
        return self.failed(Failed(handoff=handoff, epoch=epoch, cause=_gone(legs, epoch)))

    def cancel(self, handoff: bytes) -> tuple[GatewayAction, ...]:
        """The client left."""
        legs = self._legs.get(handoff)
        return () if legs is None else self._end(legs, Cause.CANCELLED)

    def peer_gone(self, epoch: int) -> tuple[GatewayAction, ...]:
        """A worker process is gone, or its stream broke."""
        actions: list[GatewayAction] = []
        for legs in tuple(self._legs.values()):
            if epoch in _epochs(legs):
                actions += self._end(legs, _gone(legs, epoch))
        return tuple(actions)

    def expire(self, now_s: float) -> tuple[GatewayAction, ...]:
        """What was not started in time. A request that decodes may do so for ever."""
        actions: list[GatewayAction] = []
        for legs in tuple(self._legs.values()):
            if legs.lease_end_s <= now_s and not legs.is_started:
                actions += self._end(legs, Cause.LEASE)
        return tuple(actions)

    def _end(self, legs: _Legs, cause: Cause | None) -> tuple[GatewayAction, ...]:
        """Cancels both legs. A P that was never asked cannot write, so D need not wait until it has drained."""
        del self._legs[legs.handoff]
        cancel = Cancel(handoff=legs.handoff, target_epoch=legs.decode_epoch)
        if legs.is_running:
            leg = SendPrefill(legs.prefill_epoch, cancel)
        else:
            unused = Drained(handoff=legs.handoff, writer_epoch=legs.prefill_epoch, target_epoch=legs.decode_epoch)
            leg = SendDecode(legs.decode_epoch, unused)
        return (SendDecode(legs.decode_epoch, cancel), leg, Outcome(legs.handoff, cause))


def _gone(legs: _Legs, epoch: int) -> Cause:
    """The cause of a handoff's end where this one of its workers is gone."""
    return Cause.DECODE_GONE if epoch == legs.decode_epoch else Cause.PREFILL_GONE


def _epochs(legs: _Legs) -> tuple[int, ...]:
    """The epochs of the worker processes that the request still needs."""
    return (legs.decode_epoch,) if legs.is_started else (legs.prefill_epoch, legs.decode_epoch)


def _start(legs: _Legs) -> tuple[GatewayAction, ...]:
    if legs.first_tokens is None or legs.last is None:
        return ()
    first = legs.first_tokens
    start = Start(handoff=legs.handoff, tokens=first.tokens, last=legs.last, guesses=first.guesses)
    return (SendDecode(legs.decode_epoch, start),)


def _cancel_stray(message: ManifestHeader | FirstTokens) -> tuple[GatewayAction, ...]:
    """Tells a P to cancel that works for a handoff that is over."""
    cancel = Cancel(handoff=message.handoff, target_epoch=message.target_epoch)
    return (SendPrefill(message.writer_epoch, cancel),)
