"""Which of this machine's GPUs each process of a deployment sees: no two of them the same ones.

By itself every process takes the machine's first ones, and most of their memory. Where there are fewer than the meshes
of all processes ask for, several have to share them, each a part of their memory: so prefill and decode try out on a
single card. Source: CUDA_VISIBLE_DEVICES of CUDA's programming guide, XLA_PYTHON_CLIENT_MEM_FRACTION of jax's page on
GPU memory. Not tried on a machine with several cards.
"""

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

VISIBLE, MEMORY = "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION"
MEMORY_OF_ALL = 0.9  # of a card, for those that share it; jax's own 0.75 is for one
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")  # without one jax sees no card


def gpus_here(environ: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> tuple[str, ...]:
    """By the names that CUDA_VISIBLE_DEVICES has for them; none where jax would not use them."""
    platform = (environ.get("JAX_PLATFORMS") or "cuda").partition(",")[0]
    if platform not in ("cuda", "gpu") or not any(map(find_spec, PLUGINS)):
        return ()
    if VISIBLE in environ:
        return tuple(name for name in environ[VISIBLE].split(",") if name)
    numbers = (re.fullmatch(r"nvidia(\d+)", path.name) for path in devices.glob("nvidia*"))
    return tuple(str(number) for number in sorted(int(match[1]) for match in numbers if match))


def shared_out(needs: Mapping[str, int], gpus: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """The environment of each process, by its name; `needs`: the devices of each one's mesh."""
    if not gpus:
        return {}
    if sum(needs.values()) > len(gpus):
        return {name: {MEMORY: f"{MEMORY_OF_ALL / len(needs):.2f}"} for name in needs if MEMORY not in os.environ}
    left, found = list(gpus), dict[str, dict[str, str]]()
    for name, num_devices in needs.items():
        found[name] = {VISIBLE: ",".join(left[:num_devices])}
        del left[:num_devices]
    return found
