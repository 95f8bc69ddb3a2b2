"""`-m moonshard.experiments.studies.pd_vs_aggregated.reckoning`: whether a p90 of gaps sees the chunks of long prompts.

By the study's fitted step times, for the shapes of its workload. While a device computes a long prompt, every stream on
it gets one token for each chunk and decode step together, and else one for each decode step: so many of all gaps have a
chunk in them. Short prompts and waiting are left out, and the number of streams is taken as given.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from moonshard.experiments.reading.step_model import StepModel

PROMPT_TOKENS, LONG_SHARE = 3968, 0.25  # of the workload
STREAM_TOKENS, NUM_STREAMS = 130, 4  # context of a short request amid its answer; as many on each of the two devices
NUM_DEVICES = 2
CHUNKS = (128, 256, 512)
RATES = (1.6, 2.0)
SEEN_FROM = 0.1  # of the gaps: what p90 sees


@dataclass(frozen=True, kw_only=True, slots=True)
class Reckoned:
    """What chunks of one size do to the gaps between tokens, aggregated on two devices."""

    num_chunks: int  # of a long prompt
    prefill_ms: float  # of all of them
    decode_ms: float  # of a step with the streams alone

    @property
    def cycle_ms(self) -> float:
        """The length of a gap that has a chunk in it."""
        return self.prefill_ms / self.num_chunks + self.decode_ms

    def share_of_gaps(self, rate_per_s: float) -> float:
        """The share of gaps that have a chunk in them, at that many requests a second."""
        busy = min(1.0, rate_per_s * self._busy_s)
        with_chunk, without = busy / self.cycle_ms, (1 - busy) / self.decode_ms
        return with_chunk / (with_chunk + without)

    def rate_seen(self, share: float = SEEN_FROM) -> float:
        """The requests a second from which on this share of gaps has a chunk in it."""
        odds = share / (1 - share) * self.cycle_ms / self.decode_ms
        return odds / (1 + odds) / self._busy_s

    @property
    def rate_full(self) -> float:
        """The requests a second at which a device that only prefills is fully busy."""
        return 1e3 / (LONG_SHARE * self.prefill_ms)

    @property
    def _busy_s(self) -> float:
        """For each request a second, the share of a device's time in which it computes a long prompt."""
        return LONG_SHARE / NUM_DEVICES * self.num_chunks * self.cycle_ms / 1e3


def reckoned(model: StepModel, chunk_tokens: int) -> Reckoned:
    starts = range(0, PROMPT_TOKENS, chunk_tokens)
    sizes = [min(chunk_tokens, PROMPT_TOKENS - start) for start in starts]
    chunks_ms = [
        model.prefill.ms(bucket=size, batch=1, context_tokens=start + size)
        for start, size in zip(starts, sizes, strict=True)
    ]
    context_tokens = NUM_STREAMS * STREAM_TOKENS
    decode_ms = model.decode.ms(bucket=NUM_STREAMS, batch=NUM_STREAMS, context_tokens=context_tokens)
    return Reckoned(num_chunks=len(chunks_ms), prefill_ms=sum(chunks_ms), decode_ms=decode_ms)


def main() -> int:
    model = StepModel.from_json((Path(__file__).parent / "step_times.json").read_bytes())
    print(f"Step times: {model.source}")
    for chunk_tokens in CHUNKS:
        found = reckoned(model, chunk_tokens)
        shares = ", ".join(f"{found.share_of_gaps(rate):.1%} at {rate:g} requests/s" for rate in RATES)
        print(
            f"chunks of {chunk_tokens}: a gap of {found.cycle_ms:.0f} ms beside {found.decode_ms:.1f}; {shares}; "
            f"{SEEN_FROM:.0%} at {found.rate_seen():.1f}; one prefilling device is full at {found.rate_full:.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
