"""One worker's end of Mooncake Store, as a tier."""

import contextlib
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from moonshard.kv.prefix import BlockName
from moonshard.kv.slab import Bytes
from moonshard.kv.store.mooncake.breaker import Attempt, Breaker
from moonshard.kv.store.mooncake.faults import StoreUnavailable
from moonshard.kv.store.mooncake.lanes import Lanes
from moonshard.kv.store.mooncake.library import BAD_PARAMETERS, new_library
from moonshard.kv.store.mooncake.session import Session
from moonshard.kv.store.mooncake.turn import NoAnswer, Turn
from moonshard.kv.store.mooncake.values import Values
from moonshard.kv.store.tier import MissCause, TierCounters

ROW_ALIGNMENT_BYTES = 64
CLOSE_S = 1.0
WRONG_CAUSES = (MissCause.CORRUPT, MissCause.WRONG_LENGTH)


@dataclass(frozen=True, kw_only=True, slots=True)
class MooncakeStoreConfig:
    """Limits of one worker's end."""

    address: str  # host:port of `mooncake_client` on this machine
    timeout_s: float = 0.05  # of one call, besides what its bytes may take
    unhurried_timeout_s: float = 1.0  # of one that nobody waits for, on a thread that gives way to all others
    min_bytes_per_second: float = 0.5e9  # what is slower counts as hung
    max_call_bytes: int = 16 * 1024 * 1024  # of one call: more blocks go in several
    max_calls: int = 4  # at once; so many may hang
    rest_s: float = 5.0  # after a failure
    max_tries: int = 3  # to keep what finds no space
    retry_pause_s: float = 0.02


