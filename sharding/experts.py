"""Which experts each device holds where some are used more than others: hot ones more than once, all evenly spread.

A place holds one copy of one expert; every device has equally many, counted in the order of the devices. Pure, from
loads that were measured elsewhere.
Source: DeepSeek's EPLB (github.com/deepseek-ai/EPLB), global policy: replicate, then pack.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertPlacement:
    """Where the experts of one or more MoE layers lie."""

    expert_of: np.ndarray  # [layers, places] int32: the expert of which it holds a copy
    places_of: np.ndarray  # [layers, experts, most copies] int32: its copies, repeated up to the most of any expert
    num_copies: np.ndarray  # [layers, experts] int32

    @property
    def num_places(self) -> int:
        return self.expert_of.shape[1]

    def of_layers(self, layers: slice) -> "ExpertPlacement":
        """The placement of some of the layers, such as those of one stage."""
        return ExpertPlacement(
            expert_of=self.expert_of[layers], places_of=self.places_of[layers], num_copies=self.num_copies[layers]
        )


def place_experts(loads: np.ndarray, num_places: int, num_devices: int) -> ExpertPlacement:
    """Gives redundant places to the experts with most load per copy, then copies to the devices with least load.

    Args:
        loads: [layers, experts], tokens of each expert in any unit.
        num_places: of all devices; what exceeds the experts is for copies.

    Raises:
        ValueError: the places do not divide among the devices, or are fewer than the experts.
    """
    num_layers, num_experts = loads.shape
    if num_places % num_devices or num_places < num_experts:
        raise ValueError(f"{num_places} places on {num_devices} devices for {num_experts} experts")
    expert_of = np.empty((num_layers, num_places), np.int32)
    num_copies = np.empty((num_layers, num_experts), np.int32)
    for layer in range(num_layers):
        num_copies[layer] = _copies(loads[layer], num_places)
        expert_of[layer] = _pack(loads[layer] / num_copies[layer], num_copies[layer], num_devices)
    return ExpertPlacement(expert_of=expert_of, places_of=_places(expert_of, num_copies), num_copies=num_copies)


def _copies(loads: np.ndarray, num_places: int) -> np.ndarray:
    """How many copies each expert has [experts]."""
    found = np.ones(len(loads), np.int32)
    for _ in range(num_places - len(loads)):
        found[np.argmax(loads / found)] += 1
    return found


def _pack(load_of_copy: np.ndarray, num_copies: np.ndarray, num_devices: int) -> np.ndarray:
    """Whose copy each place holds [places]: heaviest first, to the lightest device with a free place.

    A device gets a second copy of the same expert only where no other has room.
    """
    copies = np.repeat(np.arange(len(num_copies)), num_copies)
    room = len(copies) // num_devices
    held: list[list[int]] = [[] for _ in range(num_devices)]
    loads = [0.0] * num_devices
    for expert in copies[np.argsort(-load_of_copy[copies], kind="stable")].tolist():
        open_devices = (device for device in range(num_devices) if len(held[device]) < room)
        device = min(open_devices, key=lambda device: (expert in held[device], loads[device]))
        held[device].append(expert)
        loads[device] += float(load_of_copy[expert])
    return np.array([expert for device in held for expert in sorted(device)], np.int32)


def _places(expert_of: np.ndarray, num_copies: np.ndarray) -> np.ndarray:
    """The places of each expert's copies [layers, experts, most copies]."""
    found = np.empty((*num_copies.shape, int(num_copies.max())), np.int32)
    for layer, expert in np.ndindex(num_copies.shape):
        found[layer, expert] = np.resize(np.flatnonzero(expert_of[layer] == expert), found.shape[-1])
    return found
