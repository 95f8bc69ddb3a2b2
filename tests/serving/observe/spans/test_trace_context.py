"""What is a trace context, what is none, and which traces are sampled."""

import pytest

from moonshard.serving.observe.spans.context import TraceContext, TraceSampling, parse_context, read_context, with_span

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


def context(flags: int = 1, trace_id: bytes = bytes.fromhex(TRACE)) -> TraceContext:
    return TraceContext(trace_id, bytes.fromhex(SPAN), flags, "vendor=1")


def read(*pairs: tuple[str, str]) -> TraceContext | None:
    return read_context(lambda name: [value for key, value in pairs if key == name])


def test_a_context_is_read_as_it_is_written():
    found = parse_context(PARENT, "vendor=1,tenant@other=a b")
    assert found is not None
    assert found == TraceContext(bytes.fromhex(TRACE), bytes.fromhex(SPAN), 1, "vendor=1,tenant@other=a b")
    assert found.traceparent == PARENT
    assert found.is_sampled


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "00",
        PARENT.upper(),
        PARENT + "-",
        PARENT + "-more",
        PARENT[:-1],
        PARENT + " ",
        PARENT + "\n",
        "ff" + PARENT[2:],
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00_{TRACE}_{SPAN}_01",
        f"00-{TRACE[:-1]}\u0663-{SPAN}-01",
        "x" * 100_000,
    ],
)
def test_what_is_malformed_is_none(traceparent: str):
    assert parse_context(traceparent, "vendor=1") is None


def test_a_version_to_come_may_say_more():
    found = parse_context(f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", "")
    assert found is not None
    assert found.traceparent == PARENT
    assert parse_context(f"cc-{TRACE}-{SPAN}-01.more", "") is None


MANY = ",".join(f"k{i}=1" for i in range(33))


@pytest.mark.parametrize("tracestate", ["a=1,a=2", "A=1", "a", "=1", "a=1=2", "a=ü", "a=" + "x" * 600, MANY])
def test_a_malformed_state_is_left_out_and_spoils_nothing(tracestate: str):
    found = parse_context(PARENT, tracestate)
    assert found is not None
    assert found.state == ""


def test_headers_that_came_apart_are_one_state_and_two_parents_are_none():
    found = read(("traceparent", f" {PARENT}\t"), ("tracestate", "a=1, "), ("tracestate", " ,b=2"))
    assert found is not None
    assert found.state == "a=1,b=2"
    assert read(("traceparent", PARENT), ("traceparent", PARENT)) is None
    assert read(("tracestate", "a=1")) is None


def test_another_span_of_a_trace():
    assert with_span(PARENT, b"\xab" * 8) == f"00-{TRACE}-{'ab' * 8}-01"
    child = context().child()
    assert (child.trace_id, child.flags, child.state) == (bytes.fromhex(TRACE), 1, "vendor=1")
    assert child.span_id != context().span_id
    assert child.span_id != context().child().span_id


@pytest.mark.parametrize("flags", [0, 1, 2, 3])
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_whoever_began_a_trace_decides_unless_told_otherwise(ratio: float, flags: int):
    followed = TraceSampling(ratio).begin(context(flags))
    assert followed.flags == flags
    own = TraceSampling(ratio, is_parent_based=False).begin(context(flags))
    assert own.flags == flags & 2 | int(ratio)
    for made in (followed, own):
        assert (made.trace_id, made.state) == (bytes.fromhex(TRACE), "vendor=1")
        assert made.span_id != bytes.fromhex(SPAN)


def test_a_share_of_the_traces_that_begin_here_is_sampled_by_their_ids():
    begun = [TraceSampling(0.25).begin(None) for _ in range(4000)]
    assert len({made.trace_id for made in begun}) == len({made.span_id for made in begun}) == 4000
    assert 800 < sum(made.is_sampled for made in begun) < 1200
    for made in begun:
        assert made.is_sampled == (int.from_bytes(made.trace_id[8:]) < 2**62)
    assert not any(TraceSampling(0.0).begin(None).is_sampled for _ in range(100))
    assert all(TraceSampling(1.0).begin(None).is_sampled for _ in range(100))
