"""The tiers that a configuration asks for, opened for one worker's blocks.

Whether the machine has room for them is asked before anything is loaded (`serving.commands.checks.tiers`). A worker
that comes back later may find less, since others have taken it, or a disk that fails: then it serves with smaller tiers
or without, and says so. What it takes of what is left is half: others need some, too.
"""

import contextlib
import hashlib
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from moonshard.kv.store.host import HostTier
from moonshard.kv.store.mooncake.faults import StoreUnavailable
from moonshard.kv.store.mooncake.tier import MooncakeStoreConfig, MooncakeStoreTier
from moonshard.kv.store.retention import Lru
from moonshard.kv.store.ssd.faults import FolderInUse, FolderUnusable, LimitTooLarge, LimitTooSmall, StoreError
from moonshard.kv.store.ssd.files import FileTier
from moonshard.kv.store.stack import TierStack
from moonshard.kv.store.tier import Tier
from moonshard.serving.config.keys import ConfigError, StoreConfig, WorkerRole
from moonshard.serving.engine.capacity.memory import free_memory_bytes
from moonshard.serving.engine.loading.model import LoadedModel
from moonshard.serving.worker.store.folders import files_folders

FORMAT = "moonshard blocks 1"  # of a block's bytes: [layers, block_size, features], as `Engine.export` gives them
LAYOUT_BYTES = 16
MIN_SHARED_BLOCKS = 16  # of a tier that gives up a tenth of its blocks at a time, from nine tenths on
GIB = 1024**3

logger = logging.getLogger(__name__)


def open_tiers(config: StoreConfig, role: WorkerRole, model: LoadedModel, num_processes: int = 1) -> TierStack | None:
    """None where the model's blocks are never found again, or there is no room for any tier: among the `num_processes`
    of a worker, who share its limits evenly, that is a stack of none. Blocks.

    ConfigError where a tier cannot be opened for another reason than room and disks, by its key.
    """
    if not model.shapes.groups.is_plain:
        logger.warning("kv.store: off, since the model has several KV groups or a window")
        return None
    tiers = list[Tier]()
    host_bytes, ssd_bytes = config.host_bytes // num_processes, config.ssd_bytes // num_processes
    if host_bytes and (host := _open_host(host_bytes, model.block_bytes)):
        tiers.append(host)
    if config.is_shared:
        tiers.append(_open_shared(config, model))
    if config.ssd_path is not None and (files := _open_files(config.ssd_path, role, ssd_bytes, model)):
        tiers.append(files)
    return TierStack(tiers) if tiers or num_processes > 1 else None


def layout_of(model: LoadedModel) -> bytes:
    """What a block's bytes depend on besides its name, and never the mesh: `LAYOUT_BYTES`."""
    block = model.layout.groups[0].block
    said = (FORMAT, block.dtype, block.block_size, block.num_layers, block.num_features, model.draft_fingerprint)
    return hashlib.sha256("\0".join(map(str, said)).encode()).digest()[:LAYOUT_BYTES]


def _open_host(max_bytes: int, block_bytes: int) -> HostTier | None:
    if max_bytes < block_bytes:
        raise ConfigError([f"kv.store.host_bytes: {max_bytes} bytes hold no block of {block_bytes}"])
    free_bytes = free_memory_bytes()
    if max_bytes > free_bytes:
        left_bytes = free_bytes // 2
        logger.warning(
            "kv.store.host_bytes: a tier of %.2f GiB instead of %.2f, since the machine has %.2f GiB of memory left",
            *(each / GIB for each in (left_bytes, max_bytes, free_bytes)),
        )
        max_bytes = left_bytes
    return HostTier(block_bytes=block_bytes, max_bytes=max_bytes) if max_bytes >= block_bytes else None


def _open_shared(config: StoreConfig, model: LoadedModel) -> MooncakeStoreTier:
    """At a client that need not be there yet."""
    if config.client is None:
        raise ConfigError(["kv.store.client: name the address at which `moonshard store` runs; `serve` starts its own"])
    if config.dram_bytes and config.dram_bytes < (least := MIN_SHARED_BLOCKS * model.block_bytes):
        raise ConfigError([f"kv.store.dram_bytes: {config.dram_bytes} bytes are too few; at least {least} hold blocks"])
    try:
        return MooncakeStoreTier.start(
            layout=layout_of(model),
            block_bytes=model.block_bytes,
            config=MooncakeStoreConfig(address=config.client),
            on_change=_tell_of_client,
        )
    except StoreUnavailable as error:
        raise ConfigError([f"kv.store.dram_bytes: {error}"]) from error


def _tell_of_client(why_off: str | None) -> None:
    if why_off is None:
        logger.warning("kv.store.client: Mooncake Store answers")
    else:
        logger.warning("kv.store.client: %s; until that changes nothing is found in Mooncake Store", why_off)


def _open_files(path: Path, role: WorkerRole, max_bytes: int, model: LoadedModel) -> FileTier | None:
    """In the first folder of its kind under `path` that no other worker has, so that one that comes back finds what one
    like it had.
    """
    folders = files_folders(path, role)
    with _by_its_key():
        for folder in folders[:-1]:
            with contextlib.suppress(FolderInUse):
                return _open_folder(folder, max_bytes, model)
        return _open_folder(folders[-1], max_bytes, model)


def _open_folder(folder: Path, max_bytes: int, model: LoadedModel) -> FileTier | None:
    open_tier = partial(FileTier.open, folder, block_bytes=model.block_bytes, layout=layout_of(model))
    policy = Lru()  # experiments/replay/README.md compares
    try:
        return open_tier(max_bytes=max_bytes, policy=policy)
    except LimitTooLarge as error:
        left_bytes = error.held_bytes + error.free_bytes // 2
        logger.warning("kv.store.ssd_bytes: %s; it is %.2f GiB for now", error, left_bytes / GIB)
    except FolderUnusable as error:
        logger.error("kv.store.ssd_path: %s; there is no tier of files until the next start", error)
        return None
    try:
        return open_tier(max_bytes=left_bytes, policy=policy)
    except (LimitTooSmall, FolderUnusable) as error:
        logger.error("kv.store.ssd_bytes: %s; there is no tier of files until the next start", error)
        return None


@contextlib.contextmanager
def _by_its_key() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        key = "ssd_bytes" if isinstance(error, LimitTooSmall) else "ssd_path"
        raise ConfigError([f"kv.store.{key}: {error}"]) from error
