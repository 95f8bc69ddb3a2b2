"""Where prompts are prefilled, as a gateway decides it: by `routing.locality`, fed with what workers report.

Stands between the attempts, which know routes and outputs, and the rules, which know neither. Left out: which worker of
a role it is.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from moonshard.rpc import link_pb2
from moonshard.serving.config.keys import RoutingConfig
from moonshard.serving.control.routing.locality import Alternatives, Locality, is_short
from moonshard.serving.gateway.workers.pool import Route


class PrefillPlace:
    """Of one gateway."""

    def __init__(self, routing: RoutingConfig) -> None:
        self._routing = routing
        self._locality = Locality()
        self._begun_tokens = Counter[tuple[int, int]]()  # by decode home: of prompts whose first token is to come

    def is_here_anyway(self, num_prompt: int, decode: Route) -> bool:
        """Whether the decode worker should prefill, whatever prefill worker there is: by the static rule."""
        return self._routing.local_prefill == "static" and is_short(
            num_prompt,
            num_prompt - decode.reservation.num_known_tokens,
            max_left_tokens=self._routing.local_prefill_max_tokens,
            min_known_share=self._routing.local_prefill_min_known,
        )

    def is_here(self, num_prompt: int, decode: Route, prefill: Route) -> bool:
        """Whether the decode worker should prefill and not this prefill worker: by what each costs."""
        if self._routing.local_prefill == "static":
            return False
        load, num_known = decode.session.load, decode.reservation.num_known_tokens
        reported = sum(load.queued_tokens[decode.partition : decode.partition + 1])  # 0 before a report
        ways = Alternatives(
            left_here_tokens=num_prompt - num_known,
            queued_here_tokens=max(reported, self._begun_tokens[_home(decode)]),
            num_decoding=load.num_running,
            left_there_tokens=num_prompt - prefill.reservation.num_known_tokens,
            queued_there_tokens=prefill.reservation.num_queued_tokens,
            moved_tokens=num_prompt - num_known,
        )
        return self._locality.is_here(ways)

    @contextmanager
    def prefilling_here(self, num_prompt: int, decode: Route) -> Iterator[None]:
        """Until its first token, a prompt is work before the next one: of a burst no report tells in time."""
        home, num_left = _home(decode), num_prompt - decode.reservation.num_known_tokens
        self._begun_tokens[home] += num_left
        try:
            yield
        finally:
            self._begun_tokens[home] -= num_left
            if not self._begun_tokens[home]:
                del self._begun_tokens[home]

    def prefilled(self, num_prompt: int, first: link_pb2.SequenceOutput, *, is_here: bool) -> None:
        """The first output of a request, with the time that its prompt took."""
        line = self._locality.here if is_here else self._locality.there
        line.observe(num_prompt - min(first.cached_tokens, num_prompt - 1), first.phases.prefill_ms)

    def moved(self, num_prompt: int, decode: Route, transfer: link_pb2.TransferPhases) -> None:
        """A prompt's KV is where it is decoded."""
        self._locality.transfer.observe(num_prompt - decode.reservation.num_known_tokens, transfer.exposed_ms)


def _home(decode: Route) -> tuple[int, int]:
    return decode.session.epoch, decode.partition
