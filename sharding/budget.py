"""What a mesh leaves for the KV cache: bytes per device, from shapes and rules alone.

No array is made and no device is asked, so that a laptop can say what eight GPUs hold. A model is given as the pieces
of its layers; what a program needs besides, while it runs, is given as a function of the mesh. Fragmentation, and what
the driver and the compiler keep for themselves, are not counted.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from moonshard.sharding.rules import MeshError, Rules, check_rules, shard_shape
from moonshard.sharding.shape import MeshShape
from moonshard.sharding.stages import split_layers


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPiece:
    """A weight, with the bits that one value takes, scales included."""

    axes: tuple[str | None, ...]
    shape: tuple[int, ...]
    bits: float
    values_together: int = 1  # along the last dimension, which are stored as one number: no mesh parts them

    @property
    def num_bytes(self) -> float:
        return math.prod(self.shape) * self.bits / 8


@dataclass(frozen=True, kw_only=True, slots=True)
class KvPiece:
    """What a KV group keeps of each token. Blocks of all groups have the shape of the largest, on every stage."""

    layers: tuple[int, ...]
    layer_bytes_per_token: int
    window: int | None = None  # of how many of a sequence's last tokens; None: of all


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPieces:
    """All weights of a model, by where a pipeline may be cut."""

    first: tuple[WeightPiece, ...]  # before the layers
    layers: tuple[tuple[WeightPiece, ...], ...]
    last: tuple[WeightPiece, ...]  # behind the layers
    tied: tuple[
        WeightPiece, ...
    ] = ()  # of the first that are needed behind the layers too, by a stage that is not the first
    kv: tuple[KvPiece, ...]

    @property
    def num_bytes(self) -> float:
        return sum(piece.num_bytes for piece in itertools.chain(self.first, *self.layers, self.last))


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBudget:
    """The memory of one device of a stage. The devices of a stage hold equally much."""

    num_layers: int
    weight_bytes: float
    workspace_bytes: int
    headroom_bytes: float  # for KV; below 0 where the weights alone do not fit
    kv_bytes_per_token: float  # of a sequence's, on average


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What a mesh holds, or why the model cannot be cut so."""

    mesh: MeshShape
    rules: Rules
    stages: tuple[StageBudget, ...] = ()
    repeated_bytes: float = 0.0  # over all devices: weights that another device holds as well
    reason: str | None = None  # why it does not fit

    @property
    def headroom_bytes(self) -> float:
        """Bytes left for KV, over all devices."""
        per_stage = self.mesh.num_devices // self.mesh.pipe
        return per_stage * math.fsum(stage.headroom_bytes for stage in self.stages)

    @property
    def num_tokens(self) -> int:
        """Unique tokens that every stage can hold, over all partitions; repeated latents count once."""
        if self.reason is not None:
            return 0
        per_partition = min(int(stage.headroom_bytes // stage.kv_bytes_per_token) for stage in self.stages)
        return self.mesh.num_partitions * per_partition


Workspace = Callable[[MeshShape, Rules], int]  # bytes per device


def budget(
    model: ModelPieces,
    mesh: MeshShape,
    rules: Rules,
    device_bytes: int,
    workspace: Workspace,
    context_tokens: int | None = None,
    step_tokens: int = 0,
) -> Budget:
    """What each device of the mesh holds. A mesh that does not fit says why instead of raising.

    Tokens are those of sequences of `context_tokens`, of which a group with a window keeps the last, and those that a
    step writes; None: of sequences that fit into every window.
    """
    kept_tokens = None if context_tokens is None else (context_tokens, step_tokens)
    try:
        check_rules(rules)
        stages = _stages(model, mesh, rules, device_bytes, workspace(mesh, rules), kept_tokens)
    except ValueError as error:  # a MeshError, or more stages than layers
        return Budget(mesh=mesh, rules=rules, reason=str(error))
    per_stage = mesh.num_devices // mesh.pipe
    repeated = per_stage * sum(stage.weight_bytes for stage in stages) - model.num_bytes
    found = Budget(mesh=mesh, rules=rules, stages=stages, repeated_bytes=repeated)
    least = min(stage.headroom_bytes for stage in stages)
    if least < 0:
        return replace(found, reason=f"weights and workspace exceed a device by {-least / 2**30:.1f} GiB")
    return found


def all_meshes(num_devices: int) -> Iterator[MeshShape]:
    """Every mesh of exactly so many devices."""
    sizes = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    for data, expert, tensor in itertools.product(sizes, repeat=3):
        if num_devices % (data * expert * tensor) == 0:
            yield MeshShape(data=data, expert=expert, tensor=tensor, pipe=num_devices // (data * expert * tensor))


def ranked(budgets: Sequence[Budget]) -> list[Budget]:
    """Sorted by unique tokens, most first; those that do not fit come last, by how near they come."""
    return sorted(budgets, key=lambda each: (each.reason is not None, -each.num_tokens, -each.headroom_bytes))


def _stages(
    model: ModelPieces,
    mesh: MeshShape,
    rules: Rules,
    device_bytes: int,
    workspace_bytes: int,
    tokens: tuple[int, int] | None,  # of a sequence, and of a step
) -> tuple[StageBudget, ...]:
    before, layers, after = _weights_on_a_device(model, mesh, rules)
    num_token_shards = mesh.tensor if rules.kv_tokens else 1
    stages = list[StageBudget]()
    for index, own in enumerate(stage_layers(model, mesh, rules)):
        weights = sum(layers[own.start : own.stop]) + before * (index == 0) + after * (index == mesh.pipe - 1)
        stages.append(
            StageBudget(
                num_layers=len(own),
                weight_bytes=weights,
                workspace_bytes=workspace_bytes,
                headroom_bytes=device_bytes - weights - workspace_bytes,
                kv_bytes_per_token=_kv_bytes_per_token(model, own, tokens) / num_token_shards,
            )
        )
    return tuple(stages)


def _kv_bytes_per_token(model: ModelPieces, layers: range, tokens: tuple[int, int] | None) -> float:
    """Bytes of a token in all groups' blocks on a stage of these layers."""
    largest = max(sum(layer in layers for layer in piece.layers) for piece in model.kv)
    return largest * math.fsum(piece.layer_bytes_per_token * _share_kept(piece, tokens) for piece in model.kv)


def _share_kept(piece: KvPiece, tokens: tuple[int, int] | None) -> float:
    """Of a sequence's tokens; `tokens` are the sequence's and a step's."""
    if piece.window is None or tokens is None:
        return 1.0
    context, step = tokens
    return min(1.0, (piece.window + step) / context)


def stage_layers(model: ModelPieces, mesh: MeshShape, rules: Rules) -> tuple[range, ...]:
    """The layers of each stage, so that their devices hold weights as evenly as whole layers allow.

    Raises:
        MeshError: a dimension does not divide, or a stage would have more layers of one KV group than of another.
        ValueError: more stages than layers.
    """
    before, layers, after = _weights_on_a_device(model, mesh, rules)
    counts = split_layers(layers, mesh.pipe, before=before, after=after)
    ends = itertools.accumulate(counts)
    stages = tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))
    if len(stages) > 1:
        _check_groups_are_cut_alike(model.kv, stages)
    return stages


def _check_groups_are_cut_alike(groups: Sequence[KvPiece], stages: Sequence[range]) -> None:
    """MeshError where a stage has more layers of one KV group than of another: blocks would be cut differently."""
    for index, stage in enumerate(stages):
        counts = [sum(layer in stage for layer in group.layers) for group in groups]
        if len(set(counts)) > 1:
            what = f"stage {index} has {counts} layers of the KV groups, not equally many"
            raise MeshError(f"mesh.pipe = {len(stages)}: {what}")


def _weights_on_a_device(model: ModelPieces, mesh: MeshShape, rules: Rules) -> tuple[float, list[float], float]:
    """Bytes before the layers, of each layer, and behind them."""
    sizes = {"data": mesh.data, "expert": mesh.expert, "tensor": mesh.tensor}

    def on_a_device(pieces: Sequence[WeightPiece]) -> float:
        return math.fsum(math.prod(_on_a_device(p, sizes, rules)) * p.bits / 8 for p in pieces)

    last = model.last if mesh.pipe == 1 else (*model.last, *model.tied)
    return on_a_device(model.first), [on_a_device(layer) for layer in model.layers], on_a_device(last)


def _on_a_device(piece: WeightPiece, sizes: Mapping[str, int], rules: Rules) -> tuple[int, ...]:
    """The shape of a device's part. MeshError where the mesh would part values that are stored as one number."""
    part = shard_shape(piece.axes, piece.shape, sizes, rules)
    if part[-1] != piece.shape[-1] and part[-1] % piece.values_together:
        cut_by = " x ".join(f"mesh.{axis}" for axis in rules.of(piece.axes[-1]))
        what = f"the model's {piece.axes[-1]} dimension {piece.shape[-1]} into parts of {part[-1]}"
        raise MeshError(
            f"{cut_by} cuts {what}, which cut through {piece.values_together} values that are stored as one number"
        )
    return part
