"""Pins against a plain dictionary with times, and what no client can do to them."""

import gc

from hypothesis import given
from hypothesis import strategies as st

from moonshard.serving.control.routing.pins import KEY_BYTES, Pins, affinity_key


@given(
    steps=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.sampled_from([0.0, 1.0, 4.0, 9.0])), max_size=40)
)
def test_a_pin_lasts_as_long_as_it_is_used(steps: list[tuple[int, int, float]]):
    pins, expected, now_s = Pins(ttl_s=10.0), dict[bytes, tuple[int, float]](), 0.0
    for session, home, wait_s in steps:
        now_s += wait_s
        key = bytes([session])
        pinned, until_s = expected.get(key, (None, 0.0))
        assert pins.find(key, now_s) == (pinned if until_s > now_s else None)
        pins.put(key, home, now_s)
        expected[key] = home, now_s + 10.0
    assert pins.num_pins <= len(expected)


def test_no_more_pins_than_allowed_are_kept_and_the_oldest_goes():
    pins = Pins(max_pins=3)
    for session in range(5):
        pins.put(bytes([session]), session, now_s=float(session))
    assert [pins.find(bytes([session]), 5.0) for session in range(5)] == [None, None, 2, 3, 4]


def test_a_pin_lasts_for_ten_minutes():
    pins = Pins()
    pins.put(b"session", 3, now_s=0.0)
    assert [pins.find(b"session", now_s) for now_s in (599.9, 600.0)] == [3, None]


def test_the_collector_does_not_look_at_pins():
    pins = Pins()
    pins.put(b"session", 3, now_s=0.0)
    gc.collect()
    assert not any(gc.is_tracked(pin) for pin in pins._pins.values())


def test_with_its_process_the_pins_of_a_home_end_and_no_others():
    pins = Pins()
    for session, home in ((b"a", 3), (b"b", 4)):
        pins.put(session, home, now_s=0.0)
    pins.end(3)
    assert [pins.find(session, 1.0) for session in (b"a", b"b")] == [None, 4]
    pins.put(b"a", 3, now_s=2.0)
    assert pins.find(b"a", 3.0) == 3


def test_what_was_put_in_vain_is_dropped_but_not_what_came_after_it():
    pins = Pins()
    pins.put(b"a", 3, now_s=0.0)
    pins.drop(b"a", 4)
    assert pins.find(b"a", 1.0) == 3
    pins.drop(b"a", 3)
    pins.drop(b"a", 3)
    assert pins.find(b"a", 1.0) is None


@given(st.text(), st.text(), st.text(), st.text())
def test_names_are_told_apart_by_tenant_and_are_never_kept_as_they_are(a: str, b: str, c: str, d: str):
    assert (affinity_key(a, b) == affinity_key(c, d)) == ((a, b) == (c, d))
    assert len(affinity_key(a, b * 1000)) == KEY_BYTES


def test_a_name_of_any_characters_has_a_key():
    assert len(affinity_key("", "\ud800 \x00 ☃")) == KEY_BYTES
