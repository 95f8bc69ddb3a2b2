"""A worker process against a gateway and another worker that err, lie, repeat themselves or fall silent.

Whatever they do, it ends that handoff alone: nothing of it is decoded, everything it held comes back, and the next
handoff is served.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from moonshard.rpc import link_pb2
from tests.cluster.faults import QUARANTINE_S, SETTINGS, Process, what_is_held
from tests.dialling import inspect, open_link
from tests.engine_room import long_text
from tests.serving.worker.scripted_peer import ScriptedPeer, Writer, linked, run_of
from tests.sizes import BLOCK_SIZE

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(300)]
NUM_SLAB_SLOTS = 8
SLOTS_PER_HANDOFF = 2
BLOCK_BYTES = 4 * BLOCK_SIZE * (32 + 16) * 4  # layers, tokens, latent and rope features, float32
LEASE_S = 60.0
NOT_FOUND, FAILED_PRECONDITION, INVALID_ARGUMENT = (
    code.value[0]
    for code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)
)


def start_worker(role: str, folder) -> Process:
    settings = {
        **SETTINGS,
        "kv.slab_bytes": NUM_SLAB_SLOTS * BLOCK_BYTES,
        "kv.slots_per_handoff": SLOTS_PER_HANDOFF,
        "kv.lease_s": LEASE_S,
    }
    process = Process(f"{role} 0", role, dict(settings), folder / f"{role}.log")
    process.start()
    return process


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Process]]:
    folder = tmp_path_factory.mktemp("workers")
    processes = {role: start_worker(role, folder) for role in ("decode", "prefill")}
    try:
        for process in processes.values():
            process.wait_for("moonshard ready")
        yield processes
    finally:
        for process in processes.values():
            process.kill()


@pytest.fixture(scope="module")
def writer(workers: dict[str, Process]) -> Iterator[Writer]:
    async def endpoint() -> link_pb2.KvEndpoint:
        async with linked(workers["decode"].address) as peer:
            return peer.welcome.endpoint

    writer = Writer(asyncio.run(endpoint()))
    yield writer
    writer.close()


@pytest.fixture
async def decode(workers: dict[str, Process], writer: Writer) -> AsyncIterator[ScriptedPeer]:
    """A link to the decode worker, which serves at the end of each test, and is as it began."""
    async with linked(workers["decode"].address) as peer:
        yield peer
        await hand_over(peer, writer)
    await assert_as_it_began(workers["decode"])


@pytest.fixture
async def prefill(workers: dict[str, Process]) -> AsyncIterator[ScriptedPeer]:
    async with linked(workers["prefill"].address) as peer:
        yield peer
    await assert_as_it_began(workers["prefill"])


async def assert_as_it_began(worker: Process) -> None:
    """Also the cells in quarantine, once that is over."""
    assert worker.is_alive, worker.log()
    end_s = time.monotonic() + QUARANTINE_S + 10
    while held := await asyncio.to_thread(lambda: what_is_held(inspect(worker.address))):
        assert time.monotonic() < end_s, held
        await asyncio.sleep(0.05)


class Handoff:
    """One handoff that a test conducts step by step: `num_blocks` blocks, granted two cells at a time."""

    def __init__(self, peer: ScriptedPeer, writer: Writer, num_blocks: int = SLOTS_PER_HANDOFF, **run):
        self.peer, self.writer = peer, writer
        self.id = secrets.token_bytes(16)
        self.num_blocks = num_blocks
        # Of its own: what the worker knows it does not want.
        self.prompt = long_text(num_blocks * BLOCK_SIZE, seed=int.from_bytes(self.id))
        self._run = run_of(self.id, self.prompt, **run)
        self.target = link_pb2.Target()

    async def reserve(self, lease_s: float = LEASE_S) -> None:
        await self.ask(lease_s)
        self.target = await self.peer.expect("target", self.id)

    async def ask(self, lease_s: float = LEASE_S) -> None:
        reserve = link_pb2.Reserve(run=self._run, writer_epoch=self.writer.epoch, lease_s=lease_s)
        await self.peer.send(reserve=reserve)

    async def publish(self, first: int, grants, damage: str = "") -> link_pb2.Manifest:
        """Writes the next blocks; returns the manifest that says so."""
        cells = [grant.cell for grant in grants]
        expected = await self.writer.write(self.peer.welcome.endpoint, cells, damage)
        return link_pb2.Manifest(
            handoff=self.id,
            writer_epoch=self.writer.epoch,
            target_epoch=self.target.epoch,
            blocks=range(first, first + len(cells)),
            grants=grants,
            checksums=expected,
            is_last=first + len(cells) == self.num_blocks,
        )

    async def start(self, last: link_pb2.Manifest, tokens: tuple[int, ...] = (5,)) -> None:
        await self.peer.send(start=link_pb2.Start(handoff=self.id, token_ids=tokens, last=last))

    async def cancel(self, *, is_drained: bool) -> None:
        await self.peer.send(cancel=link_pb2.Cancel(request_id=self.id, target_epoch=self.target.epoch))
        if is_drained:
            drained = link_pb2.Drained(handoff=self.id, writer_epoch=self.writer.epoch, target_epoch=self.target.epoch)
            await self.peer.send(drained=drained)

    async def fails(self) -> link_pb2.Failed:
        """How the worker says it ended; then nothing of it may have been decoded."""
        failed = await self.peer.expect("failed", self.id)
        await self.peer.barrier()
        assert not self.peer.tokens_so_far(self.id)
        return failed


async def hand_over(peer: ScriptedPeer, writer: Writer) -> Handoff:
    """A handoff done right, which joins and decodes all but its first token: the control of every test here."""
    handoff = Handoff(peer, writer, max_tokens=8)
    await handoff.reserve()
    await handoff.start(await handoff.publish(0, handoff.target.grants))
    assert len(await peer.tokens(handoff.id, 7)) == 7
    return handoff


async def test_blocks_that_come_in_pieces_join_once_all_are_there(decode, writer):
    handoff = Handoff(decode, writer, num_blocks=3)
    await handoff.reserve()
    await decode.send(landed=await handoff.publish(0, handoff.target.grants))
    credits = await decode.expect("credits", handoff.id)
    assert not decode.tokens_so_far(handoff.id)
    await handoff.start(await handoff.publish(2, credits.grants))
    assert len(await decode.tokens(handoff.id, 7)) == 7


@pytest.mark.parametrize("damage", ["one byte", "truncated", "another block", "nothing written"])
async def test_a_damaged_publish_ends_its_handoff_as_corrupt_and_nothing_is_decoded(workers, decode, writer, damage):
    before = inspect(workers["decode"].address).load.kv_transfer
    handoff = Handoff(decode, writer)
    await handoff.reserve()
    await handoff.start(await handoff.publish(0, handoff.target.grants, damage))
    assert (await handoff.fails()).cause == link_pb2.HANDOFF_CAUSE_CORRUPT
    after = inspect(workers["decode"].address).load.kv_transfer
    assert after.num_checksum_mismatches == before.num_checksum_mismatches + 1
    assert after.num_landed_blocks == before.num_landed_blocks


async def test_a_block_that_is_written_again_after_it_was_told_is_caught_or_was_copied_before(decode, writer):
    handoff = Handoff(decode, writer)
    await handoff.reserve()
    manifest = await handoff.publish(0, handoff.target.grants)
    await writer.write(decode.welcome.endpoint, [grant.cell for grant in handoff.target.grants])
    await handoff.start(manifest)
    assert (await handoff.fails()).cause == link_pb2.HANDOFF_CAUSE_CORRUPT


async def test_a_manifest_that_names_a_block_twice_is_corrupt(decode, writer):
    handoff = Handoff(decode, writer)
    await handoff.reserve()
    manifest = await handoff.publish(0, handoff.target.grants)
    manifest.blocks[1] = manifest.blocks[0]
    await handoff.start(manifest)
    assert (await handoff.fails()).cause == link_pb2.HANDOFF_CAUSE_CORRUPT


@pytest.mark.parametrize("is_drained", [True, False], ids=["drained", "quarantined"])
async def test_reservations_wait_while_the_slab_is_full_and_go_on_when_it_is_not(decode, writer, is_drained):
    holders = [Handoff(decode, writer) for _ in range(NUM_SLAB_SLOTS // SLOTS_PER_HANDOFF)]
    for holder in holders:
        await holder.reserve()
    waiting = Handoff(decode, writer)
    await waiting.ask()
    await decode.barrier()
    assert not decode.said_of(waiting.id)
    for holder in holders:
        await holder.cancel(is_drained=is_drained)
    waiting.target = await decode.expect("target", waiting.id)
    await waiting.start(await waiting.publish(0, waiting.target.grants))
    assert len(await decode.tokens(waiting.id, 7)) == 7


async def test_a_lease_that_runs_out_ends_the_handoff_and_what_comes_later_is_not_found(decode, writer):
    handoff = Handoff(decode, writer)
    await handoff.reserve(lease_s=0.2)
    assert handoff.target.lease_s == pytest.approx(0.2)
    assert (await handoff.fails()).cause == link_pb2.HANDOFF_CAUSE_LEASE
    await decode.send(landed=await handoff.publish(0, handoff.target.grants))
    assert (await handoff.fails()).code == NOT_FOUND


@pytest.mark.parametrize("kind", ["landed", "start"])
async def test_a_forged_handoff_is_not_found(decode, kind):
    forged = secrets.token_bytes(16)
    manifest = link_pb2.Manifest(handoff=forged, writer_epoch=forged, target_epoch=forged, is_last=True)
    message = manifest if kind == "landed" else link_pb2.Start(handoff=forged, token_ids=[5], last=manifest)
    await decode.send(**{kind: message})
    failed = await decode.expect("failed", forged)
    assert (failed.code, failed.field) == (NOT_FOUND, "handoff")


async def test_forged_cancels_drains_and_credits_change_nothing(decode, writer):
    handoff = Handoff(decode, writer)
    await handoff.reserve()
    forged = secrets.token_bytes(16)
    await decode.send(cancel=link_pb2.Cancel(request_id=forged, target_epoch=handoff.target.epoch))
    await decode.send(drained=link_pb2.Drained(handoff=handoff.id, writer_epoch=forged, target_epoch=forged))
    await decode.send(credits=link_pb2.Credits(handoff=handoff.id, grants=[link_pb2.Grant(cell=7, number=1)]))
    failed = await decode.expect("failed", handoff.id)
    assert (failed.code, failed.field) == (FAILED_PRECONDITION, "role")
    await handoff.start(await handoff.publish(0, handoff.target.grants))
    assert len(await decode.tokens(handoff.id, 7)) == 7


async def test_what_is_said_again_of_a_handoff_is_heard_once(decode, writer):
    handoff = Handoff(decode, writer, max_tokens=300)
    await handoff.reserve()
    last = await handoff.publish(0, handoff.target.grants)
    for _ in range(3):
        await handoff.start(last)
    await decode.tokens(handoff.id, 1)
    await handoff.ask()
    await decode.send(landed=last)
    await handoff.start(last)
    await decode.barrier()
    assert len(await decode.tokens(handoff.id, 299)) == 299
    await decode.barrier()
    assert len(decode.tokens_so_far(handoff.id)) == 299
    for replayed in ({"landed": last}, {"start": link_pb2.Start(handoff=handoff.id, token_ids=[5], last=last)}):
        await decode.send(**replayed)
        assert (await decode.expect("failed", handoff.id)).code == NOT_FOUND


@pytest.mark.parametrize("field", ["writer_epoch", "target_epoch"])
async def test_a_manifest_of_another_epoch_is_nobodys(decode, writer, field):
    handoff = Handoff(decode, writer)
    await handoff.reserve()
    right = await handoff.publish(0, handoff.target.grants)
    wrong = link_pb2.Manifest()
    wrong.CopyFrom(right)
    setattr(wrong, field, secrets.token_bytes(16))
    await handoff.start(wrong)
    await decode.barrier()
    assert not decode.said_of(handoff.id)
    await handoff.start(right)
    assert len(await decode.tokens(handoff.id, 7)) == 7


async def test_a_manifest_that_names_a_grant_of_another_handoff_is_nobodys(decode, writer):
    robbed, robber = Handoff(decode, writer), Handoff(decode, writer)
    await robbed.reserve()
    await robber.reserve()
    await robber.start(await robber.publish(0, robbed.target.grants))
    await decode.barrier()
    assert not decode.said_of(robber.id)
    for handoff in (robbed, robber):
        await handoff.start(await handoff.publish(0, handoff.target.grants))
        assert len(await decode.tokens(handoff.id, 7)) == 7


@pytest.mark.parametrize("tokens", [(), (5, 5), (1 << 20,)], ids=["none", "too many", "no token of the model"])
async def test_first_tokens_that_cannot_be_end_their_handoff_alone(decode, writer, tokens):
    handoff = Handoff(decode, writer)
    await handoff.reserve()
    await handoff.start(await handoff.publish(0, handoff.target.grants), tokens)
    assert (await handoff.fails()).code == INVALID_ARGUMENT
    await handoff.cancel(is_drained=True)


async def test_a_link_that_ends_gives_up_its_handoffs_and_no_others(workers, decode, writer):
    kept = Handoff(decode, writer)
    await kept.reserve()
    async with linked(workers["decode"].address) as other:
        lost = Handoff(other, writer)
        await lost.reserve()
    await kept.start(await kept.publish(0, kept.target.grants))
    assert len(await decode.tokens(kept.id, 7)) == 7


# ---- a prefill worker


def to_prefill(handoff: Handoff, prefill: ScriptedPeer) -> link_pb2.Run:
    """The run of a handoff whose target is for that prefill worker."""
    run = run_of(handoff.id, handoff.prompt, max_tokens=4)
    run.target.CopyFrom(handoff.target)
    run.target.writer_epoch = prefill.welcome.epoch
    run.endpoint.CopyFrom(handoff.peer.welcome.endpoint)
    return run


def spoil(endpoint: link_pb2.KvEndpoint, field: str) -> None:
    group = endpoint.layout.groups[0]
    match field:
        case "fingerprint":
            endpoint.fingerprint = "of another checkpoint"
        case "transport":
            endpoint.transport = "pigeon"
        case "version":
            endpoint.layout.version += 1
        case "dtype":
            group.dtype = "bfloat16"
            group.itemsize_bytes = 2
        case "block_size":
            group.block_size *= 2
            group.shards[0].tile.token_stop *= 2


@pytest.mark.parametrize("field", ["fingerprint", "transport", "version", "dtype", "block_size"])
async def test_a_prefill_worker_refuses_an_endpoint_that_is_not_its_own_kind_and_names_the_field(
    workers, decode, prefill, writer, field
):
    before = inspect(workers["prefill"].address).load.kv_transfer.published_bytes
    handoff = Handoff(decode, writer)
    await handoff.reserve()
    run = to_prefill(handoff, prefill)
    spoil(run.endpoint, field)
    await prefill.send(run=run)
    failed = await prefill.expect("failed", handoff.id)
    assert (failed.code, failed.field.rpartition(".")[2]) == (FAILED_PRECONDITION, field)
    assert field in workers["prefill"].log()
    assert inspect(workers["prefill"].address).load.kv_transfer.published_bytes == before
    await handoff.cancel(is_drained=True)


async def test_a_target_of_another_writer_is_refused(decode, prefill, writer):
    handoff = Handoff(decode, writer)
    await handoff.reserve()
    run = to_prefill(handoff, prefill)
    run.target.writer_epoch = writer.epoch
    await prefill.send(run=run)
    failed = await prefill.expect("failed", handoff.id)
    assert (failed.code, failed.field) == (FAILED_PRECONDITION, "target")
    await handoff.cancel(is_drained=True)


async def test_a_prefill_worker_takes_no_reservation(prefill, writer):
    handoff = Handoff(prefill, writer)
    await handoff.ask()
    failed = await prefill.expect("failed", handoff.id)
    assert (failed.code, failed.field) == (FAILED_PRECONDITION, "role")


async def test_a_prefill_worker_finds_no_handoff_for_forged_credits_and_says_that_it_is_drained(prefill):
    forged, epoch = secrets.token_bytes(16), secrets.token_bytes(16)
    await prefill.send(credits=link_pb2.Credits(handoff=forged, target_epoch=epoch))
    failed = await prefill.expect("failed", forged)
    assert (failed.code, failed.field) == (NOT_FOUND, "handoff")
    await prefill.send(cancel=link_pb2.Cancel(request_id=forged, target_epoch=epoch))
    drained = await prefill.expect("drained", forged)
    assert (drained.writer_epoch, drained.target_epoch) == (prefill.welcome.epoch, epoch)
    assert not prefill.said_of(forged)


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_another_protocol_version_is_refused_and_logged(workers, role):
    async with grpc.aio.insecure_channel(workers[role].address) as channel:
        call = await open_link(channel, workers[role].address)
        await call.write(link_pb2.GatewayMessage(hello=link_pb2.Hello(protocol_version=99)))
        with pytest.raises(grpc.aio.AioRpcError, match="protocol_version") as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "protocol_version is 99" in workers[role].log()
