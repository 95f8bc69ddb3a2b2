"""Columns of loads against a plain dictionary, beyond their first capacity."""

import numpy as np

from moonshard.serving.control.routing.loads import FIRST_CAPACITY, SILENT, Loads


def test_homes_are_numbered_in_turn_and_keep_their_loads_when_the_columns_grow():
    loads = Loads()
    for number in range(3 * FIRST_CAPACITY):
        assert loads.append() == number
        loads.in_flight[number] = loads.total[number] = 10 * number
        assert loads.reported[number] == SILENT
        assert loads.last_choice[number] < 0
    assert len(loads) == 3 * FIRST_CAPACITY
    assert loads.in_flight[: len(loads)].tolist() == [10 * number for number in range(3 * FIRST_CAPACITY)]


def test_what_is_queued_is_what_was_reported_and_what_no_report_has():
    loads = Loads()
    for _ in range(3):
        loads.append()
    loads.in_flight[:3], loads.unseen[:3] = 100, 30
    loads.reported[:3] = SILENT, 0, 7
    assert loads.queued(np.array([2, 0, 1])).tolist() == [37, 100, 30]
