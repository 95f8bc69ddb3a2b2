"""Servers beside each other: every row of every server, in turns, each sample watched and taken again if disturbed.

One server works at a time, when all others are idle; every other sample the order is turned round, and then another
begins, so that nobody always follows the same one. A server that is lost keeps what it has finished and
the rest of its cells stay empty, with a note; so does a cell whose request is refused.
"""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median

from moonshard.experiments.bench.peers.completions import Connection, Peer, PeerLost, RowRefused, client_of, connect
from moonshard.experiments.bench.peers.rows import Draw, Row, warm_up_of
from moonshard.experiments.bench.peers.watch import Window, listeners, settled, watched
from moonshard.experiments.common.running.measurement import Unit
from moonshard.models.folder.json_file import read_json_object, sub_object
from moonshard.models.spec import ModelError
from moonshard.models.tokenizers.tokenizer import load_tokenizer

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A cell: what one server gave in one row."""

    unit: Unit
    values: tuple[float, ...]  # of each request, or of each run; of all samples
    num_repeated: int = 0  # samples taken again
    num_disturbed: int = 0  # samples kept although foreign processes took part

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def best(self) -> float:
        return max(self.values) if self.unit == "tokens/s" else min(self.values)


@dataclass(slots=True)
class Comparison:
    """Cells by row and server. What is empty has a note."""

    servers: tuple[str, ...]
    figures: dict[tuple[str, str], Figure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A server to measure, and its processes where they are known."""

    peer: Peer
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    samples: int  # of each row and server
    tries: int  # of a sample that is disturbed


async def compare(
    contenders: Sequence[Contender], rows: Sequence[Row], folder: Path, effort: Effort, say: Say, seed: int
) -> Comparison:
    """Measures these servers, which run already.

    Args:
        folder: the checkpoint that they all serve.
        seed: of the prompts; a server that has seen them has them cached.
    """
    async with AsyncExitStack() as stack:
        comparison = Comparison(servers=tuple(each.peer.name for each in contenders))
        turns = _Turns(comparison=comparison, effort=effort, ids=prompt_ids(folder), seed=seed)
        tokenizer = load_tokenizer(folder)
        for each in contenders:
            http = await stack.enter_async_context(client_of(each.peer))
            try:
                connection = await connect(each.peer, http, tokenizer)
            except PeerLost as error:
                comparison.notes.append(f"{each.peer.name}: nothing was measured, {error}")
                continue
            pids = each.pids or tuple(listeners(each.peer.url))
            turns.running[each.peer.name] = _Running(connection=connection, pids=pids)
            if connection.tokenizer is not None:
                comparison.notes.append(f"{each.peer.name}: takes no token ids, so it was sent their text")
        for row in rows:
            await turns.measure(row, say)
    return comparison


def prompt_ids(folder: Path) -> list[int]:
    """The ids that a model has, without those that only a chat template writes."""
    tokenizer = load_tokenizer(folder)
    special = set(tokenizer.special_tokens.values()) if tokenizer else set()
    config = read_json_object(folder / "config.json", ModelError)
    vocab_size = config.get("vocab_size") or sub_object(config, "text_config").get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ModelError(f"{folder}/config.json: no vocab_size")
    known = vocab_size if tokenizer is None else min(vocab_size, tokenizer.vocab_size)
    return [index for index in range(known) if index not in special]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Running:
    connection: Connection
    pids: tuple[int, ...]


@dataclass(kw_only=True, slots=True)
class _Samples:
    values: list[float] = field(default_factory=list)
    num_repeated: int = 0
    num_disturbed: int = 0


@dataclass(kw_only=True, slots=True)
class _Turns:
    """The servers that still answer, and what they have given."""

    comparison: Comparison
    effort: Effort
    ids: Sequence[int]
    seed: int
    running: dict[str, _Running] = field(default_factory=dict)

    async def measure(self, row: Row, say: Say) -> None:
        """One row of all servers. The first run of each warms up and does not count."""
        found = {name: _Samples() for name in self.running}
        for index in range(-1, self.effort.samples):
            for name in _in_turn([name for name in found if name in self.running], max(index, 0)):
                which = "warm-up" if index < 0 else f"sample {index + 1} of {self.effort.samples}"
                say(f"{row.name}: {name}, {which}")
                try:
                    if index < 0:
                        await self._run(warm_up_of(row), self.running[name], "warm-up")
                    else:
                        await self._sample(row, self.running[name], index, found[name], say)
                except PeerLost as error:
                    del self.running[name], found[name]
                    self.comparison.notes.append(f"{name}: was lost in the row of {row.name}, {error}")
                except RowRefused as error:
                    del found[name]
                    self.comparison.notes.append(f"{name}: no {row.name}, {error}")
        for name, samples in found.items():
            self.comparison.figures[row.name, name] = Figure(
                unit=row.unit,
                values=tuple(samples.values),
                num_repeated=samples.num_repeated,
                num_disturbed=samples.num_disturbed,
            )

    async def _sample(self, row: Row, server: _Running, index: int, samples: _Samples, say: Say) -> None:
        """Adds one sample; one that is disturbed is taken again, and the last try is kept even so."""
        window, values = await self._run(row, server, f"{index} 0")
        for attempt in range(1, self.effort.tries):
            if not window.is_disturbed:
                break
            say(f"disturbed: others had {window.foreign_share:.0%} of a core for {window.elapsed_s:.1f} s, once more")
            samples.num_repeated += 1
            window, values = await self._run(row, server, f"{index} {attempt}")
        samples.num_disturbed += window.is_disturbed
        samples.values += values

    async def _run(self, row: Row, server: _Running, which: str) -> tuple[Window, list[float]]:
        draw = Draw(random=Random(f"{self.seed} {row.name} {which}"), ids=self.ids)
        await settled()
        with watched(server.pids) as window:
            values = await row.run(server.connection, draw)
        return window, values


def _in_turn(names: list[str], index: int) -> list[str]:
    first = index // 2 % max(len(names), 1)
    turned = [*names[first:], *names[:first]]
    return turned[::-1] if index % 2 else turned
