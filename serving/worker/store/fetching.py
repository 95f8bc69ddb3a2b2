"""Requests that wait until blocks of their prompt came up from a tier: each is begun then, as if it came then.

A request takes blocks that nobody else has; what is fetched lands there, is noted in the prefix cache and released, and
the request is begun: it finds them there like any others. It waits no longer than `control.tiers.fetches` says, and
what comes later than that is not landed. Until it is begun nothing of a request reaches the worker but its end.

Where there is no room for its blocks, or others wait for room before it, a request is begun at once and keeps its place
among those who wait. When it could be admitted, there is room: then its blocks are fetched, and it enters behind that.
Were they fetched before, others would take their room again; were they not, whoever had once to wait would be computed,
and all behind it for want of the time that this takes.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from moonshard.kv.blocks import BlockPool
from moonshard.kv.prefix import BlockName
from moonshard.serving.control.batching.scheduler import Scheduler
from moonshard.serving.control.tiers.fetches import NOTHING, UNKNOWN_WAIT_S, FetchPlan, FetchTimes, runs_of
from moonshard.serving.engine.engine import Engine
from moonshard.serving.wire.link import Link
from moonshard.serving.worker.background import Background
from moonshard.serving.worker.roles.held import Held, Wait
from moonshard.serving.worker.store.places import Came, Place
from moonshard.serving.worker.store.threads import Asked

FIND_WAIT_S = 0.05  # for what the tiers say they have


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A prompt that is about to be computed in a partition."""

    partition: int
    names: Sequence[BlockName]  # of its full blocks


