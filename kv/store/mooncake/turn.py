"""A caller's turn at the store: calls of the library that are not waited for longer than they may take."""

import time
from collections.abc import Callable, Sequence
from functools import partial

from moonshard.kv.store.mooncake.lanes import Lane
from moonshard.kv.store.mooncake.library import FAILED, HEALTHY, RPC_FAILED, Library
from moonshard.kv.store.mooncake.session import Session
from moonshard.kv.store.tier import MissCause

REMAPPED_S = 4.0  # within which the library tells a new client of the memory by itself


class NoAnswer(Exception):
    """Every block that was asked for is a miss."""

    def __init__(self, cause: MissCause):
        super().__init__(cause)
        self.cause = cause


class Turn:
    """The calls of one caller, one after another on its lane. Whatever goes wrong with one leaves the store alone."""

    def __init__(
        self,
        session: Session,
        lane: Lane,
        *,
        num_lanes: int,
        limit_s: float,
        is_probe: bool,
        settle: Callable[[MissCause | None], None],
        give_up_session: Callable[[], None],
    ):
        """`settle` is told after each call what went wrong, `give_up_session` that the store lost its memory."""
        self._session = session
        self._lane = lane
        self._limit_s = limit_s
        self._is_probe = is_probe
        self._settle_with = settle
        self._give_up_session = give_up_session
        self._is_settled = False
        num_rows = len(session.rows) // num_lanes
        self._first_row = lane.index * num_rows
        self.rows = session.rows[self._first_row : self._first_row + num_rows]  # nobody else's until the calls return

    def addresses(self, rows: Sequence[int]) -> list[int]:
        return [self._session.row_address(self._first_row + row) for row in rows]

    def ask(self, call: Callable[[Library], list[int]]) -> list[int]:
        """What the library says of each key. NoAnswer where it says nothing in time, or that it could not ask."""
        if self._is_probe and self._session.library.health_check() != HEALTHY:  # a call would log a line per key
            raise self._failed(MissCause.IO_ERROR)
        try:
            codes = self._lane.call(partial(call, self._session.library), timeout_s=self._limit_s)
        except TimeoutError:
            raise self._failed(MissCause.TIMED_OUT) from None
        except RuntimeError:  # what C++ throws
            raise self._failed(MissCause.IO_ERROR) from None
        if any(code == FAILED or code <= RPC_FAILED for code in codes):
            raise self._failed(MissCause.IO_ERROR)
        self._settle(None)
        return codes

    def leave_with(self, call: Callable[[Library], list[int]]) -> None:
        """A last call, for which nobody waits."""
        self._lane.start(partial(call, self._session.library))

    def check_mapping(self, *, seems_lost: bool) -> None:
        """NoAnswer where the client does not know the memory: a new one soon will, any other never again."""
        if not seems_lost:
            self._session.lost_since_s = None
            return
        now_s = time.perf_counter()
        if self._session.lost_since_s is None:
            self._session.lost_since_s = now_s
        elif now_s - self._session.lost_since_s > REMAPPED_S:
            self._give_up_session()
        raise self._failed(MissCause.IO_ERROR)

    def end(self) -> None:
        """A turn without a call, as when the caller's arrays have other shapes, must not look like one that goes on."""
        if not self._is_settled:
            self._settle(MissCause.IO_ERROR)

    def _failed(self, cause: MissCause) -> NoAnswer:
        self._settle(cause)
        return NoAnswer(cause)

    def _settle(self, cause: MissCause | None) -> None:
        self._is_settled = True
        self._settle_with(cause)
