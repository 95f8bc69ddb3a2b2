"""The tiers that a configuration asks for, opened for one worker's blocks."""

import hashlib
import logging
from collections.abc import Iterator

from moonshard.kv.store.host import HostTier
from moonshard.kv.store.stack import TierStack
from moonshard.kv.store.tier import Tier
from moonshard.serving.config.keys import ConfigError, StoreConfig
from moonshard.serving.engine.loading.model import LoadedModel

FORMAT = b"moonshard blocks 1"  # of a block's bytes: [layers, block_size, features], as `Engine.export` gives them

logger = logging.getLogger(__name__)


def open_tiers(config: StoreConfig, model: LoadedModel) -> TierStack | None:
    """None where it is off, or where the model's blocks are never found again. Blocks.

    ConfigError where a tier cannot be opened, by its key.
    """
    if not config.enabled:
        return None
    if not model.shapes.groups.is_plain:
        logger.warning("kv.store: off, since the model has several KV groups or a window")
        return None
    return TierStack(list(_tiers(config, model)))


def layout_of(model: LoadedModel) -> bytes:
    """What a block's bytes depend on besides its name: 16 bytes. Not on the mesh."""
    block = model.layout.groups[0].block
    said = (block.dtype, block.block_size, block.num_layers, block.num_features, model.draft_fingerprint)
    return hashlib.sha256(b"\0".join([FORMAT, *(str(each).encode() for each in said)])).digest()[:16]


def _tiers(config: StoreConfig, model: LoadedModel) -> Iterator[Tier]:
    block_bytes = model.block_bytes
    if config.host_bytes:
        try:
            yield HostTier(block_bytes=block_bytes, max_bytes=config.host_bytes)
        except ValueError as error:
            raise ConfigError([f"kv.store.host_bytes: {error}"]) from error
