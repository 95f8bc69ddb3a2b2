"""What homes can fetch instead of computing it: blocks in tiers below their devices' pages, at what fetching costs.

The prefix index knows what is in tiers under numbers of its own: for each worker one of what it alone can read, and one
of what it has seen in a tier that all workers read. What any worker has seen there, all can fetch that read it.
"""

from collections.abc import Collection, Sequence

import numpy as np

NO_TIER = -1


class Slower:
    """By home number. Homes without tiers fetch nothing."""

    def __init__(self) -> None:
        self._own = np.zeros(0, np.int64)  # [homes] the number under which the index knows its worker's tiers
        self._shared = np.zeros(0, np.int64)  # likewise of the tier that all workers read
        self._own_share = np.zeros(0)  # [homes] the time of fetching a block beside that of computing it
        self._shared_share = np.zeros(0)
        self._shared_numbers = np.zeros(0, np.int64)  # of all workers

    def set(self, homes: Sequence[int], own: int, shared: int, own_share: float, shared_share: float) -> None:
        """These homes' worker says how long it takes."""
        self._grow(max(*homes, own, shared) + 1)
        self._own[homes], self._shared[homes] = own, shared
        self._own_share[homes], self._shared_share[homes] = own_share, shared_share
        self._shared_numbers = np.unique(self._shared[self._shared != NO_TIER])

    def forget(self, numbers: Collection[int]) -> None:
        """These numbers, of homes and of tiers, are no more."""
        gone = [number for number in numbers if number < len(self._own)]
        self._own[gone] = self._shared[gone] = NO_TIER
        self._own_share[gone] = self._shared_share[gone] = 0
        self._shared_numbers = np.unique(self._shared[self._shared != NO_TIER])

    def saved(self, homes: np.ndarray, known: np.ndarray, known_at: np.ndarray) -> np.ndarray:
        """[n] float64: how many blocks' computing is saved by fetching behind those that are known at hand.

        Args:
            homes: [n] numbers.
            known: [n] blocks that each has at hand.
            known_at: [numbers] blocks that the index knows under each number.
        """
        if not len(self._own):
            return np.zeros(len(homes))
        self._grow(int(homes.max()) + 1)
        own, shared = self._own[homes], self._shared[homes]
        in_own = np.where(own == NO_TIER, 0, known_at[own])
        most_shared = known_at[self._shared_numbers].max(initial=0)
        in_shared = np.where(shared == NO_TIER, 0, most_shared)
        saved_own = np.maximum(0, in_own - known) * (1 - self._own_share[homes])
        saved_shared = np.maximum(0, in_shared - known) * (1 - self._shared_share[homes])
        return np.maximum(saved_own, saved_shared)

    def _grow(self, num_homes: int) -> None:
        num_more = num_homes - len(self._own)
        if num_more > 0:
            self._own, self._shared = (
                np.pad(each, (0, num_more), constant_values=NO_TIER) for each in (self._own, self._shared)
            )
            self._own_share, self._shared_share = (
                np.pad(each, (0, num_more)) for each in (self._own_share, self._shared_share)
            )
