"""Whatever a gateway says in one frame ends that link or that request with a typed error, and no worker."""

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Iterator

import pytest

from moonshard.rpc import link_pb2
from moonshard.rpc.status import RequestError
from moonshard.serving.control.handoff import messages as m
from moonshard.serving.wire import handoffs as handoff_wire
from moonshard.serving.worker.worker import Worker
from tests.engine_room import long_text
from tests.serving.pd.pd_pair import Pair, run, running
from tests.serving.worker.hostile_frames import drawn, frames

pytestmark = [pytest.mark.xdist_group("jax"), pytest.mark.timeout(120)]

NUM_FAST = 400
NUM_SLOW = 100_000
FRAMES_PER_LINK = 25
Frame = link_pb2.GatewayMessage


class Link:
    """The worker's end of one; what it says is kept."""

    def __init__(self) -> None:
        self.said: list[link_pb2.WorkerMessage] = []

    def send(self, message: link_pb2.WorkerMessage) -> None:
        self.said.append(link_pb2.WorkerMessage.FromString(message.SerializeToString()))


class Gateway:
    """It has a link to each worker of a pair, and says what a test wants."""

    def __init__(self, pair: Pair):
        self.pair = pair
        self.decode, self.prefill = Link(), Link()
        self.num_faults = 0
        self._handoffs: list[bytes] = []
        for worker in self._links:
            worker.open_link(self._links[worker])

    @property
    def _links(self) -> dict[Worker, Link]:
        return {self.pair.decode: self.decode, self.pair.prefill: self.prefill}

    def say(self, worker: Worker, message: Frame) -> None:
        """As it comes over a wire; a fault of the link ends it, as its service would."""
        try:
            worker.receive(Frame.FromString(message.SerializeToString()), self._links[worker])
        except RequestError:
            self.num_faults += 1
            self.hang_up()

    def hang_up(self) -> None:
        """What was written is over by then: the pair's transport copies at once."""
        for worker, link in self._links.items():
            worker.close_link(link)
        for handoff, worker in itertools.product(self._handoffs, self._links):
            epoch = handoff_wire.epoch_from(self.pair.prefill.epoch)
            drained = m.Drained(handoff=handoff, writer_epoch=epoch, target_epoch=epoch)
            if worker is self.pair.decode:
                worker.receive(Frame(drained=handoff_wire.drained_message(drained)), Link())
        self._handoffs.clear()
        self.decode, self.prefill = Link(), Link()
        for worker, link in self._links.items():
            worker.open_link(link)

    # ---- valid messages, each with what has to be said before it

    def plain(self) -> tuple[Worker, Frame]:
        return self.pair.decode, Frame(run=_a_run())

    def resumed(self) -> tuple[Worker, Frame]:
        each = _a_run()
        each.n = 2
        each.resumed.add(choice=1, token_ids=[5, 6])
        each.max_tokens = 4
        return self.pair.decode, Frame(run=each)

    def reserve(self) -> tuple[Worker, Frame]:
        each = _a_run()
        self._handoffs.append(each.request_id)
        reserve = link_pb2.Reserve(run=each, writer_epoch=self.pair.prefill.epoch, lease_s=30.0)
        return self.pair.decode, Frame(reserve=reserve)

    def _reserved(self) -> tuple[link_pb2.Run, link_pb2.Target]:
        """A target where there was room."""
        worker, message = self.reserve()
        self.say(worker, message)
        targets = [said.target for said in self.decode.said if said.HasField("target")]
        target = next((one for one in targets if one.handoff == message.reserve.run.request_id), link_pb2.Target())
        return message.reserve.run, target

    def _manifest(self) -> link_pb2.Manifest:
        each, target = self._reserved()
        return link_pb2.Manifest(
            handoff=each.request_id,
            writer_epoch=self.pair.prefill.epoch,
            target_epoch=self.pair.decode.epoch,
            blocks=range(target.num_blocks_held, target.num_blocks_held + len(target.grants)),
            grants=target.grants,
            checksums=[1] * len(target.grants),
            phases=link_pb2.TransferPhases(transfer_ms=1, exposed_ms=1),
        )

    def landed(self) -> tuple[Worker, Frame]:
        return self.pair.decode, Frame(landed=self._manifest())

    def start(self) -> tuple[Worker, Frame]:
        last = self._manifest()
        return self.pair.decode, Frame(start=link_pb2.Start(handoff=last.handoff, token_ids=[5], last=last))

    def drained(self) -> tuple[Worker, Frame]:
        last = self._manifest()
        drained = link_pb2.Drained(handoff=last.handoff, writer_epoch=last.writer_epoch, target_epoch=last.target_epoch)
        return self.pair.decode, Frame(drained=drained)

    def targeted(self) -> tuple[Worker, Frame]:
        each, target = self._reserved()
        each.target.CopyFrom(target)
        each.endpoint.CopyFrom(self.pair.decode.welcome().endpoint)
        return self.pair.prefill, Frame(run=each)

    def credits(self) -> tuple[Worker, Frame]:
        worker, message = self.targeted()
        self.say(worker, message)
        run = message.run
        grants = [link_pb2.Grant(cell=0, number=10**6)]
        credits = link_pb2.Credits(handoff=run.request_id, target_epoch=run.target.epoch, grants=grants)
        return worker, Frame(credits=credits)

    def cancel_prefill(self) -> tuple[Worker, Frame]:
        worker, message = self.targeted()
        self.say(worker, message)
        cancel = link_pb2.Cancel(request_id=message.run.request_id, target_epoch=message.run.target.epoch)
        return worker, Frame(cancel=cancel)

    def cancel_decode(self) -> tuple[Worker, Frame]:
        each, _ = self._reserved()
        return self.pair.decode, Frame(cancel=link_pb2.Cancel(request_id=each.request_id))

    def refused(self) -> tuple[Worker, Frame]:
        return self.pair.decode, Frame(refused=link_pb2.Refused(field="dtype", message="another dtype"))

    def hello(self) -> tuple[Worker, Frame]:
        return self.pair.decode, Frame(hello=link_pb2.Hello(protocol_version=1, gateway_epoch=bytes(16)))

    def tell_prefixes(self) -> tuple[Worker, Frame]:
        return self.pair.prefill, Frame(tell_prefixes=link_pb2.TellPrefixes())

    def nothing(self) -> tuple[Worker, Frame]:
        return self.pair.decode, Frame()

    @property
    def kinds(self) -> tuple[Callable[[], tuple[Worker, Frame]], ...]:
        return (
            self.plain,
            self.resumed,
            self.reserve,
            self.landed,
            self.start,
            self.drained,
            self.targeted,
            self.credits,
            self.cancel_prefill,
            self.cancel_decode,
            self.refused,
            self.hello,
            self.tell_prefixes,
            self.nothing,
        )


