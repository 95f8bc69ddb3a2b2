"""What the launcher tells Ray's driver, and what that says in return: the events on the pipes between the two.

The launcher orders `start` and `signal`. The driver says once that it is `connected`, and of each process what it says
(`said`, `line`), at last that it has `ended`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

# In a command for a node, of which its supervisor does not know these:
NODE = "$(NODE_ADDRESS)"
KEY_FILE = "$(CLUSTER_KEY_FILE)"  # where it has the cluster's key


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Place and start a process, or for `member` 0 the gang that it leads: in the place that gang has, or gets."""

    number: int  # by which both ends know this process
    name: str
    gang: str
    member: int
    num_members: int
    bundle: dict[str, float]
    argv: Sequence[str]
    environment: dict[str, str]
    key: str = field(repr=False)  # the cluster's, in hex


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal:
    number: int
    signal: int


def order_of(event: str, fields: dict[str, object]) -> Start | Signal:
    """ValidationError where it is none."""
    return msgspec.convert(fields, Start if event == "start" else Signal)
