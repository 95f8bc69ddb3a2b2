"""Matrices of a folder in the formats in which they are stored: which tensors one has, and whether they can be served.

What a matrix is stored in, the presence of its tensors decides, and not what a configuration says of it: lists of what
was left unquantised are wrong for routers and for vision towers.
"""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np

from moonshard.models.formats.format import BF16, F32, Format, Stored
from moonshard.models.formats.known import FORMATS
from moonshard.models.spec import ModelError

WEIGHT = "weight"
ROWS_AT_A_TIME = 8 * 128
PLAIN = (F32, np.dtype(np.float16), BF16)  # what stands for itself


@runtime_checkable
class TensorSource(Protocol):
    """What loading needs of a checkpoint."""

    def has(self, name: str) -> bool: ...

    def tensor(self, name: str) -> np.ndarray: ...

    def where(self, name: str) -> str:
        """The tensor and its file, as a message begins with them."""
        ...

    def expect(self, name: str) -> None:
        """Called before all of a tensor is read."""
        ...

    def release(self, name: str) -> None:
        """Called once a tensor was read: its memory is needed no longer."""
        ...


def format_of(source: TensorSource, name: str) -> Format | None:
    """What the matrix whose plain name is `name` is stored in; None: it is an array, or it is not there.

    Raises:
        ModelError: its type is one of codes, and their scales are missing.
    """
    if not name.endswith(f".{WEIGHT}"):
        return None
    for format in FORMATS.values():
        values, scales = (part_name(name, part) for part in (format.values, format.scales))
        if format.values.suffix != WEIGHT:
            if source.has(values):
                return format
        elif source.has(scales) and source.has(values):
            return format
    if source.has(name):
        _check_plain(source, name)
    return None


def _check_plain(source: TensorSource, name: str) -> None:
    tensor = source.tensor(name)
    for format in FORMATS.values():
        if tensor.dtype == format.values.dtype:
            missing = part_name(name, format.scales)
            raise ModelError(f"{source.where(name)} has dtype {format.values.spelling}, and {missing!r} is missing")


def part_name(name: str, part: Stored) -> str:
    """The name of a tensor that has a part of a matrix, from the matrix' plain name."""
    return name.removesuffix(WEIGHT) + part.suffix


def plain(source: TensorSource, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor that stands for itself. ModelError where its shape or its type is another."""
    tensor = source.tensor(name)
    if tensor.shape != shape:
        raise ModelError(f"{source.where(name)} has shape {list(tensor.shape)}; config.json asks for {list(shape)}")
    if tensor.dtype not in PLAIN:
        raise ModelError(f"{source.where(name)} has dtype {tensor.dtype}, which stands for no values by itself")
    return tensor


def parts(source: TensorSource, name: str, shape: tuple[int, int], format: Format) -> tuple[np.ndarray, np.ndarray]:
    """Values and scales of a matrix, as they are mapped: of their contents nothing is read.

    Raises:
        ModelError: a shape or a type is another than the format and `shape` ask for, or the scales are missing.
    """
    found = list[np.ndarray]()
    rows, columns = shape
    for part, wanted in (
        (format.values, format.stored_shape((rows, columns))),
        (format.scales, format.scales_shape((rows, columns))),
    ):
        own = part_name(name, part)
        if not source.has(own):
            values = source.where(part_name(name, format.values))
            raise ModelError(f"{values} is stored as {format.name}, and its scales {own!r} are missing")
        tensor = source.tensor(own)
        if tensor.dtype != part.dtype:
            raise ModelError(f"{source.where(own)} has dtype {tensor.dtype}; {format.name} asks for {part.dtype}")
        if tensor.shape != wanted:
            what = f"{format.name} and the {list(shape)} of config.json ask for {list(wanted)}"
            raise ModelError(f"{source.where(own)} has shape {list(tensor.shape)}; {what}")
        found.append(tensor)
    values, scales = found
    return values, scales


class Reader:
    """Reads matrices of a folder into the format in which they are held: as stored, widened, or quantised."""

    def __init__(self, source: TensorSource):
        self._source = source

    def array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The values of a tensor or of a stored matrix, the latter in its format's own type and exactly."""
        if len(shape) != 2 or (format := format_of(self._source, name)) is None:
            return plain(self._source, name, shape)
        rows_and_columns = shape[0], shape[1]
        found = np.empty(shape, format.value_dtype)
        for first, rows in self.rows(name, rows_and_columns):
            found[first : first + len(rows)] = rows
        return found

    def rows(self, name: str, shape: tuple[int, int]) -> Iterator[tuple[int, np.ndarray]]:
        """The same of a matrix, some rows at a time, each time with the first one's number: what is stored takes
        several times its memory while it is widened. They are whole blocks of every format.
        """
        stored_in = format_of(self._source, name)
        if stored_in is None:
            values, scales = plain(self._source, name, shape), None
        else:
            values, scales = parts(self._source, name, shape, stored_in)
            self.check_values(name, stored_in, values)
            self.check_scales(name, stored_in, scales)
        for first in range(0, shape[0], ROWS_AT_A_TIME):
            own = values[first : first + ROWS_AT_A_TIME]
            if stored_in is not None and scales is not None:
                block = slice(first // stored_in.rows, -(-(first + len(own)) // stored_in.rows))
                own = stored_in.dequantise(own, scales[block], shape[1])
            yield first, own

    def coded(self, name: str, shape: tuple[int, int], format: Format) -> tuple[np.ndarray, np.ndarray]:
        """Values and scales of a matrix in a format: as they are stored, or made now."""
        if format_of(self._source, name) is format:
            return parts(self._source, name, shape, format)
        return self.quantised(name, shape, format)

    def quantised(self, name: str, shape: tuple[int, int], format: Format) -> tuple[np.ndarray, np.ndarray]:
        """Values and scales of a matrix in another format than its own. ModelError where it has none there."""
        try:
            found = [format.quantise(rows) for _, rows in self.rows(name, shape)]
        except ModelError:
            raise
        except ValueError as error:
            raise ModelError(
                f"{self._source.where(self.names(name)[0])} cannot be in {format.name}: {error}"
            ) from error
        values, scales = (np.concatenate(each) for each in zip(*found, strict=True))
        return values, scales

    def check_values(self, name: str, format: Format, values: np.ndarray) -> None:
        """ModelError, naming the tensor, where some of its values cannot be served."""
        if (fault := format.fault_of_values(values)) is not None:
            raise ModelError(f"{self._source.where(part_name(name, format.values))} {fault}")

    def check_scales(self, name: str, format: Format, scales: np.ndarray) -> None:
        """ModelError, naming the tensor, where some of its scales cannot be served."""
        if (fault := format.fault_of_scales(scales)) is not None:
            raise ModelError(f"{self._source.where(part_name(name, format.scales))} {fault}")

    def names(self, name: str) -> tuple[str, ...]:
        """The tensors that a matrix is stored in."""
        format = format_of(self._source, name)
        return (name,) if format is None else tuple(part_name(name, part) for part in (format.values, format.scales))

    def expect(self, name: str) -> None:
        for own in self.names(name):
            self._source.expect(own)

    def release(self, name: str) -> None:
        for own in self.names(name):
            self._source.release(own)
