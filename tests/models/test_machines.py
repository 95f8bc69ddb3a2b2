"""Every kind of machine has sizes that go with each other."""

import pytest

from moonshard.models.machines import MACHINES
from moonshard.models.native import library


@pytest.mark.parametrize("kind", MACHINES)
def test_steps_are_whole_rows_and_the_smallest_is_at_most_one(kind: str):
    machine = MACHINES[kind]
    assert machine.chunk_tokens % machine.tile_tokens == 0
    assert 1 < machine.few_tokens <= machine.tile_tokens
    assert min(machine.expand_from, machine.keys, machine.expanded_keys, machine.expanded_queries) > 0


def test_every_form_of_the_kernels_has_its_sizes():
    found = library.chosen()
    forms = () if found is None else found.forms
    assert all(MACHINES[form].reads_in_place for form in forms)
    assert not any(MACHINES[kind].reads_in_place for kind in ("xla", "gpu"))
