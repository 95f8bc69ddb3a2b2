"""What is tried of each entry of `models.machines`, and the steps that are timed for it: plain records."""

from collections.abc import Iterator
from dataclasses import dataclass

from moonshard.models.machines import Machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Steps that are timed together: the tokens of a prompt behind others that are cached; or a step of decoding."""

    num_tokens: int = 0  # of the prompt; 0: a step of decoding
    cached_tokens: int = 0  # before them
    batch: int = 1  # sequences that decode

    @property
    def name(self) -> str:
        what = f"{self.num_tokens:,} tokens" if self.num_tokens else f"batch {self.batch}"
        return f"{what} behind {self.cached_tokens:,}" if self.cached_tokens else what


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """An entry, values that might suit a machine better, and what tells."""

    name: str  # of `Machine`'s field
    candidates: tuple[float, ...]
    probes: tuple[Probe, ...]


EVERYWHERE = (
    Entry(name="chunk_tokens", candidates=(256, 512, 1024), probes=(Probe(num_tokens=2048),)),
    Entry(name="tile_tokens", candidates=(16, 32, 64, 128), probes=(Probe(num_tokens=512), Probe(num_tokens=100))),
    Entry(
        name="few_tokens",
        candidates=(2, 4, 8, 16, 32),
        probes=tuple(Probe(num_tokens=count, cached_tokens=511) for count in (3, 6, 12)),  # one has its own step
    ),
    Entry(
        name="expand_from",
        candidates=(0.5, 1, 2, 4),
        probes=tuple(Probe(num_tokens=count, cached_tokens=1024) for count in (64, 128, 256)),
    ),
)
WITH_KERNELS = (
    Entry(
        name="kernel_rows",
        candidates=(64, 128, 256, 512),
        probes=tuple(Probe(num_tokens=count) for count in (128, 256, 512)),
    ),
)
WITHOUT_KERNELS = (
    Entry(
        name="keys",
        candidates=(128, 256, 512),
        probes=tuple(Probe(cached_tokens=1024, batch=batch) for batch in (1, 8)),
    ),
    Entry(name="expanded_keys", candidates=(128, 256, 512), probes=(Probe(num_tokens=2048),)),
    Entry(name="expanded_queries", candidates=(64, 128, 256), probes=(Probe(num_tokens=2048),)),
)


def entries_of(machine: Machine) -> tuple[Entry, ...]:
    """The entries that make a difference on such a machine."""
    return (*EVERYWHERE, *(WITH_KERNELS if machine.reads_in_place else WITHOUT_KERNELS))


def longest_tokens() -> int:
    """The most tokens that a sequence has once its prompt is computed, whatever is timed."""
    probes: Iterator[Probe] = (
        probe for entry in (*EVERYWHERE, *WITH_KERNELS, *WITHOUT_KERNELS) for probe in entry.probes
    )
    return max(probe.num_tokens + probe.cached_tokens for probe in probes)
