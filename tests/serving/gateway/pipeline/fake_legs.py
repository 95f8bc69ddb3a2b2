"""The two legs of a handoff as a scripted worker plays them: the messages of real ones, without KV.

A block's checksum is the sum of its tokens, so that the decode leg can tell whether every block of the prompt came once
and is what it should be.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from moonshard.rpc import link_pb2
from tests.serving.gateway.fake_script import BLOCK_SIZE, Generation, LegFailed, Script

type Send = Callable[[link_pb2.WorkerMessage], None]

PHASES = link_pb2.TransferPhases(transfer_ms=0.05, exposed_ms=0.01)
CORRUPT = link_pb2.Failed(
    code=15, message="what arrived is not what its checksums say", cause=link_pb2.HANDOFF_CAUSE_CORRUPT
)


def checksum(run: link_pb2.Run, block: int) -> int:
    return sum(run.prompt_tokens[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE])


class PrefillLeg:
    """Publishes the prompt in chunks as grants allow, and sends the first tokens."""

    def __init__(self, run: link_pb2.Run, script: Script, send: Send):
        self._run, self._script, self._send = run, script, send
        self._grants: asyncio.Queue[link_pb2.Grant] = asyncio.Queue()
        self.credit(run.target.grants)

    def credit(self, grants: Iterable[link_pb2.Grant]) -> None:
        for grant in grants:
            self._grants.put_nowait(grant)

    async def play(self) -> None:
        target = self._run.target
        blocks = range(target.num_blocks_held, target.num_blocks)
        *chunks, last = itertools.batched(blocks, self._script.blocks_per_chunk)
        for number, chunk in enumerate(chunks):
            await self._script.points.at(f"chunk {number}")
            await self._publish(chunk, is_last=False)
        if not self._script.are_first_tokens_late:
            await self._send_first_tokens()
        await self._script.points.at("last_chunk")
        await self._publish(last, is_last=True)
        if self._script.are_first_tokens_late:
            await self._send_first_tokens()

    async def _publish(self, blocks: tuple[int, ...], *, is_last: bool) -> None:
        target = self._run.target
        manifest = link_pb2.Manifest(
            handoff=self._run.request_id,
            writer_epoch=target.writer_epoch,
            target_epoch=target.epoch,
            blocks=blocks,
            grants=[await self._grants.get() for _ in blocks],
            checksums=[checksum(self._run, block) for block in blocks],
            is_last=is_last,
            phases=PHASES if is_last else None,
        )
        self._send(link_pb2.WorkerMessage(chunk=manifest))

    async def _send_first_tokens(self) -> None:
        await self._script.points.at("first_tokens")
        target = self._run.target
        first = link_pb2.FirstTokens(
            handoff=self._run.request_id,
            writer_epoch=target.writer_epoch,
            target_epoch=target.epoch,
            outputs=Generation(self._run, self._script).step(),
        )
        self._send(link_pb2.WorkerMessage(first_tokens=first))


@dataclass
class DecodeLeg:
    """Grants cells, believes what is said to have landed, and says when it can decode."""

    reserve: link_pb2.Reserve
    epoch: bytes
    script: Script
    send: Send
    heard: asyncio.Queue[link_pb2.Manifest | link_pb2.Start] = field(default_factory=asyncio.Queue)
    numbers: Iterator[int] = field(default_factory=itertools.count)  # of grants
    granted: set[int] = field(default_factory=set)  # numbers that are out
    missing: set[int] = field(default_factory=set)  # blocks

    async def play(self) -> Generation:
        """Plays the leg from Reserve to the join. LegFailed where the script says so, or the manifests are wrong."""
        run = self.reserve.run
        await self.script.points.at("target")
        if self.script.reserve_failure is not None:
            raise LegFailed(self.script.reserve_failure)
        num_blocks = -(-len(run.prompt_tokens) // BLOCK_SIZE)
        num_held = min(self.script.num_blocks_held, num_blocks - 1)
        self.missing = set(range(num_held, num_blocks))
        target = link_pb2.Target(
            handoff=run.request_id,
            epoch=self.epoch,
            writer_epoch=self.reserve.writer_epoch,
            session="127.0.0.1:1",
            num_blocks=num_blocks,
            num_blocks_held=num_held,
            grants=self._grant(min(self.script.num_grants, len(self.missing))),
            lease_s=self.reserve.lease_s,
            queue_ms=self.script.reserve_queue_ms,
        )
        self.send(link_pb2.WorkerMessage(target=target))
        num_landed = 0
        while isinstance(message := await self.heard.get(), link_pb2.Manifest):
            await self.script.points.at(f"land {num_landed}")
            self._land(message)
            num_landed += 1
        await self.script.points.at("start")
        self._land(message.last)
        if self.missing or not message.last.is_last or len(message.token_ids) != run.n:
            raise LegFailed(CORRUPT)
        return Generation.after_first_tokens(run, self.script, message.token_ids)

    def _land(self, manifest: link_pb2.Manifest) -> None:
        run, numbers = self.reserve.run, {grant.number for grant in manifest.grants}
        epochs = manifest.writer_epoch, manifest.target_epoch
        is_right = (
            epochs == (self.reserve.writer_epoch, self.epoch)
            and self.granted.issuperset(numbers)
            and self.missing.issuperset(manifest.blocks)
            and list(manifest.checksums) == [checksum(run, block) for block in manifest.blocks]
        )
        if not is_right:
            raise LegFailed(CORRUPT)
        self.missing.difference_update(manifest.blocks)
        self.granted -= numbers
        grants = self._grant(min(len(numbers), len(self.missing) - len(self.granted)))
        if grants:
            credits = link_pb2.Credits(handoff=run.request_id, target_epoch=self.epoch, grants=grants)
            self.send(link_pb2.WorkerMessage(credits=credits))

    def _grant(self, num_slots: int) -> list[link_pb2.Grant]:
        numbers = tuple(itertools.islice(self.numbers, num_slots))
        self.granted.update(numbers)
        return [link_pb2.Grant(cell=number % self.script.num_grants, number=number) for number in numbers]
