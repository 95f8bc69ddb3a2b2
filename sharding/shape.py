"""The shape of a worker's device mesh, as a configuration names it. No jax: gateways and command lines read it too."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """Sizes of the mesh axes `data`, `expert`, `tensor`, and how many stages `pipe` (each a mesh of its own)."""

    data: int = 1  # attention is data-parallel along it
    expert: int = 1  # likewise; experts are cut along it
    tensor: int = 1  # heads, ffw and vocab are cut along it
    pipe: int = 1  # stages, each with some of the layers

    @property
    def num_devices(self) -> int:
        return self.data * self.expert * self.tensor * self.pipe

    @property
    def num_partitions(self) -> int:
        """KV partitions of a worker: attention is data-parallel over `data` and `expert`."""
        return self.data * self.expert

    def __str__(self) -> str:
        sizes = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != 1]
        return " ".join(sizes) or "1 device"
