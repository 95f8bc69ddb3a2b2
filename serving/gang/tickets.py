"""What the members of a gang call blocks on their way: handoffs count from 0, those to tiers and back from here on."""

import itertools
from collections.abc import Iterator

_FIRST_OF_TIERS = 1 << 62


def tier_tickets() -> Iterator[int]:
    return itertools.count(_FIRST_OF_TIERS)


def is_of_tiers(ticket: int) -> bool:
    return ticket >= _FIRST_OF_TIERS
