"""A worker process that is stopped, as a debugger or a full machine stops it, and goes on later."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator

import pytest

from moonshard.rpc import link_pb2
from moonshard.rpc.status import Unavailable
from moonshard.serving.config.keys import RoutingConfig
from moonshard.serving.gateway.workers.dispatching import dispatcher_of
from moonshard.serving.gateway.workers.knowledge import Knowledge
from moonshard.serving.gateway.workers.pool import LinkPool, PoolEvents
from tests.dialling import own_key
from tests.serving.gateway import fake_process
from tests.serving.gateway.fake_worker import expected_tokens

pytestmark = pytest.mark.xdist_group("cluster")


@pytest.fixture
async def process() -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """A scripted worker, and its port."""
    arguments = (sys.executable, "-m", fake_process.__name__, "both", "ab" * 16)
    worker = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    assert worker.stdout is not None
    yield worker, int(await worker.stdout.readline())
    worker.kill()
    await worker.wait()


def a_run(request_id: bytes, max_tokens: int) -> link_pb2.Run:
    return link_pb2.Run(request_id=request_id, prompt_tokens=[1, 2], n=1, max_tokens=max_tokens)


async def test_a_stopped_process_is_found_and_what_it_says_later_changes_nothing(
    process: tuple[asyncio.subprocess.Process, int],
):
    worker, port = process
    address = f"127.0.0.1:{port}"
    knowledge = Knowledge(dispatcher_of([address], RoutingConfig()))
    events = PoolEvents(on_load=lambda *_: None, on_handoff=lambda *_: None, on_lost=lambda *_: None)
    pool = LinkPool([address], knowledge, events, silence_s=1.0, key=own_key().proofs)
    async with asyncio.timeout(60), pool.running():
        await pool.wait_ready()
        session = knowledge.session_at(address)
        worker.send_signal(signal.SIGSTOP)
        inbox = session.run(a_run(b"1" * 16, 1_000))
        with pytest.raises(Unavailable):
            await inbox.take()
        assert (session.is_lost, pool.is_ready, worker.returncode) == (True, False, None)
        worker.send_signal(signal.SIGCONT)
        await pool.wait_ready()
        again = knowledge.session_at(address)
        assert again is not session
        assert again.epoch == session.epoch
        later = again.run(a_run(b"2" * 16, 20))
        tokens: list[int] = []
        while len(tokens) < 20:
            tokens += [token for arrival in await later.take() for token in arrival.output.token_ids]
        assert tokens == expected_tokens([1, 2], 20)
        assert inbox.empty()
