"""A request whose grammar is not compiled yet waits for it, alone, and can end before it has begun."""

import asyncio
import threading

import grpc
import pytest

from moonshard.rpc import link_pb2
from moonshard.serving.constrained.grammars import Grammars
from moonshard.serving.worker.roles.compiled_first import CompiledFirst
from tests.agreement import assert_drawn_from, reference
from tests.engine_room import grammars, long_text
from tests.serving.engine.test_engine_grammars import GREEDY, allowed
from tests.serving.worker.test_worker_link import Gateway, config, run_message, serving

pytestmark = pytest.mark.xdist_group("jax")
LETTERS, PROMPT = "start: /[a-z ]{1,90}/", long_text(20)
assert config  # of the worker that `serving` gives


class Held:
    """Compilations that wait until they are told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.has_begun, self._may_go_on = threading.Event(), threading.Event()
        compiled = Grammars._compiled

        def later(grammars: Grammars, text: str):
            self.has_begun.set()
            assert self._may_go_on.wait(60)
            return compiled(grammars, text)

        monkeypatch.setattr(Grammars, "_compiled", later)

    def go_on(self) -> None:
        self._may_go_on.set()


async def test_a_request_keeps_to_the_grammar_that_came_with_it():
    async with serving() as (_, address):
        gateway = Gateway(address)
        await gateway.hello()
        await gateway.call.write(run_message(1, PROMPT, 30, grammar=LETTERS, stop_token_ids=grammars().end_ids))
        tokens = (await gateway.outputs(1))[1]
        assert_drawn_from(reference(), PROMPT, tokens, GREEDY, allowed=allowed(LETTERS, tokens))


async def test_others_are_served_while_one_waits_for_its_grammar(monkeypatch: pytest.MonkeyPatch):
    held = Held(monkeypatch)
    async with serving() as (_, address):
        gateway = Gateway(address)
        await gateway.hello()
        await gateway.call.write(run_message(1, PROMPT, 30, grammar=LETTERS, stop_token_ids=grammars().end_ids))
        assert await asyncio.to_thread(held.has_begun.wait, 60)
        await gateway.run(2, PROMPT, 10)
        assert list(await gateway.outputs(1)) == [2]
        held.go_on()
        assert list(await gateway.outputs(1)) == [1]


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_a_request_that_ends_while_it_waits_is_never_begun(monkeypatch: pytest.MonkeyPatch, how: str):
    held = Held(monkeypatch)
    async with serving() as (worker, address):
        gateway, other = Gateway(address), Gateway(address)
        await gateway.hello()
        await other.hello()
        await gateway.call.write(run_message(1, PROMPT, 30, grammar=LETTERS))
        assert await asyncio.to_thread(held.has_begun.wait, 60)
        assert worker._compiled_first.num_waiting == 1
        if how == "cancel":
            await gateway.cancel(1)
            await gateway.run(2, PROMPT, 3)  # behind the cancel
            await gateway.outputs(1)
        else:
            is_closed, close_link = asyncio.Event(), CompiledFirst.close_link
            monkeypatch.setattr(
                CompiledFirst, "close_link", lambda self, link: (close_link(self, link), is_closed.set())
            )
            gateway.call.cancel()
            await is_closed.wait()
        assert worker._compiled_first.num_waiting == 0
        num_begun = worker.engine.counters().totals.num_prefill_steps
        held.go_on()
        await other.call.write(run_message(3, PROMPT, 3, grammar='start: "b"'))  # compiled behind the first
        await other.outputs(1)
        assert worker.engine.counters().totals.num_prefill_steps == num_begun + 1


async def test_a_request_that_comes_again_while_it_waits_is_the_one_that_is_begun(monkeypatch: pytest.MonkeyPatch):
    held = Held(monkeypatch)
    async with serving() as (_, address):
        gone, gateway = Gateway(address), Gateway(address)
        await gone.hello()
        await gateway.hello()
        ends = grammars().end_ids
        await gone.call.write(run_message(1, PROMPT, 30, grammar=LETTERS, stop_token_ids=ends))
        assert await asyncio.to_thread(held.has_begun.wait, 60)
        await gone.cancel(1)
        await gone.run(2, PROMPT, 2)
        await gone.outputs(1)  # behind the cancel
        again = run_message(1, PROMPT, 7, grammar=LETTERS, stop_token_ids=ends)
        await gateway.call.write(again)
        await gateway.call.write(again)  # says nothing new
        await gateway.run(3, PROMPT, 2)
        await gateway.outputs(1)
        held.go_on()
        assert len((await gateway.outputs(1))[1]) <= 7


async def test_a_drain_waits_for_whoever_waits(monkeypatch: pytest.MonkeyPatch):
    held = Held(monkeypatch)
    async with serving() as (worker, address):
        gateway = Gateway(address)
        await gateway.hello()
        await gateway.call.write(run_message(1, PROMPT, 5, grammar=LETTERS))
        assert await asyncio.to_thread(held.has_begun.wait, 60)
        idle = asyncio.create_task(worker.wait_idle())
        await gateway.run(2, PROMPT, 3)
        await gateway.outputs(1)
        assert not idle.done()
        held.go_on()
        await gateway.outputs(1)
        await idle


@pytest.mark.parametrize("grammar", ["start: foo", "x" * (1 << 21)], ids=["faulty", "too long"])
async def test_a_faulty_grammar_fails_its_request_alone_and_names_the_field(grammar: str):
    async with serving() as (_, address):
        gateway = Gateway(address)
        await gateway.hello()
        await gateway.call.write(run_message(1, PROMPT, 30, grammar=grammar))
        message = link_pb2.WorkerMessage()
        while message.WhichOneof("message") != "failed":
            message = await gateway.call.read()
        assert (message.failed.code, message.failed.field) == (grpc.StatusCode.INVALID_ARGUMENT.value[0], "grammar")
        await gateway.run(2, PROMPT, 3)
        assert len((await gateway.outputs(1))[2]) == 3
