"""What homes have to do, in tokens: a column each, by the number that the router gave the home.

Columns and not objects, since a decision looks at every worker, and there may be a thousand. Pure.
"""

import numpy as np

SILENT = NEVER = -1
FIRST_CAPACITY = 16
HALF_LIFE_S = 60.0  # of what a home was given lately, and of a conversation without a turn


class Loads:
    """Columns [capacity], of which the first `len` are homes.

    int64 of tokens, but for `recent` and `conversations`, which are float64, and `last_choice`.
    """

    def __init__(self) -> None:
        self.in_flight = _column(0)  # reserved and not released
        self.unseen = _column(0)  # of these, what the worker does not report yet
        self.reported = _column(SILENT)  # what the worker says that it has to do
        self.total = _column(0)  # of prompts, ever given to it to be computed or landed
        self.recent = _column(0).astype(np.float64)  # likewise, halved every `HALF_LIFE_S`, as of the last `decay`
        self.conversations = _column(0).astype(np.float64)  # that had their last turn there, halved likewise
        self.last_choice = _column(NEVER)  # in decisions
        self.decayed_s = 0.0  # when that was
        self._num_homes = 0
        self._free: list[int] = []  # numbers of homes that are no more

    def __len__(self) -> int:
        """One more than the largest number of a home, ever."""
        return self._num_homes

    def append(self) -> int:
        """Adds a home that has nothing to do yet; returns its number."""
        if self._free:
            return self._free.pop()
        number = self._num_homes
        if number == len(self.in_flight):
            self._grow()
        self._num_homes += 1
        return number

    def free(self, number: int) -> None:
        """The home is no more: another one is given its number."""
        for column in (self.in_flight, self.unseen, self.total, self.recent, self.conversations):
            column[number] = 0
        self.reported[number], self.last_choice[number] = SILENT, NEVER
        self._free.append(number)

    def decay(self, now_s: float) -> None:
        """Lets what was given lately count less as time goes on. A clock that goes back changes nothing."""
        elapsed_s = max(0.0, now_s - self.decayed_s)
        self.decayed_s += elapsed_s
        self.recent *= _left_after(elapsed_s)
        self.conversations *= _left_after(elapsed_s)

    def give(self, number: int, num_tokens: int) -> None:
        """Counts work given to a home, at the time of the last `decay`."""
        self.total[number] += num_tokens
        self.recent[number] += num_tokens

    def take_back(self, number: int, num_tokens: int, given_s: float) -> None:
        """Takes back work that was given at that time, as much as still counts of it."""
        self.total[number] -= num_tokens
        left = num_tokens * _left_after(self.decayed_s - given_s)
        self.recent[number] = max(0.0, self.recent[number] - left)

    def come(self, number: int, given_s: float) -> None:
        """A conversation had its last turn on this home, at that time."""
        self.conversations[number] += _left_after(self.decayed_s - given_s)

    def leave(self, number: int, given_s: float) -> None:
        """A conversation whose last turn was given to this home, at that time, now has a later turn, here or
        elsewhere.
        """
        left = _left_after(self.decayed_s - given_s)
        self.conversations[number] = max(0.0, self.conversations[number] - left)

    def queued(self, numbers: np.ndarray) -> np.ndarray:
        """[n] queued tokens of the homes `numbers` [n]: as reported, and what no report counts yet. A home without
        reports counts what is in flight.
        """
        reported = self.reported[numbers]
        return np.where(reported == SILENT, self.in_flight[numbers], reported + self.unseen[numbers])

    def _grow(self) -> None:
        self.in_flight = _doubled(self.in_flight, 0)
        self.unseen = _doubled(self.unseen, 0)
        self.reported = _doubled(self.reported, SILENT)
        self.total = _doubled(self.total, 0)
        self.recent = _doubled(self.recent, 0)
        self.conversations = _doubled(self.conversations, 0)
        self.last_choice = _doubled(self.last_choice, NEVER)


def _left_after(elapsed_s: float) -> float:
    """Which part of 1 still counts after that time."""
    return 0.5 ** (elapsed_s / HALF_LIFE_S)


def _column(value: int) -> np.ndarray:
    return np.full(FIRST_CAPACITY, value, np.int64)


def _doubled(column: np.ndarray, value: int) -> np.ndarray:
    return np.concatenate([column, np.full_like(column, value)])
