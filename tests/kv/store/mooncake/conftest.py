"""Stores of one or of all tests of a file, and tiers on them."""

from collections.abc import Iterator

import pytest

from moonshard.kv.store.mooncake.tier import MooncakeStoreTier
from moonshard.serving.store.processes import MooncakeProcesses
from tests.kv.store.mooncake.store_room import SETTINGS, store_of, tier_on


@pytest.fixture(scope="module")
def shared_store() -> Iterator[MooncakeProcesses]:
    """For tests that let it live."""
    yield from store_of(SETTINGS)


@pytest.fixture
def own_store() -> Iterator[MooncakeProcesses]:
    yield from store_of(SETTINGS)


@pytest.fixture
def tier(shared_store: MooncakeProcesses) -> Iterator[MooncakeStoreTier]:
    with tier_on(shared_store) as tier:
        yield tier


@pytest.fixture
def hasty(own_store: MooncakeProcesses) -> Iterator[MooncakeStoreTier]:
    """A tier that does not wait long, on a store of its own."""
    with tier_on(own_store, timeout_s=0.1) as tier:
        yield tier
