"""Maps logical axes to mesh axes: one table per role, and nothing else decides which device holds which slice.

A table is plain data, checked once and without a device, so that a configuration, a budget and a program read the same
one. Tokens are not in it: a worker's partitions are its `data x expert` places, and every partition has its own. An
axis of size 1 costs nothing, so the same table serves one device and many. `pipe` is not in it either: each stage is a
mesh of its own.
Source: the logical-axis rules of T5X and MaxText.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

MeshAxis = Literal["data", "expert", "tensor"]
MESH_AXES: tuple[MeshAxis, ...] = ("data", "expert", "tensor")
WHOLE = ("layers", "embed", "kv_lora")  # logical axes that are never cut


class MeshError(ValueError):
    """A mesh or a table that this machine or this model cannot have.

    The message begins with `mesh` or `rules` and names the axis.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Over which mesh axes each logical axis is cut, major first; whole on every device where there is none."""

    heads: tuple[Literal["tensor"], ...] = ("tensor",)  # of attention
    ffw: tuple[Literal["tensor"], ...] = ("tensor",)  # of dense layers and shared experts
    vocab: tuple[Literal["tensor"], ...] = ("tensor",)  # of embedding and head
    experts: tuple[Literal["expert", "tensor"], ...] = ("expert",)  # whole routed experts
    expert_ffw: tuple[Literal["tensor"], ...] = ("tensor",)  # of each routed expert
    kv_tokens: tuple[Literal["tensor"], ...] = ()  # the tokens of a block of KV: context parallel

    def of(self, axis: str | None) -> tuple[MeshAxis, ...]:
        """The mesh axes of a logical axis. AttributeError for one that no table knows."""
        return () if axis is None or axis in WHOLE else getattr(self, axis)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRules(Rules):
    """The table for decode: whole experts over all devices, which suits few tokens to an expert.

    `Rules` itself is the table for prefill: a part of every expert on each device is evenly loaded, whatever the router
    does. Which is the faster was not measured.
    """

    experts: tuple[Literal["expert", "tensor"], ...] = ("expert", "tensor")
    expert_ffw: tuple[Literal["tensor"], ...] = ()


PREFILL, DECODE = Rules(), DecodeRules()


def context_parallel(rules: Rules) -> Rules:
    """This table with the tokens of a block cut over `tensor`, instead of every block whole on every device."""
    return replace(rules, kv_tokens=("tensor",))


def check_rules(rules: Rules) -> None:
    """MeshError for a table that cuts one array twice along the same mesh axis."""
    for field in fields(rules):
        mesh_axes = getattr(rules, field.name)
        if twice := [axis for axis in mesh_axes if mesh_axes.count(axis) > 1]:
            raise MeshError(f"rules.{field.name} names {twice[0]} twice")
    if shared := set(rules.experts) & set(rules.expert_ffw):
        raise MeshError(f"rules.expert_ffw: {min(shared)} is in rules.experts too, and cuts the same arrays")


def spec(
    axes: Sequence[str | None], shape: Sequence[int], sizes: Mapping[str, int], rules: Rules
) -> list[tuple[MeshAxis, ...]]:
    """The mesh axes that cut each dimension of an array with these logical axes.

    Args:
        sizes: of the mesh axes.

    Raises:
        MeshError: a dimension does not divide, with the numbers of parts next to it that would.
    """
    found = [rules.of(axis) for axis in axes]
    for dimension, axis, cut_by in zip(shape, axes, found, strict=True):
        num_parts = math.prod(sizes[each] for each in cut_by)
        if dimension % num_parts:
            names = " x ".join(f"mesh.{each}" for each in cut_by)
            near = " or ".join(map(str, nearest_divisors(dimension, num_parts)))
            raise MeshError(
                f"{names} = {num_parts} does not divide the model's {axis} dimension {dimension}; {near} would"
            )
    return found


def shard_shape(
    axes: Sequence[str | None], shape: Sequence[int], sizes: Mapping[str, int], rules: Rules
) -> tuple[int, ...]:
    """What one device holds of such an array. Raises as `spec` does."""
    cuts = spec(axes, shape, sizes, rules)
    return tuple(
        dimension // math.prod(sizes[each] for each in cut_by) for dimension, cut_by in zip(shape, cuts, strict=True)
    )


def nearest_divisors(dimension: int, wanted: int) -> list[int]:
    """The divisors of `dimension` next to `wanted`, below and above."""
    divisors = [size for size in range(1, dimension + 1) if dimension % size == 0]
    below, above = ([size for size in divisors if is_side(size)] for is_side in (wanted.__ge__, wanted.__le__))
    return sorted({*below[-1:], *above[:1]})
