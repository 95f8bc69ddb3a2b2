"""A worker's draft model: checked with its target, declared behind the target's layers, loaded once these are there."""

from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from moonshard.models import weights
from moonshard.models.draft import Draft, lend
from moonshard.models.folder.checkpoint import Checkpoint, CheckpointError
from moonshard.models.formats.stored import TensorSource
from moonshard.models.model import Model
from moonshard.models.registry import open_draft
from moonshard.models.spec import KvGroup, ModelError, page_layers
from moonshard.serving.config.keys import Config, ConfigError, draft_path_of
from moonshard.serving.engine.compiled.stage_model import StageDraft
from moonshard.sharding.shard import Shard


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenDraft:
    """A draft whose tensors fit its declaration, and how its weights are held."""

    model: Draft
    tensors: TensorSource
    target: KvGroup
    dtype: str
    fingerprint: str  # of its folder
    holding: weights.Holding | None = None

    def behind(self, layers: range, target: Any, mesh: Mesh, shard: Shard) -> StageDraft:
        """Behind these layers, which are all, with shapes for weights. `target`: its weights, for tables to borrow."""
        how = {"source": self.tensors, "holding": self.holding}
        own = weights.abstract(self.model.declare(), self.dtype, mesh, shard.rules, **how)
        return StageDraft(
            model=self.model.in_layers_of(page_layers([self.target], layers)),
            weights=lend(own, target),
            num_page_layers=self.model.num_page_layers(self.target.num_features),
        )

    def load(self, target: Any, mesh: Mesh, shard: Shard) -> Any:
        """Its weights, with the tables of `target` that it borrows."""
        own = weights.load(self.model.declare(), self.tensors, self.dtype, mesh, shard.rules, holding=self.holding)
        return lend(own, target)


def open_draft_of(
    config: Config,
    shard: Shard,
    model: Model,
    checkpoint: Checkpoint,
    dtype: str,
    holding: weights.Holding | None = None,
) -> OpenDraft | None:
    """The draft that a configuration asks for; None where it asks for none.

    Raises:
        ConfigError: it cannot be read, is for another target, or not for such a mesh; by its key.
    """
    if config.speculation.draft_model is None:
        return None
    group, *others = model.kv_groups(dtype)
    if others or group.window is not None:
        raise ConfigError(["speculation.method: a draft model needs a model with one KV group and no window"])
    try:
        tensors, draft = open_draft(draft_path_of(config), model, checkpoint)
        weights.check_shapes(draft.declare(), tensors)
    except (CheckpointError, ModelError) as error:
        key = "speculation.method" if config.speculation.path is None else "speculation.path"
        raise ConfigError([f"{key}: {error}"]) from error
    if shard.num_parts("kv_tokens") > 1 and not draft.cuts_tokens:
        what = "a draft with Llama's attention keeps no KV whose blocks are cut over devices"
        raise ConfigError([f"speculation.path: {what} (context parallelism)"])
    fingerprint = tensors.fingerprint
    return OpenDraft(model=draft, tensors=tensors, target=group, dtype=dtype, fingerprint=fingerprint, holding=holding)
