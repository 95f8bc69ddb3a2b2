"""What may be logged again and again is said once a minute, and not at all beyond a bound."""

from moonshard.rpc.server.seldom import MOST, PERIOD_S, Seldom


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_thing_is_said_once_a_minute():
    clock = Clock()
    seldom = Seldom(clock)
    assert [seldom.may_say("a", "x"), seldom.may_say("a", "x"), seldom.may_say("a", "y")] == [True, False, True]
    clock.now_s += PERIOD_S / 2
    assert not seldom.may_say("a", "x")
    assert seldom.may_say("b", "x")
    clock.now_s += PERIOD_S / 2
    assert [seldom.may_say("a", "x"), seldom.may_say("b", "x")] == [True, False]


def test_of_very_many_things_only_some_are_said_in_a_minute():
    clock = Clock()
    seldom = Seldom(clock)
    assert sum(seldom.may_say(str(number)) for number in range(3 * MOST)) == MOST
    clock.now_s += PERIOD_S
    assert seldom.may_say("another")
    assert len(seldom._said_s) == 1
