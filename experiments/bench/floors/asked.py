"""The least that a row of the table beside peers asks of a machine.

Keys are counted in the middle of what a stream generates, experts as often as an even router hits them, a prompt as one
step however it is cut into chunks.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from moonshard.experiments.bench.floors.work import ItemBytes, StepWork, Work, expected_experts, num_values, step_work
from moonshard.experiments.bench.peers.rows import Cached, ClosedLoop, Decoding, Prefilling, Row
from moonshard.models.formats.sizes import EXPERTS
from moonshard.models.model import LatentModel, Model
from moonshard.models.registry import open_model
from moonshard.models.spec import page_layers
from moonshard.models.weights import abstract, is_param
from moonshard.serving.config.keys import Config
from moonshard.serving.engine.capacity.sizes import WeightBytes, choose_sizes, resolve_dtype
from moonshard.serving.engine.loading.holding import holding_of
from moonshard.serving.engine.loading.model import machine_for
from moonshard.sharding.mesh import build_mesh
from moonshard.sharding.shape import MeshShape


def row_work(model: LatentModel, row: Row, size: ItemBytes) -> Work:
    """Of a step for rows that give a step's time, of all of it for the others."""
    match row:
        case Decoding():
            return decode_work(model, row.batch, row.prompt_tokens + row.completion_tokens // 2, size)
        case Prefilling():
            return prompt_work(model, row.prompt_tokens, size)
        case Cached():
            return decode_work(model, 1, row.prompt_tokens - 1, size)
        case ClosedLoop():
            later = row.completion_tokens - 1  # the first comes with the prompt
            num_steps = row.num_requests * later / row.num_clients
            step = decode_work(model, row.num_clients, row.prompt_tokens + later // 2, size)
            return prompt_work(model, row.prompt_tokens, size).times(row.num_requests) + step.times(num_steps)


def decode_work(model: LatentModel, batch: int, context_tokens: int, size: ItemBytes) -> Work:
    """A step of so many sequences, each with a token at position `context_tokens`."""
    return even_work(model, [(context_tokens, context_tokens + 1)] * batch, size).whole


def prompt_work(model: LatentModel, num_tokens: int, size: ItemBytes) -> Work:
    return even_work(model, [(0, num_tokens)], size).whole


def even_work(model: LatentModel, spans: Sequence[tuple[int, int]], size: ItemBytes) -> StepWork:
    """A step whose router is even."""
    hit = expected_experts(model, sum(stop - start for start, stop in spans))
    return step_work(model, spans, [hit] * model.config.num_moe_layers, size)


def held_bytes(config: Config, model: Model, size: ItemBytes) -> tuple[float, float]:
    """Of a worker that does both: its weights, and its pool of KV as configured."""
    groups = model.kv_groups(resolve_dtype(config.model.dtype))
    _, pool = choose_sizes(config, model, groups[0].dtype)
    num_tokens = pool.num_partitions * pool.blocks_per_partition * config.kv.block_size
    num_layers = page_layers(groups, range(model.config.num_hidden_layers))
    weights_bytes = sum(
        num_values(own) * of for own, of in zip(_apart(model), (size.weights, size.of_experts), strict=True)
    )
    return weights_bytes, num_tokens * num_layers * groups[0].layer_bytes_per_token


def item_bytes(config: Config) -> ItemBytes:
    """Of a worker's weights, those of routed experts apart, on average over their values; and of its KV."""
    checkpoint, model = open_model(config.model.path)
    dtype, platform = resolve_dtype(config.model.dtype), jax.devices()[0].platform
    holding = holding_of(config, machine_for(platform))
    mesh = build_mesh(MeshShape())

    def of(declared: Any) -> float | None:
        taken = WeightBytes.of([abstract(declared, dtype, mesh, source=checkpoint, holding=holding)])
        return taken.everywhere / num_values(declared) if num_values(declared) else None

    others, experts = map(of, _apart(model))
    return ItemBytes(weights=others or 0, kv=jnp.dtype(dtype).itemsize, experts=experts)


def _apart(model: Model) -> tuple[Any, Any]:
    """All parameters but those of routed experts, and these."""
    params = jax.tree.leaves(model.declare(), is_leaf=is_param)
    return [each for each in params if EXPERTS not in each.axes], [each for each in params if EXPERTS in each.axes]
