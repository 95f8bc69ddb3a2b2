"""An engine's events may call it back: a launch is never begun within another."""

import asyncio
from dataclasses import replace

import pytest

from moonshard.serving.control.request import Request
from tests.serving.fake_executor import FakeExecutor, an_engine

REQUESTS = [Request(id=bytes([number]) * 16, prompt=(1, 2, 3), max_tokens=3) for number in range(2)]


@pytest.mark.parametrize("event", ["before_prefill", "on_prefill", "on_step", "on_done"])
@pytest.mark.parametrize("verb", ["wake", "cancel", "submit"])
async def test_what_a_listener_asks_for_is_launched_in_its_turn(event: str, verb: str):
    executor, has_called = FakeExecutor(), False

    def call_back(*_told: object) -> None:
        nonlocal has_called
        if has_called:
            return
        has_called = True
        match verb:
            case "wake":
                engine.wake()
            case "cancel":
                engine.cancel(REQUESTS[0].id)
            case _:
                engine.submit(replace(REQUESTS[0], id=b"another"))

    engine = an_engine(executor, None, **{event: call_back})
    engine.start()
    for request in REQUESTS:
        engine.submit(request)
    async with asyncio.timeout(5):
        await engine.wait_idle()
    await engine.close()
    assert not engine.failed.done()
    assert has_called
    numbers = [step.number for step in executor.launched]
    assert numbers == sorted(numbers)
