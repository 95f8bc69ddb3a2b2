"""The sums of a request's outputs: tokens, stamps and phases, added up as they arrive."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from moonshard.rpc import link_pb2
from moonshard.rpc.codec import decode_finish_reason
from moonshard.serving.gateway.records.events import TokensArrived

TIERS = ("host", "store", "ssd")  # below a device's pages, the nearest first


@dataclass(slots=True)
class ChoiceOutputs:
    """The outputs of one choice. A stamp is 0 until its event."""

    num_tokens: int = 0  # that the client was told
    num_new_tokens: int = 0  # of these: with the last output
    num_outputs: int = 0  # of workers, that had them
    first_ns: int = 0
    second_ns: int = 0
    last_ns: int = 0
    gap_ns: int = 0  # between the last two outputs, once there are two
    finish_reason: str = ""  # empty until it has ended


@dataclass(slots=True)
class OutputTally:
    """The outputs of all choices. What came after the end of its choice counts neither as tokens nor as time."""

    first_ns: int = 0
    last_ns: int = 0
    cached_tokens: int = 0  # as the first output said
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)  # likewise: of these, from tiers below the device
    num_received_tokens: int = 0  # of what workers sent
    phases: link_pb2.WorkerPhases = field(default_factory=link_pb2.WorkerPhases)
    has_decoded: bool = False  # a worker said how long it decoded
    choices: defaultdict[int, ChoiceOutputs] = field(default_factory=lambda: defaultdict(ChoiceOutputs))

    def add(self, arrived: TokensArrived) -> None:
        """Run for every token: a message's field is looked at once, since that costs as much as all the rest."""
        at_ns, output, delta = arrived.at_ns, arrived.output, arrived.delta
        self.num_received_tokens += len(output.token_ids)
        if delta is None:
            return
        choice = self.choices[delta.choice]
        choice.num_new_tokens = num_new = len(delta.token_ids)
        choice.num_tokens += num_new
        choice.num_outputs += 1
        if choice.first_ns:
            choice.gap_ns = at_ns - choice.last_ns
            if not choice.second_ns:
                choice.second_ns = at_ns
        else:
            choice.first_ns = at_ns
        choice.last_ns = self.last_ns = at_ns
        if finish_reason := delta.finish_reason:
            choice.finish_reason = _counted_as(finish_reason)
        is_first = not self.first_ns
        if is_first:
            self.first_ns, self.cached_tokens = at_ns, output.cached_tokens
            self.cached_by_tier = dict(output.cached_by_tier)
        if output.HasField("phases"):
            self._merge(output.phases, is_first=is_first)
            self.has_decoded = self.has_decoded or bool(output.finish_reason)

    def claimed_by_tier(self, num_cached: int) -> dict[str, int]:
        """What tiers below the device gave of the first `num_cached` tokens, the nearest first, without those that gave
        none.

        It stands behind what the device had, and in it the slowest tier's part at the end: what was not found again, or
        is computed all the same, is taken from there.
        """
        num_left = max(0, num_cached - max(0, self.cached_tokens - sum(self.cached_by_tier.values())))
        claimed = dict[str, int]()
        for tier in sorted(self.cached_by_tier, key=_distance):
            if num_claimed := min(num_left, self.cached_by_tier[tier]):
                claimed[tier] = num_claimed
                num_left -= num_claimed
        return claimed

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices.values())

    @property
    def num_outputs(self) -> int:
        return sum(choice.num_outputs for choice in self.choices.values())

    @property
    def num_begun(self) -> int:
        """How many choices have outputs."""
        return sum(choice.first_ns > 0 for choice in self.choices.values())

    @property
    def num_ended(self) -> int:
        return sum(bool(choice.finish_reason) for choice in self.choices.values())

    @property
    def has_joined(self) -> bool:
        """Whether a worker said that it decodes with KV that came from elsewhere."""
        return self.phases.land_ms + self.phases.join_ms > 0

    def _merge(self, phases: link_pb2.WorkerPhases, *, is_first: bool) -> None:
        """A later message repeats what it does not change, or leaves it at 0.

        The queue and prefill are those of the first token, and a part of the wait for it: not those of a request that
        goes on elsewhere, nor of a choice that had to wait for a slot of its own.
        """
        queue_ms, prefill_ms = self.phases.queue_ms, self.phases.prefill_ms
        self.phases.MergeFrom(phases)
        if not is_first:
            self.phases.queue_ms, self.phases.prefill_ms = queue_ms, prefill_ms


def _distance(tier: str) -> tuple[int, str]:
    """Orders tiers by how far they are from the device. What a newer worker has, and this gateway does not know, is
    farthest.
    """
    return (TIERS.index(tier) if tier in TIERS else len(TIERS), tier)


def _counted_as(finish_reason: int) -> str:
    """The finish reason in vLLM's names, which have none for tool calls."""
    finish = decode_finish_reason(finish_reason) or ""
    return "stop" if finish == "tool_calls" else finish
