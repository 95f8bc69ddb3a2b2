"""The circuit breaker, as whoever obeys it sees it."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moonshard.kv.store.mooncake.breaker import Attempt, Breaker

REST_S = 5.0


def begun(breaker: Breaker, now_s: float) -> Attempt:
    attempt = breaker.begin(now_s)
    assert attempt is not None
    return attempt


def closed_breaker() -> Breaker:
    breaker = Breaker(rest_s=REST_S)
    breaker.succeed(begun(breaker, 0.0))
    assert breaker.is_closed
    return breaker


def test_one_attempt_tells_before_all_may_go_on():
    breaker = Breaker(rest_s=REST_S)
    first = begun(breaker, 0.0)
    assert breaker.begin(0.0) is None
    assert breaker.begin(1000.0) is None  # it is still out
    breaker.succeed(first)
    assert breaker.begin(1000.0) is not None
    assert breaker.begin(1000.0) is not None


def test_after_one_failure_nothing_is_attempted_for_the_rest_and_then_one():
    breaker = closed_breaker()
    breaker.fail(begun(breaker, 10.0), 10.1)
    assert not breaker.is_closed
    assert breaker.begin(10.1 + REST_S - 0.01) is None
    probe = begun(breaker, 10.1 + REST_S)
    assert breaker.begin(10.1 + REST_S) is None
    breaker.fail(probe, 20.0)
    assert breaker.begin(20.0 + REST_S - 0.01) is None
    assert breaker.begin(20.0 + REST_S) is not None


def test_what_began_before_a_failure_tells_nothing_after_it():
    breaker = closed_breaker()
    early, late = begun(breaker, 0.0), begun(breaker, 0.0)
    breaker.fail(early, 1.0)
    breaker.succeed(late)
    assert not breaker.is_closed
    probe = begun(breaker, 1.0 + REST_S)
    breaker.fail(late, 1.0 + REST_S)  # neither does it end the probe
    breaker.succeed(probe)
    assert breaker.is_closed


def test_tripped_it_rests_whatever_attempts_say():
    breaker = closed_breaker()
    attempt = begun(breaker, 0.0)
    breaker.trip(1.0)
    breaker.succeed(attempt)
    assert breaker.begin(1.0) is None
    assert breaker.begin(1.0 + REST_S) is not None


class Use(RuleBasedStateMachine):
    """Whatever happens: after the last failure that counts it rests, then one is out at most until one has succeeded.

    The model is the history itself: no failure counts of an attempt that another failure has overtaken.
    """

    def __init__(self):
        super().__init__()
        self.breaker = Breaker(rest_s=REST_S)
        self.now_s = 0.0
        self.out: list[tuple[Attempt, int]] = []  # and the number of failures before it began
        self.num_failures = 0
        self.failed_s = float("-inf")
        self.has_succeeded = False  # since the last failure

    @rule(seconds=st.floats(0.0, 2 * REST_S))
    def wait(self, seconds: float):
        self.now_s += seconds

    @rule()
    def begin(self):
        attempt = self.breaker.begin(self.now_s)
        is_one_out = any(failures == self.num_failures for _, failures in self.out)
        may_probe = self.now_s >= self.failed_s + REST_S and not is_one_out
        assert (attempt is not None) == (self.has_succeeded or may_probe)
        if attempt is not None:
            self.out.append((attempt, self.num_failures))

    @precondition(lambda self: self.out)
    @rule(data=st.data(), is_good=st.booleans())
    def end(self, data: st.DataObject, is_good: bool):
        attempt, failures = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        if is_good:
            self.breaker.succeed(attempt)
        else:
            self.breaker.fail(attempt, self.now_s)
        if failures == self.num_failures:
            self.has_succeeded = is_good
            if not is_good:
                self.num_failures, self.failed_s = self.num_failures + 1, self.now_s

    @invariant()
    def is_closed_while_all_goes_well(self):
        assert self.breaker.is_closed == self.has_succeeded


TestUse = Use.TestCase
TestUse.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
