"""Where an affinity key goes of which nothing is known: to the same home whichever gateway is asked, nothing shared.

Each home has a weight for each key, and the largest wins. So a home that comes takes only keys that it wins, and of one
that goes only its own keys move, each to the next in its own order: evenly to all that are left. Whether the weights
are followed is decided in `routing.policies`. Pure.
Source: highest random weight, Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (IEEE/ACM ToN
6(1), 1998); the mixing function is SplitMix64's (Steele, Lea and Flood, OOPSLA 2014).
"""

import hashlib

import numpy as np

FIRST_CAPACITY = 16
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


class Rendezvous:
    """The homes by their numbers, and what each weighs for a key."""

    def __init__(self) -> None:
        self._seeds = np.zeros(FIRST_CAPACITY, np.uint64)  # by number; of a home's name alone

    def place(self, number: int, worker: str, partition: int) -> None:
        """The home of that number, from now on, is this one."""
        if number >= len(self._seeds):
            self._seeds = np.concatenate([self._seeds, np.zeros(max(number, len(self._seeds)), np.uint64)])
        self._seeds[number] = _hashed(f"{partition} {worker}".encode())

    def weights(self, numbers: np.ndarray, key: bytes) -> np.ndarray:
        """[n] uint64 of homes [n]: as good as random, and the same for the same home and key everywhere."""
        mixed = (self._seeds[numbers] ^ np.uint64(_hashed(key))) + _STEP
        for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
            mixed = (mixed ^ (mixed >> shift)) * factor
        return mixed ^ (mixed >> _SHIFTS[2])


def _hashed(name: bytes) -> int:
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big")
