"""Colours and marks that are told apart without red and green, and in grey by their marks.

Source: Okabe and Ito, "Color universal design" (2008), without its yellow, which is faint on white.
"""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":")


def colour(index: int) -> str:
    """The colour of curve number `index`; after the last one they begin again."""
    return COLOURS[index % len(COLOURS)]


def marker(index: int) -> str:
    return MARKERS[index % len(MARKERS)]


def dashes(index: int) -> str:
    return DASHES[index % len(DASHES)]
