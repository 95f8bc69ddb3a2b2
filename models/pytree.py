"""Frozen dataclasses that jax treats as trees of their fields: weights, routing, the state of a step."""

import dataclasses
from typing import dataclass_transform

import jax


@dataclass_transform(frozen_default=True)
def pytree[T](cls: type[T]) -> type[T]:
    """A frozen dataclass whose every field is a subtree, unless its metadata says that it is static. It checks nothing:
    it holds arrays, shapes or shardings.
    """
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))
