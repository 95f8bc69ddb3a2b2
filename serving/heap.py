"""The heap of a process that serves: what it keeps for life is not looked through again and again.

Python's collector of reference cycles stops the process, and its oldest generation is everything that ever lived long:
modules, tokenizer, compiled programs. With 256 streams it came every 2 s and took a gateway 35 to 55 ms, in which no
token moved. After start-up nearly all of this is there for good, so that it is left out from then on.
Source: vLLM, which freezes its heap after start-up for the same reason.
"""

import gc


def keep_for_life() -> None:
    """Everything alive now is taken to stay. Once, when all is loaded: it takes some 0.1 s."""
    gc.collect()
    gc.freeze()