def _a_run() -> link_pb2.Run:
    each = run(long_text(40), 2, logprobs=1, stop_token_ids=[3], min_tokens=1, partition=0, prefix_root=b"r" * 16)
    each.block_names = each.request_id[::-1] + each.request_id  # two full blocks, known to nobody
    each.sampling.bias_ids.append(7)
    each.sampling.bias_values.append(1.0)
    each.traceparent = f"00-{'1' * 32}-{'2' * 16}-01"
    return each


def every_field(gateway: Gateway) -> Iterator[Callable[[], tuple[Worker, Frame]]]:
    """Each directed frame, made when it is to be said: what comes before it is said then."""
    for kind in gateway.kinds:
        _, valid = kind()
        for number in range(sum(1 for _ in frames(valid))):
            yield lambda kind=kind, number=number: _spoilt(kind(), number)
    gateway.hang_up()


def _spoilt(said: tuple[Worker, Frame], number: int) -> tuple[Worker, Frame]:
    worker, valid = said
    found = next(itertools.islice(frames(valid), number, None), valid)
    assert isinstance(found, Frame)
    return worker, found


async def say_all(gateway: Gateway, said: Iterator[Callable[[], tuple[Worker, Frame]]]) -> None:
    for number, make in enumerate(said):
        worker, message = make()
        gateway.say(worker, message)
        await asyncio.sleep(0)
        for each in (gateway.pair.prefill, gateway.pair.decode):
            if each.engine.failed.done():
                raise AssertionError(f"frame {number} ended a worker: {message}") from each.engine.failed.exception()
        if number % FRAMES_PER_LINK == 0:
            if number % (2 * FRAMES_PER_LINK) == 0:  # every other time what it asked for is served first
                await asyncio.gather(*(each.engine.wait_idle() for each in (gateway.pair.prefill, gateway.pair.decode)))
            gateway.hang_up()
    gateway.hang_up()


async def assert_serves(pair: Pair) -> None:
    answer = await pair.ask(run(long_text(40, seed=9), 4))
    assert answer.cause is None
    assert len(answer.tokens[0]) == 4


async def test_no_frame_with_one_field_spoilt_ends_a_worker():
    """A share of them, in each run another; `running` waits until every pool is as it began."""
    seed = random.randrange(2**32)
    logging.getLogger(__name__).warning("frames of seed %d", seed)  # shown where it fails
    async with running(quarantine_s=0.05) as pair:
        gateway = Gateway(pair)
        every = list(every_field(gateway))
        await say_all(gateway, iter(random.Random(seed).sample(every, NUM_FAST)))
        assert gateway.num_faults
        await asyncio.wait_for(assert_serves(pair), 60)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_no_frame_of_a_hundred_thousand_ends_a_worker():
    """Each field in each way, and then up to three of them at once."""
    async with running(quarantine_s=0.05) as pair:
        gateway, rng = Gateway(pair), random.Random(27)

        def any_frame() -> tuple[Worker, Frame]:
            worker, valid = rng.choice(gateway.kinds)()
            found = drawn(valid, rng)
            assert isinstance(found, Frame)
            return worker, found

        every = list(every_field(gateway))
        await say_all(gateway, iter(every))
        await say_all(gateway, itertools.repeat(any_frame, max(0, NUM_SLOW - len(every))))
        await asyncio.wait_for(assert_serves(pair), 60)
