"""A prefill process, a decode process, a gateway and a bad network, in which handoffs are driven one event at a time.

Every choice follows from `pick`, so that a schedule is its seed. What must hold is asserted as it happens.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace

from moonshard.kv.blocks import PartitionCounts
from moonshard.serving.control.handoff import messages as m
from moonshard.serving.control.handoff import reservations as r
from moonshard.serving.control.handoff.gateway import (
    Deliver,
    GatewayAction,
    GatewaySide,
    Outcome,
    SendDecode,
    SendPrefill,
)
from moonshard.serving.control.request import Request
from tests.serving.control.handoff.processes import (
    BLOCK_SIZE,
    CACHED_NAME,
    EMPTY,
    GATEWAY,
    WRITE_TIMEOUT_S,
    DecodeProcess,
    LateWrite,
    Packet,
    PrefillProcess,
    PrefillTask,
    Tally,
    WriteUnderWay,
    checksum,
    late_writes,
)


class World:
    def __init__(self, num_partitions: int, is_calm: bool = False):
        self.num_partitions = num_partitions
        self.is_calm = is_calm  # streams in order, nothing lost, doubled or killed
        self.now_s = 0.0
        self.epochs = itertools.count(1)
        self.ids = itertools.count()
        self.gateway = GatewaySide()
        self.prefill = PrefillProcess(next(self.epochs), num_partitions)
        self.decode = DecodeProcess(next(self.epochs), num_partitions)
        self.network: list[Packet] = []
        self.late: list[LateWrite] = []
        self.outcomes: dict[bytes, m.Cause | None] = {}
        self.delivered: dict[bytes, tuple[int, ...]] = {}
        self.begun: dict[bytes, Request] = {}
        self.tally = Tally()
        calm = (
            [self.begin, self.end_decode]
            + [self.deliver] * 12
            + [self.prefill_block, self.stage, self.write] * 3
            + [self.copy] * 2
        )
        bad = [self.leave_client, self.drop, self.double, self.tear_write, self.tick, self.fail_write, self.fail_write]
        bad += [self.land_late] * 24 + [self.kill_prefill, self.kill_decode]
        self.actions: list[Callable[[int], None]] = [*calm, self.leave_client] if is_calm else calm * 4 + bad

    def act(self, action: int, pick: int) -> None:
        self.actions[action % len(self.actions)](pick)
        self.check_conservation()

    # ---- clients

    def begin(self, pick: int) -> None:
        handoff = next(self.ids).to_bytes(16)
        request = Request(id=handoff, prompt=(0,) * (1 + pick % (5 * BLOCK_SIZE)), max_tokens=8)
        lease_s = 10_000.0 if self.is_calm else 25.0
        reserve = m.Reserve(handoff=handoff, writer_epoch=self.prefill.epoch, lease_s=lease_s)
        self.begun[handoff] = request
        self.gateway_does(self.gateway.begin(reserve, self.decode.epoch, self.now_s))

    def leave_client(self, pick: int) -> None:
        unfinished = [handoff for handoff in self.begun if handoff not in self.outcomes]
        if unfinished:
            self.gateway_does(self.gateway.cancel(unfinished[pick % len(unfinished)]))

    # ---- the network

    def deliver(self, pick: int) -> None:
        if not self.network:
            return
        index = pick % len(self.network)
        if self.is_calm:
            channel = self.network[index].channel
            index = next(i for i, packet in enumerate(self.network) if packet.channel == channel)
        self.receive(self.network.pop(index))

    def drop(self, pick: int) -> None:
        if self.network:
            self.network.pop(pick % len(self.network))

    def double(self, pick: int) -> None:
        if self.network:
            self.receive(self.network[pick % len(self.network)])

    def receive(self, packet: Packet) -> None:
        """Whoever now serves the address takes it, even where it was meant for a former process."""
        if packet.channel[1] == "G":
            self.gateway_does(self.at_gateway(packet.message))
        elif packet.channel[1] == "P":
            self.prefill_does(self.at_prefill(packet.message))
        else:
            self.at_decode(packet.message)

    def at_gateway(self, message: object) -> tuple[GatewayAction, ...]:
        match message:
            case m.Target():
                return self.gateway.target(message)
            case m.Credits():
                return self.gateway.credits(message)
            case m.Finished():
                return self.gateway.finished(message)
            case m.Manifest():
                return self.gateway.chunk(message)
            case m.FirstTokens():
                return self.gateway.first_tokens(message)
            case m.Drained():
                return self.gateway.drained(message)
            case m.Failed():
                return self.gateway.failed(message)
            case int():
                return self.gateway.peer_gone(message)
        raise AssertionError(message)

    def at_prefill(self, message: object) -> tuple[m.PrefillAction, ...]:
        side = self.prefill.side
        match message:
            case m.Run(target=m.Target() as target):
                partition = next(self.ids) % self.num_partitions
                if side.run(target, partition, self.now_s):
                    self.prefill.tasks[target.handoff] = PrefillTask(target, partition)
                return ()
            case m.Credits():
                return side.credits(message)
            case m.Cancel():
                return side.cancel(message.handoff, message.target_epoch)
        raise AssertionError(message)

    def at_decode(self, message: object) -> None:
        reservations = self.decode.reservations
        match message:
            case m.Reserve():
                self.reserve(message)
            case m.Manifest():
                self.decode_does(reservations.landed(message, GATEWAY, self.now_s))
            case m.Start(last=m.Manifest() as last):
                start = m.Start(handoff=message.handoff, tokens=message.tokens, last=last)
                self.decode_does(reservations.start(start, GATEWAY, self.now_s))
            case m.Cancel() if message.handoff in self.decode.running:
                self.leave(message.handoff)
            case m.Cancel():
                self.decode_does(reservations.cancel(message.handoff, GATEWAY, self.now_s))
            case m.Drained():
                self.decode_does(reservations.drained(message.handoff, message.writer_epoch, self.now_s))
            case _:
                raise AssertionError(message)

    def reserve(self, message: m.Reserve) -> None:
        partition, waiting = message.handoff[-1] % self.num_partitions, self.decode.waiting
        if not self.decode.side.knows(message.handoff) and message.handoff not in waiting[partition]:
            waiting[partition].append(message.handoff)
        self.decode.writers[message.handoff] = message.writer_epoch
        named = replace(self.begun[message.handoff], block_names=(CACHED_NAME,))
        self.decode_does(self.decode.reservations.reserve(message, named, partition, GATEWAY, self.now_s))

    # ---- what the sides ask

    def gateway_does(self, actions: tuple[GatewayAction, ...]) -> None:
        for action in actions:
            match action:
                case SendPrefill():
                    self.network.append(Packet(("G", "P"), action.epoch, action.message))
                case SendDecode():
                    self.network.append(Packet(("G", "D"), action.epoch, action.message))
                case Deliver():
                    assert action.handoff not in self.delivered, "first tokens came twice"
                    assert action.handoff not in self.outcomes
                    self.delivered[action.handoff] = action.tokens
                case Outcome():
                    assert action.handoff not in self.outcomes, "two outcomes"
                    self.outcomes[action.handoff] = action.cause
                    if action.cause is None:
                        self.tally.num_finished += 1
                    else:
                        self.tally.failures.add(action.cause)

    def prefill_does(self, actions: tuple[m.PrefillAction, ...]) -> None:
        prefill = self.prefill
        for action in actions:
            match action:
                case m.CopyIn():
                    prefill.stages.append(action)
                case m.Write():
                    contents = tuple(prefill.staging[action.partition, cell] for cell in action.cells)
                    prefill.writes.append(WriteUnderWay(action, contents, self.now_s))
                case m.Stop():
                    self.end_prefill(action.handoff)
                case _:
                    self.network.append(Packet(("P", "G"), None, action))

    def decode_does(self, actions: r.Actions[str]) -> None:
        decode = self.decode
        for action in actions:
            match action:
                case r.Reserved():
                    self.reserved(action.target)
                case m.Tell():
                    self.tell(action.message)
                case r.GivenUp():
                    self.wait_no_more(action.handoff)
                case r.Enter():
                    self.join(action.join)
                case r.CameBack():
                    self.decode_does(decode.reservations.admit(self.now_s))
                case r.NotHere():
                    pass  # a message that came late
                case m.CopyOut():
                    decode.copies.append(action)
                case m.Land():
                    contents = decode.private.pop(action.ticket)
                    for block, content in zip(action.blocks, contents, strict=True):
                        decode.pages[action.partition, block] = content

    def reserved(self, target: m.Target) -> None:
        """First come, first served; of one that is asked for twice the same is said again."""
        waiting = self.decode.waiting[target.partition]
        if target.handoff in waiting:
            assert waiting[0] == target.handoff, "reserved out of turn"
            waiting.pop(0)
            self.check_grants(target.grants)
        self.network.append(Packet(("D", "G"), None, target))

    def tell(self, message: m.Credits | m.Failed) -> None:
        if isinstance(message, m.Credits):
            self.check_grants(message.grants)
        elif message.cause is m.Cause.OVERLOADED:
            self.wait_no_more(message.handoff)
        self.network.append(Packet(("D", "G"), None, message))

    def wait_no_more(self, handoff: bytes) -> None:
        for waiting in self.decode.waiting:
            if handoff in waiting:
                waiting.remove(handoff)

    def join(self, join: m.Join) -> None:
        """The heart of it: what is decoded from is, whole, what the reserved writer computed for this handoff."""
        decode = self.decode
        assert join.handoff not in decode.running, "joined twice"
        writer = decode.writers[join.handoff]
        assert join.tokens == (writer,), "first tokens of another epoch"
        held = set(decode.cached[join.partition]) & set(join.block_table)
        for index, block in enumerate(join.block_table):
            if block not in held:
                tag = (writer, join.handoff, index)
                assert decode.pages.get((join.partition, block)) == (tag, tag), "decoding what was not verified"
        decode.running[join.handoff] = join

    def leave(self, handoff: bytes) -> None:
        join = self.decode.running.pop(handoff)
        self.decode.pool.release(join.partition, join.block_table)
        self.decode_does(self.decode.reservations.left(handoff, self.now_s))

    # ---- the prefill process works

    def prefill_block(self, pick: int) -> None:
        """One task computes its next block; with the last one come the first tokens."""
        prefill = self.prefill
        if not prefill.tasks:
            return
        task = list(prefill.tasks.values())[pick % len(prefill.tasks)]
        target = task.target
        task.blocks = task.blocks or prefill.pool.allocate(task.partition, target.num_blocks) or ()
        if not task.blocks:
            return
        index, block = task.num_done, task.blocks[task.num_done]
        tag = (prefill.epoch, target.handoff, index)
        prefill.pages[task.partition, block] = (tag, tag)
        task.num_done += 1
        self.prefill_does(prefill.side.finished(target.handoff, [(index, block)]))
        if task.num_done == target.num_blocks and target.handoff in prefill.tasks:
            self.end_prefill(target.handoff)
            first = m.FirstTokens(
                handoff=target.handoff,
                writer_epoch=prefill.epoch,
                target_epoch=target.epoch,
                tokens=(prefill.epoch,),
                is_finished=pick % 7 == 0,
            )
            self.network.append(Packet(("P", "G"), None, first))

    def end_prefill(self, handoff: bytes) -> None:
        task = self.prefill.tasks.pop(handoff, None)
        if task is not None:
            self.prefill.pool.release(task.partition, task.blocks)

    def stage(self, pick: int) -> None:
        prefill = self.prefill
        if prefill.stages:
            stage = prefill.stages.pop(pick % len(prefill.stages))
            for block, cell in stage.pairs:
                prefill.staging[stage.partition, cell] = prefill.pages[stage.partition, block]
            self.prefill_does(prefill.side.staged(stage.ticket))

    def write(self, pick: int) -> None:
        """A write completes; its checksums are of what was staged."""
        prefill = self.prefill
        if not prefill.writes:
            return
        under_way = prefill.writes.pop(pick % len(prefill.writes))
        for late in late_writes(under_way):
            self.arrive(late)
        sums = tuple(checksum(content) for content in under_way.contents)
        self.prefill_does(prefill.side.written(under_way.write.ticket, sums))

    def tear_write(self, pick: int) -> None:
        """Half of a write arrives before the rest."""
        if self.prefill.writes:
            for late in late_writes(self.prefill.writes[pick % len(self.prefill.writes)]):
                self.arrive(late, num_halves=1)

    def fail_write(self, pick: int) -> None:
        prefill = self.prefill
        if prefill.writes:
            under_way = prefill.writes.pop(pick % len(prefill.writes))
            self.late += late_writes(under_way)
            self.prefill_does(prefill.side.write_failed(under_way.write.ticket, self.now_s))

    def land_late(self, pick: int) -> None:
        self.late = [late for late in self.late if late.session == self.decode.epoch]
        if self.late:
            read_next = {(copy.partition, cell) for copy in self.decode.copies for cell in copy.cells}
            worst = [late for late in self.late if (late.partition, late.cell) in read_next] or self.late
            late = worst[pick % len(worst)]
            self.arrive(late, num_halves=1 + pick % 2)
            self.tally.num_late += 1

    def arrive(self, late: LateWrite, num_halves: int = 2) -> None:
        """Nothing fences a write: it reaches the slab of the session it was made for, whoever uses the cell now."""
        if late.session == self.decode.epoch:
            key = late.partition, late.cell
            old = self.decode.cells.get(key, EMPTY)
            self.decode.cells[key] = late.content if num_halves == 2 else (late.content[0], old[1])

    # ---- the decode process works

    def copy(self, pick: int) -> None:
        decode = self.decode
        if not decode.copies:
            return
        copy = decode.copies.pop(pick % len(decode.copies))
        private = tuple(decode.cells.get((copy.partition, cell), EMPTY) for cell in copy.cells)
        is_intact = tuple(checksum(content) for content in private) == copy.checksums
        self.tally.num_mismatches += not is_intact
        decode.private[copy.ticket] = private
        self.decode_does(decode.reservations.verified(copy.ticket, is_intact, self.now_s))

    def end_decode(self, pick: int) -> None:
        decode = self.decode
        if decode.running:
            handoff = list(decode.running)[pick % len(decode.running)]
            self.leave(handoff)
            self.network.append(Packet(("D", "G"), None, m.Finished(handoff=handoff, epoch=decode.epoch)))

    # ---- faults and time

    def kill_prefill(self, pick: int) -> None:
        if pick % 4:
            return
        gone = self.prefill.epoch
        for under_way in self.prefill.writes:
            self.late += late_writes(under_way)
        self.prefill = PrefillProcess(next(self.epochs), self.num_partitions)
        self.network.append(Packet(("P", "G"), None, gone))

    def kill_decode(self, pick: int) -> None:
        if pick % 4:
            return
        gone = self.decode.epoch
        self.decode = DecodeProcess(next(self.epochs), self.num_partitions)
        self.network.append(Packet(("D", "G"), None, gone))

    def tick(self, pick: int) -> None:
        self.advance(float(pick % 9))

    def advance(self, by_s: float) -> None:
        self.now_s += by_s
        while any(self.now_s - w.began_s > WRITE_TIMEOUT_S for w in self.prefill.writes):
            self.fail_write(
                next(i for i, w in enumerate(self.prefill.writes) if self.now_s - w.began_s > WRITE_TIMEOUT_S)
            )
        self.prefill_does(self.prefill.side.expire(self.now_s))
        self.decode_does(self.decode.reservations.expire(self.now_s))
        self.gateway_does(self.gateway.expire(self.now_s))

    def wind_down(self, is_network_dead: bool) -> None:
        """Everything under way ends, every lease and quarantine expires."""
        for _ in range(0 if is_network_dead else 20):
            self.finish_work()
            while self.network:
                self.deliver(0)
        for _ in range(4):
            self.network.clear()
            self.finish_work()
            self.advance(10_000.0)
        for epoch in range(max(self.prefill.epoch, self.decode.epoch) + 1):  # who is silent for so long is lost
            self.gateway_does(self.gateway.peer_gone(epoch))

    def finish_work(self) -> None:
        for pick in range(10):
            self.prefill_block(pick)
        while self.prefill.stages or self.prefill.writes or self.decode.copies or self.decode.running:
            for work in (self.stage, self.write, self.copy, self.end_decode):
                work(0)

    # ---- what always holds

    def check_grants(self, grants: tuple[m.Grant, ...]) -> None:
        for grant in grants:
            assert grant.number not in self.decode.granted, "granted twice"
            self.decode.granted.add(grant.number)

    def check_conservation(self) -> None:
        process_pools = (self.prefill.pool, self.prefill.slab, self.decode.pool, self.decode.slab)
        for pool in process_pools:
            for partition in range(self.num_partitions):
                assert pool.counts(partition).total == pool.blocks_per_partition
        for partition in range(self.num_partitions):
            num_ahead = self.decode.side.num_choices_reserved(partition) - self.decode.num_spare_slots(partition)
            assert num_ahead <= 1, "two come ahead of their slots"

    def check_all_is_over(self) -> None:
        assert self.outcomes.keys() == self.begun.keys(), "a request without an outcome"
        assert (self.gateway.num_handoffs, self.prefill.side.num_runs, self.decode.reservations.num_handoffs) == (
            0,
            0,
            0,
        )
        assert not any(self.decode.waiting)
        for pool, num_used in (
            (self.prefill.pool, 0),
            (self.prefill.slab, 0),
            (self.decode.pool, 1),
            (self.decode.slab, 0),
        ):
            begun = PartitionCounts(free=pool.blocks_per_partition - num_used, used=num_used, leased=0, quarantined=0)
            assert [pool.counts(p) for p in range(self.num_partitions)] == [begun] * self.num_partitions
        for partition, blocks in enumerate(self.decode.cached):
            assert [self.decode.pool.num_refs(partition, block) for block in blocks] == [1]
