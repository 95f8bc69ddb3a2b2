"""What homes have to do, in tokens: a column each, by the number that the router gave the home.

Columns and not objects, since a decision looks at every worker, and there may be a thousand. Pure.
"""

import numpy as np

SILENT = NEVER = -1
FIRST_CAPACITY = 16


_EMPTY = {"in_flight": 0, "unseen": 0, "reported": SILENT, "total": 0, "last_choice": NEVER}


class Loads:
    """Columns [capacity] int64, of which the first `len` are homes. All count tokens, `last_choice` decisions."""

    def __init__(self) -> None:
        self.in_flight = _column(0)  # reserved and not released
        self.unseen = _column(0)  # of these, what the worker does not report yet
        self.reported = _column(SILENT)  # what the worker says that it has to do
        self.total = _column(0)  # ever reserved
        self.last_choice = _column(NEVER)
        self._num_homes = 0

    def __len__(self) -> int:
        return self._num_homes

    def append(self) -> int:
        """The number of a home that has nothing to do yet."""
        number = self._num_homes
        if number == len(self.in_flight):
            for name, value in _EMPTY.items():
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.full_like(column, value)]))
        self._num_homes += 1
        return number

    def queued(self, numbers: np.ndarray) -> np.ndarray:
        """[n] of `numbers` [n]: as reported, with what no report has yet; where there are none, what is in flight."""
        reported = self.reported[numbers]
        return np.where(reported == SILENT, self.in_flight[numbers], reported + self.unseen[numbers])


def _column(value: int) -> np.ndarray:
    return np.full(FIRST_CAPACITY, value, np.int64)
