"""An engine whose device emits several tokens of a row in one step."""

import asyncio
import itertools

from moonshard.serving.control.request import FinishReason, Request
from moonshard.serving.engine.engine import StepReport
from moonshard.serving.engine.steps import StepKind
from tests.serving.fake_executor import FakeExecutor, an_engine

REQUEST = Request(id=b"r" * 16, prompt=(1, 2, 3), max_tokens=12, num_logprobs=0)


async def test_every_token_of_a_row_is_reported_with_its_log_probability_in_one_output_of_its_step():
    reports: list[StepReport] = []
    executor = FakeExecutor(q_len=4, num_emitted=itertools.cycle([4, 1, 3, 3]))
    engine = an_engine(executor, on_step=reports.append)
    engine.start()
    engine.submit(REQUEST)
    async with asyncio.timeout(5):
        await engine.wait_idle()
    await engine.close()
    outputs = [emitted.output for report in reports for emitted in report.emitted]
    assert [len(output.token_ids) for output in outputs] == [1, 4, 1, 3, 3]
    assert [len(output.logprobs) for output in outputs] == [1, 4, 1, 3, 3]
    assert [output.finish for output in outputs] == [None] * 4 + [FinishReason.LENGTH]
    assert executor.kinds == [StepKind.PREFILL] + [StepKind.VERIFY] * 4
    engine.failed.cancel()
