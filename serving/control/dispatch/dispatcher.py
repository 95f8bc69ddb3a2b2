"""Where each attempt at a request runs, whether it is admitted at all, and what follows when it fails.

One for a gateway. Whoever drives it says which workers are there and what happened, and does what `begin` answers:

    retries = Retries(max_attempts=...)                     # of one request
    answer = dispatcher.begin(demand, retries, now_s)       # an Attempt, or a Wait, or why it is refused
    dispatcher.sent(attempt.decode, now_s)                  # likewise its prefill leg, each when it is sent
    dispatcher.first_token(attempt, now_s, ...)             # then `prefill_over`, and `moved` where its KV was moved
    dispatcher.end(attempt)                                 # once, however it ended
    dispatcher.failed(attempt, retries, failure)            # whether to begin again

A request is begun on the worker that will decode it, and its prompt is computed there or on a prefill worker that hands
it over. An attempt that goes on from tokens that the client has is prefilled where it decodes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from moonshard.serving.control.dispatch.attempt import Attempt, AttemptLeg
from moonshard.serving.control.dispatch.prefill_place import PrefillPlace, PrefillRule
from moonshard.serving.control.dispatch.retries import Failure, Retries
from moonshard.serving.control.members.fleet import DECODE_ROLES, PREFILL_ROLES, Fleet, Member
from moonshard.serving.control.routing.policies import Policy
from moonshard.serving.control.routing.router import Ask, Reservation, Router
from moonshard.serving.control.ttft.bound import TooLate, TtftBound, TtftSlo
from moonshard.serving.control.ttft.forecast import TtftForecast


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchRules:
    """The configured rules of dispatch."""

    failover_wait_s: float  # of a request that lost its worker, for another
    ttft_slo_s: TtftSlo  # as `ttft.bound.ttft_limit_s` has it
    prefill: PrefillRule


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What the dispatcher must know of a request."""

    num_prompt: int  # tokens
    max_new_tokens: int  # of all its choices together
    names: Sequence[bytes] = ()  # of the prompt's full blocks
    affinity_key: bytes | None = None  # as `routing.pins.affinity_key` makes it


@dataclass(frozen=True, slots=True)
class Wait:
    """There is no worker: ask again as soon as the workers have changed, and at that time at the latest."""

    end_s: float


