"""Typed access to a config.json in the spelling of transformers 4 or 5: every fault names its field."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moonshard.models.spec import ModelError

# Of any size in config.json: what is beyond it is damaged or hostile, and would be listed or allocated before anything
# else finds it out. Kimi K2 has 61 layers, 384 experts, 163,840 tokens and contexts of 262,144.
MAX_SIZE = 2**24
MAX_SIZES = {
    "num_hidden_layers": 4096,
    "num_attention_heads": 65_536,
    "n_routed_experts": 65_536,
    "n_shared_experts": 4096,
    "max_position_embeddings": 2**31 - 1,
    "original_max_position_embeddings": 2**31 - 1,
}
MAX_EXPERTS = 2**20  # in all layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """Context extension by per-frequency interpolation; names as in `rope_scaling`."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


class ConfigReader:
    """Typed access to config.json; every fault names its field."""

    def __init__(self, raw: Mapping[str, Any], at: str = ""):
        """`at`: where in the file this object stands, as names of its fields begin, such as `text_config.`."""
        self._raw, self._at = raw, at
        rope_name = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
        rope = raw.get(rope_name) or {}
        if not isinstance(rope, Mapping):
            raise self.fault(f"{rope_name} is {rope!r}, not an object")
        self._rope = ConfigReader(rope, f"{at}{rope_name}.") if rope else None

    def fault(self, what: str) -> ModelError:
        """The error of a field; `what` begins with its name."""
        return ModelError(f"config.json: {self._at}{what}")

    def inside(self, name: str) -> "ConfigReader":
        """The object under `name`. ModelError where there is none."""
        value = self._get(name)
        if not isinstance(value, Mapping):
            raise self.fault(f"{name} is {value!r}, not an object")
        return ConfigReader(value, f"{self._at}{name}.")

    def names(self) -> Iterable[str]:
        """Of all fields."""
        return self._raw

    def get(self, name: str) -> Any:
        """Whatever stands there; None where nothing does."""
        return self._raw.get(name)

    def demand(self, name: str, is_served: Callable[[Any], bool], what: str) -> None:
        """Refuses a value, saying what it stands for and what is served."""
        value = self.get(name)
        if not is_served(value):
            told = "is missing" if value is None else f"is {value!r}"
            raise self.fault(f"{name} {told}: {what}")

    def _get(self, name: str, default: Any = ...) -> Any:
        value = self._raw.get(name)
        if value is None:
            if default is ...:
                raise self.fault(f"{name} is missing")
            return default
        return value

    def require(self, name: str, allowed: set[Any], default: Any = ...) -> None:
        value = self._get(name, default)
        if isinstance(value, Mapping | list) or value not in allowed:
            names = ", ".join(sorted(str(a) for a in allowed if a is not None))
            shown = "an object" if isinstance(value, Mapping | list) else repr(value)
            raise self.fault(f"{name} is {shown}, not supported" + (f" (known: {names})" if names else ""))

    def size(self, name: str, default: Any = ...) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fault(f"{name} is {value!r}, not a positive integer")
        if value > (most := MAX_SIZES.get(name, MAX_SIZE)):
            raise self.fault(f"{name} is {_shown(value)}, more than {most}")
        return value

    def optional_size(self, name: str, default: int | None = None) -> int | None:
        value = self._get(name, default)
        return None if _is_off(value) else self.size(name, default)

    def number(self, name: str, default: Any = ...) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.fault(f"{name} is {value!r}, not a positive number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if _is_off(self._raw.get(name)) else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.fault(f"{name} is {value!r}, not true or false")
        return value

    def rope_theta(self) -> float:
        inside = self._rope is not None and "rope_theta" in self._rope._raw
        reader = self._rope if inside and self._rope is not None else self
        return reader.number("rope_theta", default=10000.0)

    def yarn(self) -> Yarn | None:
        rope = self._rope
        if rope is None:
            return None
        kind = rope._get("rope_type", rope._get("type", "default"))
        if kind == "default":
            return None
        if kind != "yarn":
            raise rope.fault(f"type is {kind!r}, not supported (known: default, yarn)")
        return Yarn(
            factor=rope.number("factor"),
            original_max_position_embeddings=rope.size("original_max_position_embeddings"),
            beta_fast=rope.optional_number("beta_fast") or 32.0,
            beta_slow=rope.optional_number("beta_slow") or 1.0,
            mscale=rope.optional_number("mscale"),
            mscale_all_dim=rope.optional_number("mscale_all_dim"),
            attention_factor=rope.optional_number("attention_factor"),
            truncate=rope.flag("truncate", default=True),
        )


def _shown(value: int) -> str:
    """The value as an error text shows it: a number of a million digits is not spelt out."""
    return str(value) if abs(value) < 10**30 else "a number of more than 30 digits"


def _is_off(value: Any) -> bool:
    return value is None or (value == 0 and value is not False)
