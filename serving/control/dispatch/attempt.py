"""One attempt at a request: the workers that it runs on, and how far its prompt is."""

from dataclasses import dataclass

from moonshard.serving.control.dispatch.prefill_place import DecodeHome
from moonshard.serving.control.routing.router import Reservation


@dataclass(kw_only=True, slots=True, eq=False)
class Attempt:
    """Made and changed by the dispatcher alone."""

    decode: Reservation
    decode_epoch: int
    prefill: Reservation | None  # None: the worker that decodes prefills too
    prefill_epoch: int | None
    is_local_prefill: bool  # by the rule for that, or as there is no other: a worker that leaves prompts to others
    is_resumed: bool
    begun_s: float
    has_begun: bool = False  # its first output came
    is_prefilling: bool = True  # or its KV is not moved yet

    @property
    def prompt(self) -> Reservation:
        """Where its prompt is computed."""
        return self.prefill or self.decode

    @property
    def decode_home(self) -> DecodeHome:
        return self.decode_epoch, self.decode.home.partition

    @property
    def num_prompt(self) -> int:
        return self.decode.num_known_tokens + self.decode.num_left_tokens
