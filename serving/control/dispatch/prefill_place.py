"""Whether a prompt is prefilled on the worker that decodes it, by `routing.locality`.

It feeds that rule with the times that requests have shown. The rule itself knows only tokens and times, and the
dispatcher only reservations.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from moonshard.serving.control.members.fleet import MemberLoad
from moonshard.serving.control.routing.locality import Alternatives, Locality, is_short
from moonshard.serving.control.routing.router import Reservation


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillRule:
    """The configured rule."""

    kind: Literal["cost", "static"] = "cost"
    max_left_tokens: int = 0  # static: here where at most so many are unknown here
    min_known_share: float = 1.0  # static: or where this share of the prompt is known


type DecodeHome = tuple[int, int]  # a decode worker's epoch, and a partition of it


class PrefillPlace:
    """The rule of one gateway. "Here" is the worker that decodes a prompt, "there" one that prefills for others."""

    def __init__(self, rule: PrefillRule) -> None:
        self._rule = rule
        self._locality = Locality()
        self._begun_tokens = Counter[DecodeHome]()  # of prompts prefilled here whose first token is to come

    def is_here_anyway(self, decode: Reservation) -> bool:
        """Whether the static rule says "here", whatever prefill workers there are."""
        return self._rule.kind == "static" and is_short(
            decode.num_prompt,
            decode.num_left_tokens,
            max_left_tokens=self._rule.max_left_tokens,
            min_known_share=self._rule.min_known_share,
        )

    def is_here(self, decode: Reservation, prefill: Reservation, *, home: DecodeHome, load: MemberLoad) -> bool:
        """Whether it costs less to prefill here than on this prefill worker. `load` is the decode worker's."""
        if self._rule.kind == "static":
            return False
        partition = decode.home.partition
        reported = sum(load.queued_tokens[partition : partition + 1])  # 0 before a report
        ways = Alternatives(
            left_here_tokens=decode.num_left_tokens,
            queued_here_tokens=max(reported, self._begun_tokens[home]),
            num_decoding=load.num_running,
            left_there_tokens=prefill.num_left_tokens,
            queued_there_tokens=prefill.num_queued_tokens,
            moved_tokens=decode.num_prompt - decode.num_known_tokens,
        )
        return self._locality.is_here(ways)

    def begin_here(self, home: DecodeHome, num_tokens: int) -> None:
        """Counts a prompt as work here until its first token: in a burst a worker's report comes too late."""
        self._begun_tokens[home] += num_tokens

    def end_here(self, home: DecodeHome, num_tokens: int) -> None:
        """Ends what `begin_here` began. Call it once for each."""
        self._begun_tokens[home] -= num_tokens
        if not self._begun_tokens[home]:
            del self._begun_tokens[home]

    def prefilled(self, num_tokens: int, prefill_ms: float, *, is_here: bool) -> None:
        """A prefill was measured: so many tokens took so long."""
        (self._locality.here if is_here else self._locality.there).observe(num_tokens, prefill_ms)

    def moved(self, num_tokens: int, exposed_ms: float) -> None:
        """A transfer was measured: the KV of so many tokens had arrived so long after the first token."""
        self._locality.transfer.observe(num_tokens, exposed_ms)
