"""One attempt at a request: the workers that it runs on, and how far its prompt is."""

from dataclasses import dataclass

from moonshard.serving.control.dispatch.prefill_place import DecodeHome
from moonshard.serving.control.routing.router import Home, Reservation


@dataclass(frozen=True, slots=True)
class AttemptLeg:
    """A part of an attempt (its prefill or its decode), and the worker process that it was given to."""

    reservation: Reservation
    epoch: int

    @property
    def home(self) -> Home:
        return self.reservation.home


@dataclass(kw_only=True, slots=True, eq=False)
class Attempt:
    """One attempt. Made and changed by the dispatcher alone."""

    decode: AttemptLeg
    prefill: AttemptLeg | None  # None: the worker that decodes prefills too
    is_local_prefill: bool  # by the rule for that, or as there is no other: a worker that leaves prompts to others
    is_resumed: bool
    begun_s: float
    has_begun: bool = False  # its first output came
    is_prefilling: bool = True  # or its KV is not moved yet

    @property
    def prompt(self) -> AttemptLeg:
        """The leg that computes the prompt."""
        return self.prefill or self.decode

    @property
    def decode_home(self) -> DecodeHome:
        return self.decode.epoch, self.decode.home.partition

    @property
    def num_left_tokens(self) -> int:
        """How many tokens of the prompt the worker that decodes would have to compute."""
        return self.decode.reservation.num_left_tokens

    @property
    def num_moved_tokens(self) -> int:
        """How many tokens of the prompt the worker that decodes does not have at hand."""
        return self.num_prompt - self.decode.reservation.num_known_tokens

    @property
    def num_prompt(self) -> int:
        return self.decode.reservation.num_prompt