class MooncakeStoreTier:
    """One worker's end, made by `start`. It is off until the store answers, and comes back when the store does.

    Counters are of this worker alone. `find` counts misses only where it got no answer.
    """

    name = "store"
    is_shared = True

    def __init__(
        self,
        *,
        layout: bytes,
        block_bytes: int,
        config: MooncakeStoreConfig,
        on_change: Callable[[str | None], None] = lambda _why: None,
    ):
        """`on_change` is told, on any thread, why nothing is to be had, once that is sure, and None when it is over."""
        self.block_bytes = block_bytes
        self._on_change = on_change
        self._config = config
        self._values = Values(layout, block_bytes)
        self._row_bytes = -(-self._values.num_bytes // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES
        self._rows_per_call = max(1, config.max_call_bytes // self._row_bytes)
        self._lanes = Lanes(config.max_calls, "mooncake-store")
        self._closing = threading.Event()
        self._lock = threading.Lock()  # of the five below
        self._why_off: str | None = None  # as was told
        self._breaker = Breaker(rest_s=config.rest_s)
        self._unhurried_from_s = float("-inf")  # until then what nobody waits for is not attempted
        self._session: Session | None = None  # always there while the breaker is closed
        self._counts = Counter[str]()

    @classmethod
    def start(
        cls,
        *,
        layout: bytes,
        block_bytes: int,
        config: MooncakeStoreConfig,
        on_change: Callable[[str | None], None] = lambda _why: None,
    ) -> "MooncakeStoreTier":
        """Returns before the store has answered. Blocks of another `layout` than this are not found.

        StoreUnavailable where the library cannot be loaded, ValueError where the address is not host:port.
        """
        int(config.address.rpartition(":")[2])
        os.environ["MC_LOG_LEVEL"] = "ERROR"  # the library takes it from the environment alone, when it loads
        new_library()
        tier = cls(layout=layout, block_bytes=block_bytes, config=config, on_change=on_change)
        tier._lanes.begin()
        # the first turn begins to set the library up, on its lane
        with contextlib.suppress(NoAnswer), tier._turn(0):
            pass
        return tier

    @property
    def is_on(self) -> bool:
        """Whether the store answered when it was last asked."""
        with self._lock:
            return self._breaker.is_closed and not self._closing.is_set()

    @property
    def counters(self) -> TierCounters:
        with self._lock:
            counts = self._counts.copy()
        return TierCounters(
            is_up=self.is_on,
            num_hits=counts["hits"],
            num_misses={cause: counts[cause] for cause in MissCause if counts[cause]},
            num_kept=counts["kept"],
            num_not_kept=counts["not kept"],
            bytes_read=counts["hits"] * self.block_bytes,
            bytes_written=counts["kept"] * self.block_bytes,
        )

    def find(self, names: Sequence[BlockName]) -> list[bool]:
        if not names:
            return []
        try:
            return self._look_up(names, is_waited_for=True)
        except NoAnswer as no_answer:
            self._count(no_answer.cause, len(names))
            return [False] * len(names)

    def has(self, names: Sequence[BlockName]) -> Sequence[bool | None]:
        """See `Tier`: the master evicts what was asked about longest ago."""
        try:
            return self._look_up(names, is_waited_for=False) if names else []
        except NoAnswer:
            return [None] * len(names)

    def fetch(self, names: Sequence[BlockName], out: Bytes) -> list[bool]:
        return self._in_parts(self._fetch, names, out)

    def keep(self, names: Sequence[BlockName], blocks: Bytes) -> list[bool]:
        """See `Tier`. Counts what is there already as kept: the library does not tell."""
        return self._in_parts(self._keep, names, blocks)

    def held(self) -> list[BlockName]:
        """What others kept is found when it is asked for."""
        return []

    def upkeep(self) -> None:
        """The master does what there is to do."""

    def close(self) -> None:
        """See `Tier`. No other thread runs while the library closes, for up to a second."""
        self._closing.set()
        with self._lock:
            session, self._session = self._session, None
        is_quiet = self._lanes.close(timeout_s=CLOSE_S)
        if session is not None:
            (session.close if is_quiet else session.abandon)()  # the library is not closed under a call

    # ---- as many blocks as one call takes

    def _in_parts(
        self, do: Callable[[Sequence[BlockName], Bytes], list[bool]], names: Sequence[BlockName], rows: Bytes
    ) -> list[bool]:
        parts = [slice(start, start + self._rows_per_call) for start in range(0, len(names), self._rows_per_call)]
        return list(itertools.chain.from_iterable(do(names[part], rows[part]) for part in parts))

    def _look_up(self, names: Sequence[BlockName], *, is_waited_for: bool) -> list[bool]:
        """Raises NoAnswer."""
        keys = self._values.keys(names)
        with self._turn(0, is_waited_for=is_waited_for) as turn:
            return [code == 1 for code in turn.ask(lambda library: library.batch_is_exist(keys))]

    def _fetch(self, names: Sequence[BlockName], out: Bytes) -> list[bool]:
        try:
            with self._turn(len(names)) as turn:
                causes = self._read(turn, names, out)
        except NoAnswer as no_answer:
            causes = [no_answer.cause] * len(names)
        for cause, number in Counter(causes).items():
            self._count(cause or "hits", number)
        return [cause is None for cause in causes]

    def _read(self, turn: Turn, names: Sequence[BlockName], out: Bytes) -> list[MissCause | None]:
        """What was wrong with each. What was is removed: otherwise the block could never be kept again."""
        keys = self._values.keys(names)
        addresses, sizes = turn.addresses(range(len(names))), [self._row_bytes] * len(names)
        codes = turn.ask(lambda library: library.batch_get_into(keys, addresses, sizes))
        seems_lost = all(code == BAD_PARAMETERS for code in codes)
        if seems_lost:
            [num_bytes] = turn.ask(lambda library: [library.get_size(keys[0])])
            seems_lost = num_bytes <= self._row_bytes  # so it is not that they are too long
        turn.check_mapping(seems_lost=seems_lost)
        causes = [
            self._values.read(name, code, row, into)
            for name, code, row, into in zip(names, codes, turn.rows[: len(names)], out, strict=True)
        ]
        wrong = [key for key, cause in zip(keys, causes, strict=True) if cause in WRONG_CAUSES]
        if wrong:
            turn.leave_with(lambda library: library.batch_remove(wrong, True))
        return causes

    def _keep(self, names: Sequence[BlockName], blocks: Bytes) -> list[bool]:
        left: Sequence[int] = range(len(names))
        with contextlib.suppress(NoAnswer), self._turn(len(names), is_waited_for=False) as turn:
            for name, block, row in zip(names, blocks, turn.rows[: len(names)], strict=True):
                self._values.write(name, block, row)
            left = self._write(turn, names, left)
            for _ in range(self._config.max_tries - 1):
                if not left or self._closing.wait(self._config.retry_pause_s):
                    break
                left = self._write(turn, names, left)
        self._count("kept", len(names) - len(left))
        self._count("not kept", len(left))
        return [index not in left for index in range(len(names))]

    def _write(self, turn: Turn, names: Sequence[BlockName], rows: Sequence[int]) -> list[int]:
        """Those of the rows that found no space."""
        keys = self._values.keys([names[row] for row in rows])
        addresses, sizes = turn.addresses(rows), [self._values.num_bytes] * len(rows)
        codes = turn.ask(lambda library: library.batch_put_from(keys, addresses, sizes))
        turn.check_mapping(seems_lost=all(code == BAD_PARAMETERS for code in codes))
        return [row for row, code in zip(rows, codes, strict=True) if code != 0]

    # ---- whether to ask, and what came of it

    @contextlib.contextmanager
    def _turn(self, num_blocks: int, *, is_waited_for: bool = True) -> Iterator[Turn]:
        """The right to ask, with a lane and its memory. NoAnswer where the store is not to be asked now: where there is
        no session yet, one is being set up from now on.
        """
        timeout_s = self._config.timeout_s if is_waited_for else self._config.unhurried_timeout_s
        limit_s = timeout_s + num_blocks * self._row_bytes / self._config.min_bytes_per_second
        deadline_s = time.perf_counter() + limit_s
        with self._lanes.lane(timeout_s=limit_s) as lane:
            if self._closing.is_set() or self._lanes.are_stuck:
                raise NoAnswer(MissCause.OFF)
            if lane is None:
                raise NoAnswer(MissCause.TIMED_OUT)
            now_s = time.perf_counter()
            with self._lock:
                is_probe = not self._breaker.is_closed
                is_early = not is_waited_for and now_s < self._unhurried_from_s
                attempt, session = None if is_early else self._breaker.begin(now_s), self._session
            if attempt is None:
                raise NoAnswer(MissCause.OFF)
            if session is None:
                lane.start(partial(self._set_up, attempt))
                raise NoAnswer(MissCause.OFF)
            turn = Turn(
                session,
                lane,
                num_lanes=self._config.max_calls,
                limit_s=deadline_s - now_s,
                is_probe=is_probe,
                settle=partial(self._settle, attempt, is_waited_for=is_waited_for),
                give_up_session=partial(self._replace, session),
            )
            try:
                yield turn
            finally:
                turn.end()

    def _set_up(self, attempt: Attempt) -> None:
        session = None
        try:
            num_rows = self._config.max_calls * self._rows_per_call
            session = Session.open(self._config.address, num_rows=num_rows, row_bytes=self._row_bytes)
        except StoreUnavailable as error:
            self._tell(str(error))
        finally:
            with self._lock:
                is_wanted = session is not None and not self._closing.is_set()
                self._session = session if is_wanted else None
            self._settle(attempt, None if is_wanted else MissCause.IO_ERROR)
        if session is not None and not is_wanted:
            session.close()

    def _settle(self, attempt: Attempt, cause: MissCause | None, *, is_waited_for: bool = True) -> None:
        """What nobody waits for may be late for other reasons than the store's: then it alone is not attempted for a
        while, unless it was to tell whether all may go on.
        """
        now_s = time.perf_counter()
        with self._lock:
            was_on, has_session = self._breaker.is_closed, self._session is not None
            if cause is None:
                self._breaker.succeed(attempt)
            elif cause is MissCause.TIMED_OUT and not is_waited_for and was_on:
                self._unhurried_from_s = now_s + self._config.rest_s
            else:
                self._breaker.fail(attempt, now_s)
            is_on = self._breaker.is_closed
        if is_on and not was_on:
            self._tell(None)
        elif cause is not None and not was_on and has_session:  # not yet after the first failure: one may be late
            what = "does not answer in time" if cause is MissCause.TIMED_OUT else "fails"
            self._tell(f"mooncake_client at {self._config.address} {what}")

    def _replace(self, session: Session) -> None:
        """The next turn sets up another one."""
        with self._lock:
            if self._session is not session:
                return
            self._session = None
            self._breaker.trip(time.perf_counter())
        session.abandon()

    def _tell(self, why_off: str | None) -> None:
        """Each change once."""
        with self._lock:
            is_news = why_off != self._why_off and not self._closing.is_set()
            self._why_off = why_off
        if is_news:
            self._on_change(why_off)

    def _count(self, what: str, number: int) -> None:
        with self._lock:
            self._counts[what] += number
