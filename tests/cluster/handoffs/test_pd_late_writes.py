"""A writer that is killed while its reader is stopped: its last bytes land after it is gone, and are never decoded.

What a killed process had given to its kernel still arrives when the receiver continues. By then the cells may belong to
another handoff; only the check of a private copy stands between those bytes and a wrong token.
"""

import random
from collections.abc import Iterator

import pytest

from moonshard.serving.control.sampling_parameters import Sampling
from tests.cluster.conftest import wait_until
from tests.cluster.faults import Fleet, running_fleet, unread_bytes
from tests.cluster.streams import Ask, Listeners, assert_all_right
from tests.dialling import inspect
from tests.engine_room import long_text

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(300)]
BLOCK_BYTES = 4 * 16 * (32 + 16) * 4  # layers, tokens, latent and rope features, float32
NUM_SLAB_SLOTS = 32  # less than the prompts of a test have blocks
SLOTS_PER_HANDOFF = 12
NO_QUARANTINE_S = 0.001  # so that a cell is granted again as soon as its writer is gone
NUM_CLIENTS = 6
NUM_ATTEMPTS = 8  # a machine may be so slow to look that all has arrived


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The reader may stand still for longer than a silent process is tolerated."""
    settings = {
        "kv.slab_bytes": NUM_SLAB_SLOTS * BLOCK_BYTES,
        "kv.slots_per_handoff": SLOTS_PER_HANDOFF,
        "kv.quarantine_s": NO_QUARANTINE_S,
        "gateway.worker_silence_s": 10.0,
    }
    with running_fleet(tmp_path_factory.mktemp("fleet"), num_prefill=2, num_decode=1, settings=settings) as fleet:
        yield fleet


def long_asks(seed: int) -> list[Ask]:
    rng = random.Random(seed)
    return [
        Ask(
            prompt=long_text(rng.randint(300, 700), seed=rng.randrange(1 << 30)),
            max_tokens=30,
            sampling=Sampling(temperature=rng.choice([0.0, 0.8]), seed=rng.getrandbits(62)),
        )
        for _ in range(NUM_CLIENTS)
    ]


def published_bytes(fleet: Fleet) -> int:
    workers = [worker for worker in fleet.workers.values() if worker.role == "prefill"]
    return sum(inspect(worker.address).load.kv_transfer.published_bytes for worker in workers)


def num_mismatches(fleet: Fleet) -> int:
    return inspect(fleet["decode 0"].address).load.kv_transfer.num_checksum_mismatches


def kill_while_bytes_are_on_their_way(fleet: Fleet, listeners: Listeners) -> int:
    """Returns how many bytes wait in the reader's kernel once the writer is gone; 0 if all were answered before there
    were any, and then nobody is killed. Between two looks the reader runs, or it would seem to be gone.
    """
    reader, writer = fleet["decode 0"], fleet["prefill 0"]
    num_late_bytes = 0
    while not num_late_bytes and not listeners.are_done:
        num_before = published_bytes(fleet)
        wait_until(lambda: listeners.are_done or published_bytes(fleet) > num_before, 1)  # noqa: B023  # called at once
        with reader.stopped():
            if wait_until(lambda: unread_bytes(reader) > BLOCK_BYTES, 1):
                writer.kill()
                num_late_bytes = unread_bytes(reader)
    return num_late_bytes


def killed_while_prompts_are_moving(fleet: Fleet, seed: int) -> int:
    """How far they are then is the seed's. Returns how many bytes were late: 0 if none was on its way any more."""
    asks = long_asks(seed)
    num_bytes = sum(len(ask.prompt) for ask in asks) // 16 * BLOCK_BYTES
    moment = published_bytes(fleet) + random.Random(seed).randrange(num_bytes // 2)
    listeners = Listeners(fleet, asks)
    assert wait_until(lambda: published_bytes(fleet) >= moment, 60)
    num_late_bytes = kill_while_bytes_are_on_their_way(fleet, listeners)
    assert_all_right(asks, listeners.wait())
    return num_late_bytes


def receiver_stopped_writer_killed_receiver_continued(fleet: Fleet, seed: int) -> None:
    """The other writer takes over at once."""
    tried = (killed_while_prompts_are_moving(fleet, seed + 1000 * attempt) for attempt in range(NUM_ATTEMPTS))
    num_late_bytes = next((num_bytes for num_bytes in tried if num_bytes), 0)
    assert num_late_bytes, "nothing was ever on its way any more"
    fleet.restore()
    again = long_asks(seed + 1)
    num_before = fleet.metric("moonshard_request_handoffs_total")
    assert_all_right(again, Listeners(fleet, again).wait())
    assert fleet.metric("moonshard_request_handoffs_total") >= num_before + NUM_CLIENTS
    told = f"{num_late_bytes} bytes were late; {num_mismatches(fleet)} mismatches so far"
    print(f"seed {seed}: {told}")  # noqa: T201
    fleet.assert_as_it_began()


def test_what_a_killed_writer_leaves_to_a_stopped_reader_is_never_decoded(fleet):
    receiver_stopped_writer_killed_receiver_continued(fleet, seed=10)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1100, 10))
def test_nor_at_any_other_moment(fleet, seed):
    receiver_stopped_writer_killed_receiver_continued(fleet, seed)


def test_a_stopped_reader_fails_no_request_and_its_writer_stays_usable(fleet):
    asks = long_asks(5)
    moment = published_bytes(fleet) + 20 * BLOCK_BYTES
    listeners = Listeners(fleet, asks)
    assert wait_until(lambda: published_bytes(fleet) >= moment, 60)
    with fleet["decode 0"].stopped():
        failures = "moonshard_kv_transfer_failures_total"
        wait_until(lambda: fleet.metric(failures) > 0, 5)  # a write timed out, if one was under way
    assert_all_right(asks, listeners.wait())
    fleet.assert_as_it_began()
