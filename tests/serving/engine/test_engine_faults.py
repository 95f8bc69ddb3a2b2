"""A fault, wherever it happens, is told: an engine that can take no further step never looks as if it were serving."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from moonshard.serving.control.request import Request
from moonshard.serving.engine.encoder import StepEncoder
from moonshard.serving.engine.engine import Engine
from tests.serving.fake_executor import FakeExecutor, an_engine

REQUEST = Request(id=b"r" * 16, prompt=(1, 2, 3), max_tokens=8)


class Broken(Exception):
    """The error that the test makes happen."""


async def failure_of(engine: Engine) -> BaseException:
    engine.start()
    engine.submit(REQUEST)
    await asyncio.wait({engine.failed}, timeout=5)
    error = engine.failed.exception()
    assert error is not None
    return error


def breaking(at: int) -> Callable[[object], None]:
    """Raises at the call of that number."""
    num_calls = 0

    def break_now(_what: object) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == at:
            raise Broken

    return break_now


@pytest.mark.parametrize("at", [1, 3])
async def test_a_fault_on_the_device_fails_the_engine(at: int):
    assert isinstance(await failure_of(an_engine(FakeExecutor(fetch=breaking(at)))), Broken)


@pytest.mark.parametrize("at", [1, 3])
async def test_a_fault_in_what_is_done_with_a_steps_tokens_fails_the_engine(at: int):
    engine = an_engine(FakeExecutor(), on_step=breaking(at))
    assert isinstance(await failure_of(engine), Broken)
    await engine.close()


async def test_a_fault_while_a_step_is_packed_fails_the_engine_and_not_the_link_it_came_over(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(StepEncoder, "encode", lambda self, plan: breaking(1)(plan))
    engine = an_engine(FakeExecutor())
    assert isinstance(await failure_of(engine), Broken)
    await engine.close()


async def test_a_fault_in_what_is_done_behind_a_prefill_fails_the_engine():
    engine = an_engine(FakeExecutor(), on_prefill=breaking(1))
    assert isinstance(await failure_of(engine), Broken)
    await engine.close()


@pytest.mark.parametrize("verb", ["export", "land"])
async def test_a_fault_in_what_is_done_with_exported_or_landed_blocks_fails_the_engine(verb: str):
    engine = an_engine(FakeExecutor())

    def fail(*_exported: np.ndarray) -> None:
        raise Broken

    if verb == "export":
        engine.export(0, [1], fail)
    else:
        engine.land(0, [1], np.zeros((1, 1, 1, 1), np.float32), fail)
    assert isinstance(await failure_of(engine), Broken)
    await engine.close()


async def test_without_a_fault_the_same_engine_serves():
    engine = an_engine(FakeExecutor())
    engine.start()
    engine.submit(REQUEST)
    async with asyncio.timeout(5):
        await engine.wait_idle()
    await engine.close()
    assert not engine.failed.done()
    engine.failed.cancel()
