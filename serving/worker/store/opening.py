"""The tiers that a configuration asks for, opened for one worker's blocks."""

import contextlib
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path

from moonshard.kv.store.host import HostTier
from moonshard.kv.store.mooncake.faults import StoreUnavailable
from moonshard.kv.store.mooncake.tier import MooncakeStoreConfig, MooncakeStoreTier
from moonshard.kv.store.retention import Lru
from moonshard.kv.store.ssd.faults import FolderInUse, LimitTooLarge, LimitTooSmall, StoreError
from moonshard.kv.store.ssd.files import FileTier
from moonshard.kv.store.stack import TierStack
from moonshard.kv.store.tier import Tier
from moonshard.serving.config.keys import ConfigError, StoreConfig, WorkerRole
from moonshard.serving.engine.capacity.memory import free_memory_bytes
from moonshard.serving.engine.loading.model import LoadedModel

FORMAT = "moonshard blocks 1"  # of a block's bytes: [layers, block_size, features], as `Engine.export` gives them
LAYOUT_BYTES = 16
MIN_SHARED_BLOCKS = 16  # of a tier that gives up a tenth of its blocks at a time, from nine tenths on
MAX_WORKERS = 64  # of a kind, that have files under one path

logger = logging.getLogger(__name__)


def open_tiers(config: StoreConfig, role: WorkerRole, model: LoadedModel) -> TierStack | None:
    """None where the model's blocks are never found again. Blocks.

    ConfigError where a tier cannot be opened, by its key.
    """
    if not model.shapes.groups.is_plain:
        logger.warning("kv.store: off, since the model has several KV groups or a window")
        return None
    tiers = list[Tier]()
    if config.host_bytes:
        tiers.append(_open_host(config.host_bytes, model.block_bytes))
    if config.is_shared:
        tiers.append(_open_shared(config, model))
    if config.ssd_path is not None:
        tiers.append(_open_files(config.ssd_path, role, config.ssd_bytes, model))
    return TierStack(tiers)


def layout_of(model: LoadedModel) -> bytes:
    """What a block's bytes depend on besides its name, and never the mesh: `LAYOUT_BYTES`."""
    block = model.layout.groups[0].block
    said = (FORMAT, block.dtype, block.block_size, block.num_layers, block.num_features, model.draft_fingerprint)
    return hashlib.sha256("\0".join(map(str, said)).encode()).digest()[:LAYOUT_BYTES]


def _open_host(max_bytes: int, block_bytes: int) -> HostTier:
    try:
        return HostTier(block_bytes=block_bytes, max_bytes=max_bytes, available_bytes=free_memory_bytes())
    except ValueError as error:
        raise ConfigError([f"kv.store.host_bytes: {error}"]) from error


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


def _open_files(path: Path, role: WorkerRole, max_bytes: int, model: LoadedModel) -> FileTier:
    """In the first folder of its kind under `path` that no other worker has, so that one that comes back finds what one
    like it had. Of one kind are those who prefill for others or for themselves, since they are asked for prompts.
    """
    kind = "decode" if role == "decode" else "prefill"
    folders = [path / f"{kind}-{index}" for index in range(MAX_WORKERS)]
    with _by_its_key():
        for folder in folders[:-1]:
            with contextlib.suppress(FolderInUse):
                return _open_folder(folder, max_bytes, model)
        return _open_folder(folders[-1], max_bytes, model)


def _open_folder(folder: Path, max_bytes: int, model: LoadedModel) -> FileTier:
    return FileTier.open(
        folder,
        block_bytes=model.block_bytes,
        layout=layout_of(model),
        max_bytes=max_bytes,
        policy=Lru(),  # experiments/replay/README.md compares
    )


@contextlib.contextmanager
def _by_its_key() -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        key = "ssd_bytes" if isinstance(error, LimitTooSmall | LimitTooLarge) else "ssd_path"
        raise ConfigError([f"kv.store.{key}: {error}"]) from error
