"""What a process keeps for life is out of the collector's sight, and garbage is not among it."""

import gc
import weakref

from moonshard.serving.heap import keep_for_life


class Node:
    def __init__(self) -> None:
        self.itself = self  # a cycle, which only the collector ends


def test_what_lives_is_not_looked_through_again_and_what_is_garbage_goes():
    node, garbage = Node(), weakref.ref(Node())
    try:
        keep_for_life()
        assert garbage() is None
        assert node not in gc.get_objects()
        later = Node()
        assert later in gc.get_objects()
    finally:
        gc.unfreeze()
