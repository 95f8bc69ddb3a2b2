"""What workers tell of their parts of a request: under whose span, in which phases, and how each part ended."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from moonshard.rpc import link_pb2
from moonshard.serving.observe.spans.export import SpanExport
from moonshard.serving.observe.spans.span import EndedSpan
from moonshard.serving.worker.spans import WorkerSpans
from tests.engine_room import long_text
from tests.serving.pd.pd_pair import Pair, run, running

pytestmark = pytest.mark.xdist_group("jax")
TRACE, ATTEMPT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TOLD: dict[str, Any] = {"traceparent": f"00-{TRACE}-{ATTEMPT}-01", "tracestate": "vendor=1"}


class Sink:
    def __init__(self) -> None:
        self.spans: list[EndedSpan] = []

    def export(self, spans: Sequence[EndedSpan]) -> str | None:
        self.spans += spans
        return None

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Traced:
    """A pair whose spans are known when the block has ended."""

    pair: Pair
    sinks: tuple[Sink, Sink]

    @property
    def prefill(self) -> list[EndedSpan]:
        return self.sinks[0].spans

    @property
    def decode(self) -> list[EndedSpan]:
        return self.sinks[1].spans


@asynccontextmanager
async def traced(**options) -> AsyncIterator[Traced]:
    sinks = Sink(), Sink()
    exports = [SpanExport(lambda sink=sink: sink, "nowhere") for sink in sinks]
    spans = [WorkerSpans(export, role=role) for export, role in zip(exports, ("prefill", "decode"), strict=True)]
    for export in exports:
        export.start()
    async with running(spans=(spans[0], spans[1]), **options) as pair:
        yield Traced(pair, sinks)
    for export, each in zip(exports, spans, strict=True):
        export.close()
        assert each.num_open == 0
        assert export.num_lost == 0


def parts(spans: list[EndedSpan]) -> list[EndedSpan]:
    return [span for span in spans if span.kind == "server"]


def phases(spans: list[EndedSpan], part: EndedSpan) -> list[str]:
    """Their names, in the order in which they began; all within the part, and of its trace."""
    found = [span for span in spans if span.parent == part.context]
    for span in found:
        assert part.begun_ns <= span.begun_ns <= span.ended_ns <= part.ended_ns, span.name
        assert (span.context.trace_id, span.context.state) == (part.context.trace_id, part.context.state)
    return [span.name for span in sorted(found, key=lambda span: (span.begun_ns, span.ended_ns))]


def outcome(part: EndedSpan) -> tuple[object, str | None]:
    return part.attributes.get("moonshard.outcome"), part.error


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # answers have no event for each token
        await asyncio.sleep(0.001)


def assert_ours(part: EndedSpan, asked: link_pb2.Run) -> None:
    assert part.parent is not None
    assert (part.parent.trace_id.hex(), part.parent.span_id.hex()) == (TRACE, ATTEMPT)
    assert part.context.trace_id == part.parent.trace_id
    assert part.context.state == "vendor=1"
    assert part.attributes["moonshard.attempt.id"] == asked.request_id.hex()
    assert part.attributes["gen_ai.usage.input_tokens"] == len(asked.prompt_tokens)


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("length", [15, 300])
async def test_both_legs_of_a_handoff_are_below_its_attempt(length: int, num_choices: int):
    asked = run(long_text(length), 20, n=num_choices, sampling={"temperature": 1.0, "seed": 1}, **TOLD)
    async with traced() as done:
        answer = await done.pair.ask(asked)
        assert answer.cause is None
    (prefill,), (decode,) = parts(done.prefill), parts(done.decode)
    assert (prefill.name, decode.name) == ("prefill worker", "decode worker")
    for part in (prefill, decode):
        assert_ours(part, asked)
        assert outcome(part) == (None, None)
    assert sorted(phases(done.prefill, prefill)) == ["prefill", "queue", "transfer"]
    assert phases(done.prefill, prefill)[0] == "queue"
    assert phases(done.decode, decode) == ["reserve", "land", "join", "decode"]
    assert len({span.context.span_id for span in done.prefill + done.decode}) == 3 + 4 + 2
    by_name = {span.name: span.ended_ns - span.begun_ns for span in done.prefill + done.decode}
    told = answer.phases
    for name, duration_ms in (("queue", told.queue_ms), ("prefill", told.prefill_ms), ("join", told.join_ms)):
        assert by_name[name] == pytest.approx(duration_ms * 1e6, abs=2)
    assert by_name["decode"] >= told.decode_ms * 1e6 - 2
    assert by_name["land"] == pytest.approx(told.land_ms * 1e6, abs=5e6)


async def test_a_worker_that_prefills_and_decodes_says_so():
    asked = run(long_text(100), 20, **TOLD)
    async with traced() as done:
        await done.pair.ask_decode_alone(asked)
    (part,) = parts(done.decode)
    assert_ours(part, asked)
    assert phases(done.decode, part) == ["queue", "prefill", "decode"]
    assert part.attributes["gen_ai.usage.cache_read.input_tokens"] == 0
    assert done.prefill == []


async def test_what_was_found_in_the_cache_is_told_by_whoever_found_it():
    async with traced() as done:
        await done.pair.ask(run(long_text(100), 4))
        await done.pair.ask(run(long_text(100), 4, **TOLD))
    (prefill,), (decode,) = parts(done.prefill), parts(done.decode)
    assert prefill.attributes["gen_ai.usage.cache_read.input_tokens"] == 96
    assert "gen_ai.usage.cache_read.input_tokens" not in decode.attributes


@pytest.mark.parametrize(
    "fields",
    [{}, {"traceparent": f"00-{TRACE}-{ATTEMPT}-00"}, {"traceparent": "nonsense"}, {"tracestate": "vendor=1"}],
)
async def test_who_names_no_sampled_span_gets_none(fields: dict[str, Any]):
    async with traced() as done:
        assert (await done.pair.ask(run(long_text(40), 5, **fields))).cause is None
        await done.pair.ask_decode_alone(run(long_text(30), 5, **fields))
    assert done.prefill == done.decode == []


async def test_a_request_that_is_given_up_while_it_decodes_was_cancelled():
    asked = run(long_text(40), 1000, **TOLD)
    async with traced() as done:
        answer = done.pair.begin(asked)
        await until(lambda: len(answer.tokens.get(0, ())) >= 5)
        done.pair.cancel(asked)
    (prefill,), (decode,) = parts(done.prefill), parts(done.decode)
    assert (outcome(prefill), outcome(decode)) == ((None, None), ("cancelled", None))
    assert phases(done.decode, decode) == ["reserve", "land", "join", "decode"]


async def test_a_handoff_that_is_given_up_before_was_cancelled_on_both_sides():
    asked = run(long_text(1500), 50, **TOLD)
    async with traced() as done:
        done.pair.begin(asked)
        await until(lambda: done.pair.prefill.inspect().load.num_running > 0)
        done.pair.cancel(asked)
    (prefill,), (decode,) = parts(done.prefill), parts(done.decode)
    assert [outcome(part) for part in (prefill, decode)] == [("cancelled", None)] * 2
    assert phases(done.decode, decode) == ["reserve"]
    assert "transfer" not in phases(done.prefill, prefill)


async def test_a_request_that_is_turned_down_failed():
    asked = run(long_text(40), 10**6, **TOLD)
    async with traced() as done:
        done.pair.begin(asked)
        await asyncio.sleep(0)
    (decode,) = parts(done.decode)
    assert outcome(decode) == ("invalid_argument", "invalid_argument")
    assert decode.attributes["error.type"] == "invalid_argument"
    assert phases(done.decode, decode) == []


async def test_a_gateway_that_is_lost_cancels_what_it_asked():
    asked = run(long_text(40), 1000, **TOLD)
    async with traced() as done:
        pair = done.pair
        answer = pair.begin(asked)
        await until(lambda: len(answer.tokens.get(0, ())) >= 5)
        for worker in (pair.prefill, pair.decode):
            worker.close_link(pair.link(worker))
    (decode,) = parts(done.decode)
    assert outcome(decode) == ("cancelled", None)


async def test_a_reservation_without_a_prefill_ends_with_its_lease():
    asked = run(long_text(40), 10, **TOLD)
    async with traced(lease_s=0.3) as done:
        done.pair.to_prefill = lambda message, link: None
        answer = done.pair.begin(asked, lease_s=0.3)
        await answer.is_over.wait()
    (decode,) = parts(done.decode)
    assert outcome(decode) == ("lease", "lease")


async def test_what_still_runs_when_the_engine_fails_failed_with_it():
    asked = run(long_text(40), 1000, **TOLD)
    async with traced() as done:
        answer = done.pair.begin(asked)
        await until(lambda: len(answer.tokens.get(0, ())) >= 5)
        done.pair.decode.fail()
        done.pair.cancel(asked)
    (decode,) = parts(done.decode)
    assert outcome(decode) == ("internal", "internal")
