"""Where the codes and the scales of a stored matrix lie in a leaf that views it otherwise and that a mesh cuts.

A leaf has the matrix' rows and columns split into dimensions of its own, such as heads, takes a part of one, and is cut
over devices; wherever that would go through a block, all blocks of the leaf are made so much smaller that none is cut,
and a scale stands once for each of the smaller blocks. No value changes by that.
"""

import math
from dataclasses import dataclass

import numpy as np

from moonshard.models.formats.blocks import num_blocks, refined
from moonshard.models.formats.format import Format
from moonshard.models.spec import View


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Of one matrix. `shape` is the leaf's own, of its trailing dimensions, and so is `block`."""

    format: Format
    matrix: tuple[int, int]
    view: View
    shape: tuple[int, ...]
    block: tuple[int, ...]

    @classmethod
    def of(
        cls, format: Format, matrix: tuple[int, int], view: View | None, num_parts: tuple[int, ...]
    ) -> "Layout | None":
        """None where the view or a cut would go through an item that has several codes.

        Args:
            num_parts: into how many parts each dimension of the leaf is cut.
        """
        view = view or View(shape=matrix)
        ranges = [range(*part.indices(size)) for part, size in zip(_parts(view), view.shape, strict=True)]
        cuts = list[list[int]]()  # places in each dimension, counted from where its blocks begin, that no block crosses
        for own, size, count in zip(ranges, view.shape, num_parts, strict=True):
            ends = [] if len(own) == size else [own.start, own.stop]
            cuts.append(ends if count == 1 else [*ends, len(own) // count])
        last = cuts[-1] if view.shape[-1] == matrix[1] else [*cuts[-1], view.shape[-1]]
        if any(place % format.codes_per_item for place in last):
            return None
        blocks = _split(view.shape, matrix, format.block(matrix[1]))
        return cls(
            format=format,
            matrix=matrix,
            view=view,
            shape=tuple(map(len, ranges)),
            block=tuple(refined(block, *own) for block, own in zip(blocks, cuts, strict=True)),
        )

    @property
    def values_shape(self) -> tuple[int, ...]:
        """Of the leaf's array of codes, as they are stored."""
        return (*self.shape[:-1], -(-self.shape[-1] // self.format.codes_per_item))

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """Of the leaf's array of scales."""
        return num_blocks(self.shape, self.block)

    def values(self, stored: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
        """The part `index` of the leaf's array of codes, out of the stored one, in whose memory it lies."""
        packs = self.format.codes_per_item
        *whole, last = _parts(self.view)
        shape = (*self.view.shape[:-1], -(-self.view.shape[-1] // packs))
        start, stop, _ = last.indices(self.view.shape[-1])
        return stored.reshape(shape)[(*whole, slice(start // packs, -(-stop // packs)))][index]

    def scales(self, stored: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
        """The part `index` of the leaf's array of scales, out of the stored one."""
        first = _num_row_dimensions(self.view.shape, self.matrix[0])
        rows, columns = (
            self._scale_at(dimensions, size, block)[index[dimensions]]
            for dimensions, size, block in (
                (slice(None, first), self.matrix[0], self.format.block(self.matrix[1])[0]),
                (slice(first, None), self.matrix[1], self.format.block(self.matrix[1])[1]),
            )
        )
        if (row_run := _run(rows)) is not None and (column_run := _run(columns)) is not None:
            return stored[row_run, column_run]
        return stored[rows.reshape(*rows.shape, *(1,) * columns.ndim), columns]

    def _scale_at(self, dimensions: slice, size: int, block: int) -> np.ndarray:
        """For each block of these dimensions, which are the matrix' rows or its columns: which stored scale it has."""
        places = np.arange(size).reshape(self.view.shape[dimensions])[_parts(self.view)[dimensions]]
        firsts = places[tuple(slice(None, None, own) for own in self.block[dimensions])]
        return firsts // block


def _run(places: np.ndarray) -> slice | None:
    """The same places as a slice, which costs no copy; None: they are none."""
    is_run = places.ndim == 1 and places.size > 0 and bool((np.diff(places) == 1).all())
    return slice(int(places[0]), int(places[-1]) + 1) if is_run else None


def _parts(view: View) -> tuple[slice, ...]:
    return (*view.part, *(slice(None),) * (len(view.shape) - len(view.part)))


def _num_row_dimensions(shape: tuple[int, ...], num_rows: int) -> int:
    """How many of a view's dimensions are a matrix' rows; the others are its columns."""
    return next(count for count in range(1, len(shape)) if math.prod(shape[:count]) == num_rows)


def _split(shape: tuple[int, ...], matrix: tuple[int, int], block: tuple[int, int]) -> tuple[int, ...]:
    """The block along each dimension of a view: of rows that are split, the innermost is what has blocks."""
    first = _num_row_dimensions(shape, matrix[0])
    found = list[int]()
    for dimensions, own in ((shape[:first], block[0]), (shape[first:], block[1])):
        is_split = len(dimensions) > 1
        found += [*(1,) * (len(dimensions) - 1), refined(own, dimensions[-1]) if is_split else own]
    return tuple(found)
