"""A cache of names of which the router's index is told, as workers tell it."""

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moonshard.serving.control.routing.prefix_index import PrefixIndex


@dataclass(slots=True)
class ToldCache:
    """What the index knows under one number. The least recently used is lost first; None: nothing is."""

    index: PrefixIndex
    number: int
    max_names: int | None
    names: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # least recently used first

    def num_known(self, chain: Sequence[bytes]) -> int:
        """How many of the first names are known."""
        return sum(1 for _ in itertools.takewhile(self.names.__contains__, chain))

    def use(self, chain: Sequence[bytes]) -> None:
        """Marks names as used, the end of the chain first, so that it is also forgotten first."""
        for name in reversed(chain):
            if name in self.names:
                self.names.move_to_end(name)
            else:
                self.names[name] = None
                self.index.add(self.number, name)
        while self.max_names is not None and len(self.names) > self.max_names:
            name, _ = self.names.popitem(last=False)
            self.index.remove(self.number, name)

    def drop(self, names: Iterable[bytes]) -> None:
        """Those of them that are known are not any more."""
        for name in names:
            if name in self.names:
                del self.names[name]
                self.index.remove(self.number, name)
