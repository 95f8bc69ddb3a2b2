"""The names of shape annotations. They are checked in tests only, so the library behind them may be absent.

Everything that runs on a bare GPU machine takes them from here: there jax is all there is.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Num, UInt
else:
    try:
        from jaxtyping import Array, Bool, Float, Int, Num, UInt
    except ModuleNotFoundError:
        from jax import Array

        class _Unchecked:
            """Stands for every dtype; any shape of it is an array."""

            def __class_getitem__(cls, item: object) -> type[Array]:
                return Array

        Bool = Float = Int = Num = UInt = _Unchecked

__all__ = ["Array", "Bool", "Float", "Int", "Num", "UInt"]