class FetchedFirst:
    """The requests of all links that wait. On the event loop.

    `places` and `times`: of each partition. `on_found` is told which tier of a partition has each block of a chain,
    `on_fetched` which of them came up, `on_came` how many tokens came from each tier of a request that was begun
    already.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        scheduler: Scheduler,
        pool: BlockPool,
        places: Sequence[Place],
        times: Sequence[FetchTimes],
        on_found: Callable[[int, Sequence[BlockName], Sequence[str | None]], None],
        on_fetched: Callable[[int, Sequence[BlockName]], None],
        on_came: Callable[[bytes, dict[str, int]], None],
    ):
        self._on_found = on_found
        self._engine = engine
        self._scheduler = scheduler
        self._pool = pool
        self._cache = scheduler.cache
        self._places = places
        self._times = times
        self._on_fetched = on_fetched
        self._held = Held[Wanted]()
        self._leaders: dict[tuple[int, BlockName], asyncio.Future[None]] = {}  # who fetches from that block on
        self._background = Background(engine.fail)
        self._on_came = on_came
        self._later = Held[_Later]()  # begun without room for what tiers have of them
        scheduler.bring_with(self.bring_now)
        self.num_late = 0  # fetches that were not waited for to the end

    @property
    def num_waiting(self) -> int:
        return len(self._held)

    def waiting_tokens(self, partition: int) -> int:
        """How many tokens the prompts have that wait here: the scheduler does not know of them yet."""
        num_blocks = sum(len(wait.what.names) for wait in self._held if wait.what.partition == partition)
        return num_blocks * self._pool.block_size

    def begin(self, request_id: bytes, wanted: Wanted, link: Link, begin: Callable[[dict[str, int]], None]) -> None:
        """Calls `begin` with the tokens that came from each tier: now, where there is nothing to wait for.

        A message that says the same again changes nothing. Of one that came over another link it is for whoever begins
        it to say what is wrong.
        """
        if (wait := self._held.get(request_id)) is not None and wait.link is link:
            return
        if wait is not None or self._places[wanted.partition].is_full:
            begin({})
            return
        if not self._missing(wanted):
            begin({})
            if self._scheduler.num_blocks_due(wanted.partition):  # most likely it waits, too
                self._put_off(request_id, link, wanted, {})
            return
        self._background.spawn(self._fetch_first(self._held.hold(request_id, link, wanted), begin))

    def drop(self, request_id: bytes, link: Link) -> None:
        """The request is over, where it waits and came over this link."""
        self._held.drop(request_id, link)
        self._later.drop(request_id, link)

    def close_link(self, link: Link) -> None:
        self._held.close_link(link)
        self._later.close_link(link)

    def tick(self) -> None:
        """Forgets who ended before it was their turn."""
        for wait in [each for each in self._later if not self._scheduler.serves(each.request_id)]:
            self._later.let_go(wait)

    # ---- what happens meanwhile

    async def _fetch_first(self, wait: Wait[Wanted], begin: Callable[[dict[str, int]], None]) -> None:
        wanted, began_s = wait.what, time.perf_counter()
        await self._follow(wanted)
        brought = None if self._held.is_over(wait) else await self._bring(wait, began_s)
        is_wanted = self._held.let_go(wait)
        landed = _NONE
        if brought is not None:
            landed = self._land(wanted, brought) if is_wanted else self._drop(wanted, brought)
        if is_wanted:
            begin(landed.tokens)  # it holds at once what it finds, if it can be admitted
        if landed.blocks:
            self._pool.release(wanted.partition, landed.blocks[::-1])
            self._engine.wake()

    async def _follow(self, wanted: Wanted) -> None:
        """Waits for another request that fetches the next block of this one's, too: it may bring all of them."""
        missing = self._missing(wanted)
        if missing and (leader := self._leaders.get((wanted.partition, missing[0]))) is not None:
            wait_s = self._times[wanted.partition].compute_s(len(missing) * self._pool.block_size) or UNKNOWN_WAIT_S
            await asyncio.wait([leader], timeout=wait_s)

    def _missing(self, wanted: Wanted) -> Sequence[BlockName]:
        return wanted.names[len(self._cache.match(wanted.partition, wanted.names)) :]

    async def _bring(self, wait: Wait[Wanted], began_s: float) -> "_Brought | None":
        """The first blocks that the cache lacks, and room for them. None where none are worth it, or it is not its
        turn: then it is asked about when it could be admitted.
        """
        wanted = wait.what
        missing = self._missing(wanted)
        place = self._places[wanted.partition]
        if not missing or place.is_full:
            return None
        with self._leading(wanted.partition, missing[0]):
            kept = dict(zip(missing, await self._find(wait, missing), strict=False))
            num_found = len(wanted.names) - len(self._missing(wanted))
            plan = self._plan(wanted, num_found, kept, self._tokens_ahead(wanted.partition))
            left_s = plan.wait_s - (time.perf_counter() - began_s)
            if left_s <= 0 or self._held.is_over(wait) or place.is_full:
                return None
            is_first = not self._scheduler.num_blocks_due(wanted.partition)
            taken = self._take(wanted, num_found, plan.num_blocks) if is_first else None
            if taken is None:
                self._put_off(wait.request_id, wait.link, wanted, kept)
                return None
            came = await self._fetch_planned(wanted, num_found, replace(plan, wait_s=left_s))
            return _Brought(num_found, taken, came)

    def bring_now(self, request_id: bytes) -> bool:
        """Whether blocks are being fetched of a request that could be admitted: then it is, once they have landed."""
        wait = self._later.get(request_id)
        if wait is None or self._places[wait.what.wanted.partition].is_full:
            return False
        wanted = wait.what.wanted
        missing = self._missing(wanted)
        if missing and (leader := self._leaders.get((wanted.partition, missing[0]))) is not None:
            self._background.spawn(self._stand_aside(wait, leader))
            return True
        self._later.let_go(wait)
        num_found = len(wanted.names) - len(missing)
        plan = self._plan(wanted, num_found, wait.what.tiers, 0)
        taken = self._take(wanted, num_found, plan.num_blocks) if plan.wait_s else None
        if taken is None:
            return False
        leading = contextlib.ExitStack()
        leading.enter_context(self._leading(wanted.partition, missing[0]))  # now: the next in line may want the same
        self._background.spawn(self._bring_aside(request_id, wanted, num_found, taken, plan, leading))
        return True

    async def _stand_aside(self, wait: "Wait[_Later]", leader: asyncio.Future[None]) -> None:
        """Another request fetches the next block of this one's: it is asked about once more when that is over."""
        await asyncio.wait([leader])
        self._scheduler.take_back(wait.what.wanted.partition, wait.request_id)
        self._engine.wake()

    async def _bring_aside(
        self,
        request_id: bytes,
        wanted: Wanted,
        num_found: int,
        taken: tuple[int, ...],
        plan: FetchPlan,
        leading: contextlib.ExitStack,
    ) -> None:
        with leading:
            came = await self._fetch_planned(wanted, num_found, plan)
            landed = self._land(wanted, _Brought(num_found, taken, came))
        if landed.tokens:
            self._on_came(request_id, landed.tokens)
        self._scheduler.take_back(wanted.partition, request_id)
        self._engine.wake()  # it is the first in line, and holds at once what it finds, if it can
        self._pool.release(wanted.partition, landed.blocks[::-1])
        self._engine.wake()

    @contextlib.contextmanager
    def _leading(self, partition: int, first: BlockName) -> Iterator[None]:
        """Within the block this is who fetches from that block on, unless somebody did before."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._leaders.setdefault((partition, first), over)
        try:
            yield
        finally:
            asyncio.get_running_loop().call_soon(over.set_result, None)  # once they have landed
            if self._leaders.get((partition, first)) is over:
                del self._leaders[partition, first]

    def _plan(
        self, wanted: Wanted, num_found: int, tiers: Mapping[BlockName, str | None], num_tokens_ahead: int
    ) -> FetchPlan:
        """What to fetch behind the first so many blocks, by where its blocks were, and to wait for: nothing of what is
        only tried, to see how long it takes.
        """
        behind = [tiers.get(name) for name in wanted.names[num_found:]]
        plan = self._times[wanted.partition].plan(runs_of(behind), num_tokens_ahead, time.perf_counter())
        place = self._places[wanted.partition]
        if plan.num_blocks and not plan.wait_s and not place.is_full:
            self._background.spawn(self._try_out(wanted.partition, self._ask(wanted, num_found, plan)))
        return plan if plan.wait_s else NOTHING

    async def _try_out(self, partition: int, asked: Asked[Came]) -> None:
        came = await asked.future
        self._places[partition].drop(came)
        self._note(partition, came)

    def _take(self, wanted: Wanted, num_found: int, num_blocks: int) -> tuple[int, ...] | None:
        """Holds the first `num_found` blocks, and takes so many behind them; None, and nothing changes, where they are
        gone, or there is no room.
        """
        before = self._cache.match(wanted.partition, wanted.names[:num_found])
        if len(before) < num_found:
            return None
        self._cache.hold(wanted.partition, before)
        blocks = self._pool.allocate(wanted.partition, num_blocks)
        if blocks is None:
            self._pool.release(wanted.partition, before[::-1])
            return None
        return before + blocks

    async def _find(self, wait: Wait[Wanted], chain: Sequence[BlockName]) -> Sequence[str | None]:
        """Which tier has each block. On a busy machine it may be long before that is known: then the request is begun,
        and what is told later is still of use where it has to wait.
        """
        partition = wait.what.partition
        asked = self._places[partition].find(chain)
        if not await asked.within(FIND_WAIT_S):
            tiers = self._put_off(wait.request_id, wait.link, wait.what, dict.fromkeys(chain))
            self._background.spawn(self._find_late(partition, chain, asked, tiers))
            return ()
        self._on_found(partition, chain, asked.future.result())
        return asked.future.result()

    async def _find_late(
        self,
        partition: int,
        chain: Sequence[BlockName],
        asked: Asked[list[str | None]],
        tiers: dict[BlockName, str | None],
    ) -> None:
        await asyncio.wait([asked.future])
        if not asked.future.cancelled():  # as it is where this ends first
            self._on_found(partition, chain, asked.future.result())
            tiers.update(zip(chain, asked.future.result(), strict=True))

    def _put_off(
        self, request_id: bytes, link: Link, wanted: Wanted, tiers: dict[BlockName, str | None]
    ) -> dict[BlockName, str | None]:
        """It is asked about when it could be admitted, and by then more may be told of its tiers: of what the device
        has now, too, and may have lost by then.
        """
        self._later.hold(request_id, link, _Later(wanted, tiers))
        rest = [name for name in wanted.names if name not in tiers]
        place = self._places[wanted.partition]
        if rest and not place.is_full:
            self._background.spawn(self._find_late(wanted.partition, rest, place.find(rest), tiers))
        return tiers

    def _tokens_ahead(self, partition: int) -> int:
        return self._engine.counters().queued_tokens[partition]

    async def _fetch_planned(self, wanted: Wanted, num_found: int, plan: FetchPlan) -> Came | None:
        """None where they did not come in time."""
        asked_s, asked = time.perf_counter(), self._ask(wanted, num_found, plan)
        if await asked.within(plan.wait_s):
            self._note(wanted.partition, asked.future.result())
            return asked.future.result()
        self.num_late += 1
        if not asked.give_up():
            self._background.spawn(self._note_late(wanted.partition, asked, plan, asked_s))
        return None

    def _ask(self, wanted: Wanted, num_found: int, plan: FetchPlan) -> Asked[Came]:
        """For what is planned behind the first so many blocks."""
        chain = wanted.names[num_found : num_found + plan.num_blocks]
        tiers = [run.tier for run in plan.runs for _ in range(run.num_blocks)]
        return self._places[wanted.partition].fetch(chain, tiers)

    async def _note_late(self, partition: int, asked: Asked[Came], plan: FetchPlan, asked_s: float) -> None:
        """Until it is known how long it takes, it takes as long as it has taken, and the farthest tier is to blame."""
        farthest = plan.runs[-1]
        self._times[partition].fetched(farthest.tier, farthest.num_blocks, time.perf_counter() - asked_s)
        await self._try_out(partition, asked)

    def _note(self, partition: int, came: Came) -> None:
        for run in came.runs:
            if run.num_blocks == run.num_asked:  # what failed says nothing of how long it takes
                self._times[partition].fetched(run.tier, run.num_blocks, run.seconds)

    # ---- what came

    def _land(self, wanted: Wanted, brought: "_Brought") -> "_Landed":
        """Lands what the cache still lacks. What it holds is the caller's to release."""
        came = brought.came
        if came is None:
            return _Landed(brought.taken, {})
        partition, cache, names = wanted.partition, self._cache, wanted.names
        before = cache.match(partition, names)  # others may have computed more of it meanwhile
        cache.hold(partition, before)
        num_new = max(0, brought.num_found + len(came.names) - len(before))
        blocks = brought.taken[brought.num_found :][:num_new]
        if blocks:
            self._places[partition].land(partition, blocks, came, len(before) - brought.num_found)
            for index, block in enumerate(blocks, len(before)):
                cache.note(partition, block, names[index], names[index - 1] if index else None)
            self._on_fetched(partition, came.names)
        else:
            self._places[partition].drop(came)
        spare = brought.taken[: brought.num_found] + brought.taken[brought.num_found + len(blocks) :]
        self._pool.release(partition, spare[::-1])
        return _Landed(before + blocks, self._tokens_of(came, len(blocks)))

    def _drop(self, wanted: Wanted, brought: "_Brought") -> "_Landed":
        """The request is over: nothing of what came is landed."""
        if brought.came is not None:
            self._places[wanted.partition].drop(brought.came)
        return _Landed(brought.taken, {})

    def _tokens_of(self, came: Came, num_landed: int) -> dict[str, int]:
        """The tokens that came from each tier: those of the last blocks that were fetched."""
        tiers = [run.tier for run in came.runs for _ in range(run.num_blocks)]
        tokens = dict[str, int]()
        for tier in tiers[len(tiers) - num_landed :]:
            tokens[tier] = tokens.get(tier, 0) + self._pool.block_size
        return tokens


@dataclass(frozen=True, slots=True)
class _Later:
    """A request that waits for a slot and blocks, and which tier had each of its blocks, as far as that was told."""

    wanted: Wanted
    tiers: Mapping[BlockName, str | None]


@dataclass(frozen=True, slots=True)
class _Brought:
    """Blocks that are held: those that the cache had, and behind them as many as were to be fetched."""

    num_found: int  # of the former
    taken: tuple[int, ...]
    came: Came | None  # None: it did not come in time


@dataclass(frozen=True, slots=True)
class _Landed:
    """Blocks that are held for a request that is about to begin, and the tokens that came from each tier."""

    blocks: tuple[int, ...]
    tokens: dict[str, int]


_NONE = _Landed((), {})
