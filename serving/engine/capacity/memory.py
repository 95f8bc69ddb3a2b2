"""How much memory is free: of the devices, and of the machine."""

from pathlib import Path

MAX_AUTO_POOL_BYTES = 1 << 30  # on CPU, where the pool shares memory with everything else


def free_device_bytes(num_devices: int) -> int | None:
    """Free memory of this process's device that has least, of the first so many. None for devices that live in the
    machine's memory.
    """
    import jax  # a KV plane asks for the machine's memory alone, before there is jax

    from moonshard.sharding.mesh import mesh_devices

    own = [device for device in mesh_devices(num_devices) if device.process_index == jax.process_index()]
    found = [device.memory_stats() for device in own]
    free = [stats["bytes_limit"] - stats["bytes_in_use"] for stats in found if stats and "bytes_limit" in stats]
    return min(free, default=None)


def free_memory_bytes() -> int:
    """What the kernel would give without swapping (`MemAvailable` of proc(5))."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 2 * MAX_AUTO_POOL_BYTES
