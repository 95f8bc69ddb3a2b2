"""Whether a prompt is prefilled where it will be decoded, or on another worker and moved: what costs the least time.

Here it need not be moved, and what was moved before need not be computed; but every sequence that decodes here waits
while it is prefilled. There it waits for other prompts, and its KV comes later. How long things take is fitted to what
was seen: a line each, by least squares. Pure and without a clock. Which workers these are is `routing.router`'s; when
the first token of a request comes, with its time in the queue, is predicted in `control.ttft`.

Sources: conditional disaggregation in NVIDIA Dynamo (its documents on disaggregated serving) for the trade, and Arrow
(arXiv 2505.11916) for deciding it by expected times. The objective, time summed over all who wait, is ours.
"""

from dataclasses import dataclass, field

from moonshard.serving.control.line import Line

MEMORY = 0.98  # what an observation still weighs after the next one: some fifty count
MIN_WEIGHT = 3.0  # of observations, before they are believed
MAX_ALIKE = 50  # decisions for one side in a row; then the other is tried, so that its times stay known
MAX_REGRET = 2.0  # but only where it is expected to take at most so many times as long


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternatives:
    """What is known of the two places for one prompt. "Here" is the worker that will decode it."""

    left_here_tokens: int  # of the prompt, to be computed
    queued_here_tokens: int  # of other prompts, before it
    num_decoding: int  # sequences that wait meanwhile
    left_there_tokens: int
    queued_there_tokens: int
    moved_tokens: int  # from there to here


@dataclass(slots=True)
class Locality:
    """The rule for one pool of workers that are alike."""

    here: Line = field(default_factory=lambda: Line(MEMORY))  # milliseconds by tokens, prefilling beside decoding
    there: Line = field(default_factory=lambda: Line(MEMORY))
    transfer: Line = field(default_factory=lambda: Line(MEMORY))  # what of it comes after the first token
    _was_here: bool = False
    _num_alike: int = 0  # decisions in a row

    def costs_ms(self, ways: Alternatives) -> tuple[float, float]:
        """The time that this request and those that decode here lose if it is prefilled (here, there).

        Until prefills were seen here, they are taken to last as long as there.
        """
        here = self.here if self.here.weight >= MIN_WEIGHT else self.there
        stall_ms = ways.num_decoding * here.at(ways.left_here_tokens)
        here_ms = here.at(ways.queued_here_tokens + ways.left_here_tokens) + stall_ms
        there_ms = self.there.at(ways.queued_there_tokens + ways.left_there_tokens)
        return here_ms, there_ms + self.transfer.at(ways.moved_tokens)

    def is_here(self, ways: Alternatives) -> bool:
        """Chooses the cheaper place, and now and then the other to learn of it. Before anything was seen, prefill
        workers prefill.
        """
        if self.there.weight < MIN_WEIGHT:
            return False
        here_ms, there_ms = self.costs_ms(ways)
        is_here = here_ms < there_ms
        least_ms, most_ms = sorted((here_ms, there_ms))
        if is_here is self._was_here and self._num_alike >= MAX_ALIKE and most_ms <= MAX_REGRET * least_ms:
            is_here = not is_here
        self._num_alike = self._num_alike + 1 if is_here is self._was_here else 1
        self._was_here = is_here
        return is_here


def is_short(num_prompt: int, left_here_tokens: int, *, max_left_tokens: int, min_known_share: float) -> bool:
    """The static rule: here, where few tokens are left to compute or most of the prompt is known."""
    num_known = num_prompt - left_here_tokens
    return left_here_tokens <= max_left_tokens or num_known >= min_known_share * num_prompt
