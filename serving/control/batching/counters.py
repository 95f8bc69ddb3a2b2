"""What the scheduler has done so far and what it holds now, in counts, for the router and the metrics."""

from dataclasses import dataclass

from moonshard.serving.control.plan import DecodePlan, Plan, PrefillPlan


@dataclass(kw_only=True, slots=True)
class Totals:
    """Counts since the start. Steps and the positions that they compute are counted at launch, wasted tokens when they
    arrive.
    """

    num_preemptions: int = 0
    num_prefill_steps: int = 0
    num_decode_steps: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0  # that need not be prefilled, of sequences when they were first admitted
    decode_tokens: int = 0
    num_drafts: int = 0  # rows that guessed; what came of it is counted when it arrives
    draft_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()  # of the draft's, that were right: its first, its second and so on
    wasted_tokens: int = 0  # emitted for a sequence that had ended, or behind the token that ended it

    @property
    def accepted_tokens(self) -> int:
        return sum(self.accepted_per_position)

    def snapshot(self) -> "Totals":
        """A copy: field by field, since it is made with every step's message."""
        return Totals(
            num_preemptions=self.num_preemptions,
            num_prefill_steps=self.num_prefill_steps,
            num_decode_steps=self.num_decode_steps,
            prefill_tokens=self.prefill_tokens,
            cached_tokens=self.cached_tokens,
            decode_tokens=self.decode_tokens,
            num_drafts=self.num_drafts,
            draft_tokens=self.draft_tokens,
            accepted_per_position=self.accepted_per_position,
            wasted_tokens=self.wasted_tokens,
        )

    def count_guesses(self, num_guessed: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.draft_tokens += num_guessed
        known = max(len(self.accepted_per_position), num_guessed)
        before = self.accepted_per_position + (0,) * (known - len(self.accepted_per_position))
        self.accepted_per_position = tuple([count + (place < num_accepted) for place, count in enumerate(before)])

    def count_launch(self, plan: Plan) -> None:
        if isinstance(plan, PrefillPlan):
            self.num_prefill_steps += 1
            self.prefill_tokens += sum(len(chunk.tokens) for chunk in plan.chunks)
        elif isinstance(plan, DecodePlan):
            self.num_decode_steps += 1
            self.decode_tokens += sum(row.q_len for row in plan.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """A snapshot. `num_running` and `num_waiting` count choices, and every unfinished choice is one or the other.

    Those that wait for a slot with their KV in place count as waiting, and add nothing to `queued_tokens`.
    """

    totals: Totals
    num_running: int
    num_waiting: int
    queued_tokens: tuple[int, ...]  # by partition: still to be prefilled for what has been accepted
    active_tokens: tuple[int, ...]  # by partition: known, or on their way at most, of running sequences