@dataclass(frozen=True, slots=True)
class NoWorker:
    """Refused: there is no worker that decodes, or was none for as long as a request waits for one."""


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Refused: the last decode worker had no room, and there is no other."""

    retry_after_s: float


type Refusal = NoWorker | NoRoom | TooLate


class Dispatcher:
    """Sends requests to the workers of `fleet`; `router` counts their tokens in flight."""

    def __init__(self, fleet: Fleet, router: Router, rules: DispatchRules, policy: Policy) -> None:
        self.fleet = fleet
        self.router = router
        self.forecast = TtftForecast(router)
        self._rules = rules
        self._policy = policy
        self._place = PrefillPlace(rules.prefill)
        self._bound = TtftBound(rules.ttft_slo_s)
        self._epochs: dict[str, int] = {}  # by address: of the last process there
        self._leaving: set[str] = set()  # addresses to be forgotten once no attempt is left there

    # ---- which workers are there

    def expect(self, address: str) -> None:
        """A worker may come there: one that is not there at first, or comes back after `forget`."""
        self._leaving.discard(address)
        self.fleet.expect(address)

    def forget(self, address: str) -> None:
        """No worker will come there: nothing is kept of it once the attempts there have ended. It was lost before."""
        self.fleet.forget(address)
        self._leaving.add(address)
        self._forget_left()

    def _forget_left(self) -> None:
        for address in [address for address in self._leaving if self.router.forget(address)]:
            self._leaving.remove(address)
            self._epochs.pop(address, None)
            self.forecast.forget(address)

    def join(self, member: Member) -> None:
        """A worker that fits has come. If its process is another than the last one there, affinity keys pinned to that
        are dropped.
        """
        if self._epochs.get(member.address, member.epoch) != member.epoch:
            for home in member.homes:
                self.router.process_ended(home)
        self._epochs[member.address] = member.epoch
        self.fleet.join(member)

    def leave(self, address: str) -> None:
        """A worker was lost. Its reports end, and what was learned of its times is forgotten."""
        for home in self.fleet.member_at(address).homes:
            self.router.silent(home)
        self.forecast.forget(address)
        self.fleet.leave(address)

    # ---- one request

    def begin(
        self, demand: Demand, retries: Retries, now_s: float, *, is_resumed: bool = False
    ) -> Attempt | Wait | Refusal:
        """`is_resumed`: the request goes on from tokens that an earlier attempt made."""
        decode = self._reserve_decode(demand, retries, now_s)
        if decode is None:
            if retries.no_room_retry_after_s is not None:
                return NoRoom(retries.no_room_retry_after_s)
            end_s = retries.waits(now_s, self._rules.failover_wait_s)
            return NoWorker() if end_s is None else Wait(end_s)
        retries.wait_end_s = None
        attempt = self._attempt(demand, retries, decode, now_s, is_resumed=is_resumed)
        if not retries.num_failed and (late := self._too_late(attempt.prompt.reservation, now_s)) is not None:
            self.end(attempt)
            return late
        return attempt

    def sent(self, leg: AttemptLeg, now_s: float) -> None:
        """A leg of an attempt has just been sent to its worker."""
        self.router.sent(leg.reservation, now_s)

    def first_token(self, attempt: Attempt, now_s: float, *, cached_tokens: int, prefill_ms: float | None) -> None:
        """The first output of an attempt is here; the forecasts learn from it.

        `cached_tokens` and `prefill_ms` are what the worker says of the prompt. `prefill_ms` is None where it says
        nothing.
        """
        attempt.has_begun = True
        if attempt.prefill is None:
            self.prefill_over(attempt)
        if attempt.is_resumed:
            return
        self.forecast.observe(attempt.prompt.reservation, now_s - attempt.begun_s)
        if prefill_ms is not None:
            num_tokens = attempt.num_prompt - min(cached_tokens, attempt.num_prompt - 1)
            self._place.prefilled(num_tokens, prefill_ms, is_here=attempt.prefill is None)

    def moved(self, attempt: Attempt, exposed_ms: float) -> None:
        """The attempt's KV has reached the worker that decodes, so long after its first token."""
        self._place.moved(attempt.num_moved_tokens, exposed_ms)

    def prefill_over(self, attempt: Attempt) -> None:
        """The attempt's prompt occupies no worker any more. A second call does nothing."""
        if not attempt.is_prefilling:
            return
        attempt.is_prefilling = False
        if attempt.prefill is not None:
            self.router.release(attempt.prefill.reservation)
        elif attempt.is_local_prefill:
            self._place.end_here(attempt.decode_home, attempt.num_left_tokens)

    def failed(
        self, attempt: Attempt, retries: Retries, failure: Failure, *, retry_after_s: float | None = None
    ) -> bool:
        """Whether the request may be begun again.

        An attempt without output does not count as served: its affinity key is not pinned to its workers.
        """
        if not attempt.has_begun and not attempt.is_resumed:
            for leg in (attempt.decode, attempt.prefill):
                if leg is not None:
                    self.router.nothing_came(leg.reservation)
        return retries.failed(
            failure,
            decode_epoch=attempt.decode.epoch,
            prefill_epoch=None if attempt.prefill is None else attempt.prefill.epoch,
            retry_after_s=retry_after_s,
        )

    def end(self, attempt: Attempt) -> None:
        """An attempt is over, however it ended. Call it once for each attempt."""
        self.prefill_over(attempt)
        self.router.release(attempt.decode.reservation)
        if self._leaving:
            self._forget_left()

    def least_ttft_s(self, now_s: float) -> float | None:
        """The predicted TTFT of the shortest prompt on the worker that is soonest, as of a moment ago; None while
        nothing is known.
        """
        return self.forecast.least_s(self.fleet.homes(PREFILL_ROLES | DECODE_ROLES), now_s)

    def _reserve_decode(self, demand: Demand, retries: Retries, now_s: float) -> Reservation | None:
        """A worker that failed this request before is chosen only where there is no other; one that had no room
        never.
        """
        ask = self._ask(demand, is_prefill=False)
        found = self._reserve(DECODE_ROLES, ask, now_s, exclude=retries.failed_epochs)
        if found is None and retries.failed_epochs and retries.no_room_retry_after_s is None:
            return self._reserve(DECODE_ROLES, ask, now_s)
        return found

    def _reserve_prefill(self, demand: Demand, retries: Retries, now_s: float) -> Reservation | None:
        """A worker that failed this request before is chosen only where there is no other."""
        ask = self._ask(demand, is_prefill=True)
        found = self._reserve(PREFILL_ROLES, ask, now_s, exclude=retries.failed_epochs)
        return found or self._reserve(PREFILL_ROLES, ask, now_s)

    def _reserve(
        self, roles: frozenset[str], ask: Ask, now_s: float, *, exclude: Collection[int] = ()
    ) -> Reservation | None:
        return self.router.reserve(self.fleet.homes(roles, exclude=exclude), ask, policy=self._policy, now_s=now_s)

    def _ask(self, demand: Demand, *, is_prefill: bool) -> Ask:
        """What one leg asks of the router. Each leg of an affinity key has a pin of its own."""
        key = demand.affinity_key
        return Ask(
            num_tokens=demand.num_prompt if is_prefill else demand.num_prompt + demand.max_new_tokens,
            num_prompt=demand.num_prompt,
            is_prefill=is_prefill,
            names=demand.names,
            block_size=self.fleet.block_size,
            affinity_key=None if key is None else key + (b"p" if is_prefill else b"d"),
        )

    def _attempt(
        self, demand: Demand, retries: Retries, reservation: Reservation, now_s: float, *, is_resumed: bool
    ) -> Attempt:
        member = self.fleet.member_at(reservation.home.worker)
        decode, may_move = AttemptLeg(reservation, member.epoch), member.role != "both" and not is_resumed
        prefill = self._prefill_leg(demand, retries, decode, now_s) if may_move else None
        attempt = Attempt(
            decode=decode,
            prefill=prefill,
            is_local_prefill=may_move and prefill is None,
            is_resumed=is_resumed,
            begun_s=now_s,
        )
        if attempt.is_local_prefill:
            self._place.begin_here(attempt.decode_home, attempt.num_left_tokens)
        return attempt

    def _prefill_leg(self, demand: Demand, retries: Retries, decode: AttemptLeg, now_s: float) -> AttemptLeg | None:
        """The leg on a prefill worker. None where the decode worker should prefill too: by the rule, or since there is
        no other.
        """
        if not retries.may_prefill_elsewhere or self._place.is_here_anyway(decode.reservation):
            return None
        found = self._reserve_prefill(demand, retries, now_s)
        if found is None:
            return None
        home, load = (decode.epoch, decode.home.partition), self.fleet.load_at(decode.home.worker)
        if self._place.is_here(decode.reservation, found, home=home, load=load):
            self.router.release(found)
            return None
        return AttemptLeg(found, self.fleet.member_at(found.home.worker).epoch)

    def _too_late(self, prompt: Reservation, now_s: float) -> TooLate | None:
        return self._bound.refusal(
            now_s,
            predicted_s=self.forecast.predict_s(prompt),
            alone_s=self.forecast.predict_s(prompt, is_alone=True),
            num_queued_tokens=prompt.num_queued_tokens,
        )
