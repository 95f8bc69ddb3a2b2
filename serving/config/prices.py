"""What tokens cost: a price for those that were computed, for those found in a cache, and for those that came out."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

Price = Annotated[float, Meta(ge=0, le=1e6)]
MILLION = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """USD per million tokens. The defaults are those of Kimi K2.5 on Cloudflare's Workers AI."""

    input: Price = 0.60  # of prompts, in USD per million tokens
    cached_input: Price = 0.10  # of these, for those found in a cache
    output: Price = 3.00  # of completions

    def usd(self, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> float:
        computed = prompt_tokens - cached_tokens
        return (computed * self.input + cached_tokens * self.cached_input + completion_tokens * self.output) / MILLION
