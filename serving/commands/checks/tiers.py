"""Whether a machine has room for what workers are to keep of their KV, asked before anything is loaded.

A limit that is too large is a mistake at the first start; of a worker that comes back it is not asked again
(`serving.worker.store.opening`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from moonshard.serving.config.keys import Config, ConfigError, WorkerRole, processes_of


def check_tiers_fit(config: Config, roles: Sequence[WorkerRole], *, is_one_process: bool = False) -> None:
    """ConfigError where the tiers of workers of these roles have no room together, or their folders are others'.

    `is_one_process`: of the one worker there is only that here, which may be one of a gang.
    """
    store = config.kv.store
    if not store.enabled:
        return
    num_shares = processes_of(config, roles[0]) if is_one_process else 1
    faults = _memory_faults(store.host_bytes // num_shares, len(roles))
    if store.ssd_path is not None:
        folders_of = {role: 1 if is_one_process else processes_of(config, role) for role in roles}
        num_folders: dict[WorkerRole, int] = {role: roles.count(role) * folders_of[role] for role in roles}
        faults += _disk_faults(store.ssd_path, store.ssd_bytes // num_shares, len(roles), num_folders)
    if faults:
        raise ConfigError(faults)


def _memory_faults(max_bytes: int, num_workers: int) -> list[str]:
    from moonshard.serving.engine.capacity.memory import free_memory_bytes

    if not max_bytes or num_workers * max_bytes <= (free_bytes := free_memory_bytes()):
        return []
    return [f"kv.store.host_bytes: {_of_each(num_workers, max_bytes)}, and {_gib(free_bytes)} of memory are available"]


def _disk_faults(path: Path, max_bytes: int, num_workers: int, num_folders: Mapping[WorkerRole, int]) -> list[str]:
    """What lies in the path already is theirs: it counts as free. `num_folders`: one for each process, by role."""
    from moonshard.kv.store.ssd.faults import StoreError
    from moonshard.kv.store.ssd.folder import claim_folder, free_bytes, held_bytes
    from moonshard.serving.worker.store.folders import files_folders

    try:
        for role, number in num_folders.items():
            for folder in files_folders(path, role, number):
                claim_folder(folder)
        free, held = free_bytes(path), held_bytes(path)
    except StoreError as error:
        return [f"kv.store.ssd_path: {error}"]
    except OSError as error:
        return [f"kv.store.ssd_path: {path}: {error.strerror or error}"]
    if num_workers * max_bytes <= free + held:
        return []
    wanted = _of_each(num_workers, max_bytes)
    return [f"kv.store.ssd_bytes: {wanted}, and {path} has {_gib(free)} free and {_gib(held)} of blocks already"]


def _of_each(num_workers: int, max_bytes: int) -> str:
    return f"{_gib(max_bytes)} of each of {num_workers} workers" if num_workers > 1 else _gib(max_bytes)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 1024**3:.2f} GiB"
