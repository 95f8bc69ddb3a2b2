"""The jitted programs of a worker: prefill, decode, and the small ones that load a slot, copy, export and land blocks.

Each takes the donated state and one packed array and gives the state back; an export only reads the pages, so that they
stay where they are. Programs are compiled for every bucket before the worker is ready; nothing compiles afterwards. No
scheduler object comes here.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from moonshard.kv.pages import Pages, allocate_pages, copy_blocks, gather_blocks, scatter_blocks
from moonshard.models import kimi, moe, sampling
from moonshard.models.sampling import Draws, RowSampling, SlotState
from moonshard.models.spec import matmul_precision
from moonshard.serving.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKENS, Logprobs
from moonshard.serving.steps import Step, StepKind, StepLayout, StepShapes
from moonshard.sharding.mesh import replicated


@struct.dataclass
class DeviceState:
    """All that changes from step to step on the device."""

    pages: Pages
    slots: SlotState


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight, and what it gives, still on the device.

    Packed tokens; an export's blocks; of a land, one number that is there once the blocks are. None for the kinds whose
    end nobody waits for.
    """

    number: int
    kind: StepKind
    result: jax.Array | None


@dataclass(frozen=True, slots=True)
class Drawn:
    """A step's tokens on the host, in the order in which its plan names who draws."""

    tokens: np.ndarray  # [rows] int32
    logprobs: np.ndarray  # [rows] f32
    top_ids: np.ndarray  # [rows, top] int32
    top_logprobs: np.ndarray  # [rows, top] f32

    def logprobs_of(self, row: int, num_top: int) -> Logprobs:
        top = zip(self.top_ids[row, :num_top].tolist(), self.top_logprobs[row, :num_top].tolist(), strict=True)
        return Logprobs(chosen=float(self.logprobs[row]), top=tuple(top))


class Programs:
    """The device side of one worker: weights, state, and the compiled programs that move one to the next."""

    def __init__(
        self,
        config: kimi.KimiConfig,
        weights: Any,
        shapes: StepShapes,
        mesh: Mesh,
        *,
        num_blocks: int,
        block_size: int,
        dtype: str,
        backend: moe.Backend = moe.blocks,
    ):
        self.shapes = shapes
        self._weights = weights
        self._everywhere = replicated(mesh)
        (group,) = config.kv_groups(dtype)
        self._state = DeviceState(
            pages=allocate_pages(
                num_blocks, group.num_layers, block_size, group.num_features, dtype=dtype, sharding=self._everywhere
            ),
            slots=jax.device_put(
                sampling.empty_slots(shapes.num_slots, config.vocab_size, MAX_LOGIT_BIAS, MAX_STOP_TOKENS),
                self._everywhere,
            ),
        )
        self._programs: dict[tuple[StepKind, int], Callable[..., Any]] = dict(
            _build(config, shapes, backend, matmul_precision(dtype))
        )

    @property
    def state(self) -> DeviceState:
        """For inspection between steps; the next launch donates it."""
        return self._state

    def compile(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Runs every program once on padding, which compiles it, or loads it from the persistent cache."""
        for done, (kind, bucket) in enumerate(self._programs):
            progress(done, len(self._programs))
            packed, _ = self.shapes.layout(kind, bucket).blank()
            payload = self._blank_payload(bucket) if kind is StepKind.LAND else None
            self.fetch(self.launch(Step(-1, kind, bucket, packed, payload)))
        progress(len(self._programs), len(self._programs))
        jax.block_until_ready(self._state)

    def launch(self, step: Step) -> Launched:
        """Enqueues a step and returns without waiting for it."""
        program = self._programs[step.kind, step.bucket]
        match step.kind:
            case StepKind.EXPORT:
                result = program(self._state.pages, step.metadata)
            case StepKind.LAND:
                self._state, result = program(self._state, step.metadata, step.payload)
            case _:
                self._state, result = program(self._weights, self._state, step.metadata)
        return Launched(step.number, step.kind, result)

    def fetch(self, launched: Launched) -> Drawn | np.ndarray | None:
        """Waits for a step's tokens, or an export's blocks, or the end of a land. None where there is nothing to see.

        The blocks are an array of their own, which no later step changes; on CPU it is the device's, not copied again.
        """
        if launched.result is None:
            return None
        host = np.asarray(launched.result)
        match launched.kind:
            case StepKind.EXPORT:
                return host
            case StepKind.LAND:
                return None
            case _:
                return _drawn(host)

    def _blank_payload(self, bucket: int) -> np.ndarray:
        pages = self._state.pages
        return np.zeros((bucket, *pages.shape[1:]), pages.dtype)


def _drawn(packed: np.ndarray) -> Drawn:
    top = (packed.shape[1] - 2) // 2
    return Drawn(
        tokens=packed[:, 0],
        logprobs=np.ascontiguousarray(packed[:, 1]).view(np.float32),
        top_ids=packed[:, 2 : 2 + top],
        top_logprobs=np.ascontiguousarray(packed[:, 2 + top :]).view(np.float32),
    )


def _build(config: kimi.KimiConfig, shapes: StepShapes, backend: moe.Backend, precision: str):
    """Yields ((kind, bucket), jitted program)."""
    bodies = {
        StepKind.PREFILL: functools.partial(_prefill, config, backend),
        StepKind.DECODE: functools.partial(_decode, config, backend),
        StepKind.LOAD: _load,
        StepKind.COPY: _copy,
    }
    for kind, bucket in shapes.programs:
        layout = shapes.layout(kind, bucket)
        match kind:
            case StepKind.EXPORT:
                yield (kind, bucket), _exporting(layout)
            case StepKind.LAND:
                yield (kind, bucket), _landing(layout)
            case _:
                yield (kind, bucket), _jitted(bodies[kind], layout, precision)


def _jitted(body: Callable[..., Any], layout: StepLayout, precision: str) -> Callable[..., Any]:
    @functools.partial(jax.jit, donate_argnums=1)
    def program(weights: Any, state: DeviceState, packed: jax.Array) -> tuple[DeviceState, jax.Array | None]:
        with jax.default_matmul_precision(precision):
            return body(weights, state, layout.unpack(packed))

    return program


def _exporting(layout: StepLayout) -> Callable[[Pages, np.ndarray], jax.Array]:
    @jax.jit
    def program(pages: Pages, packed: jax.Array) -> jax.Array:
        return gather_blocks(pages, layout.unpack(packed)["source"])

    return program


def _landing(layout: StepLayout) -> Callable[..., Any]:
    @functools.partial(jax.jit, donate_argnums=0)
    def program(state: DeviceState, packed: jax.Array, payload: jax.Array) -> tuple[DeviceState, jax.Array]:
        pages = scatter_blocks(state.pages, layout.unpack(packed)["destination"], payload)
        return replace(state, pages=pages), jnp.int32(0)  # all that a step gives is there at once

    return program


def _prefill(config: kimi.KimiConfig, backend: moe.Backend, weights: Any, state: DeviceState, f: dict[str, jax.Array]):
    batch = kimi.Batch(tokens=f["tokens"], positions=f["positions"], block_tables=f["block_tables"])
    logits, pages = kimi.prefill(config, weights, state.pages, batch, f["sample_from"], backend)
    draws, slots = sampling.draw(logits, _row_sampling(f), state.slots, f["sample_slot"], MAX_LOGPROBS)
    return DeviceState(pages=pages, slots=slots), _pack(draws)


def _decode(config: kimi.KimiConfig, backend: moe.Backend, weights: Any, state: DeviceState, f: dict[str, jax.Array]):
    tokens = state.slots.last_token.at[f["slot"]].get(mode="clip")
    batch = kimi.Batch(tokens=tokens[:, None], positions=f["positions"][:, None], block_tables=f["block_tables"])
    logits, pages = kimi.decode(config, weights, state.pages, batch, backend)
    draws, slots = sampling.draw(logits, _row_sampling(f), state.slots, f["slot"], MAX_LOGPROBS)
    return DeviceState(pages=pages, slots=slots), _pack(draws)


def _load(weights: Any, state: DeviceState, f: dict[str, jax.Array]):
    del weights
    slots = sampling.load_slot(
        state.slots,
        f["slot"],
        f["history"],
        f["num_prompt"],
        f["num_history"],
        f["bias_ids"],
        f["bias_values"],
        f["stop_ids"],
    )
    return replace(state, slots=slots), None


def _copy(weights: Any, state: DeviceState, f: dict[str, jax.Array]):
    del weights
    return replace(state, pages=copy_blocks(state.pages, f["source"], f["destination"])), None


def _row_sampling(f: dict[str, jax.Array]) -> RowSampling:
    return RowSampling(
        temperature=f["temperature"],
        top_p=f["top_p"],
        top_k=f["top_k"],
        min_p=f["min_p"],
        repetition_penalty=f["repetition_penalty"],
        presence_penalty=f["presence_penalty"],
        frequency_penalty=f["frequency_penalty"],
        seed=f["seed"],
        choice=f["choice"],
        position=f["sample_position"],
        has_bias=f["has_bias"] != 0,
        bans_stops=f["bans_stops"] != 0,
        wants_logprobs=f["wants_logprobs"] != 0,
    )


def _pack(draws: Draws) -> jax.Array:
    """[rows, 1 + 1 + top + top] int32: token, bits of its log-probability, likeliest ids, bits of theirs."""

    def bits(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)

    columns = (draws.tokens[:, None], bits(draws.logprobs)[:, None], draws.top_ids, bits(draws.top_logprobs))
    return jnp.concatenate(columns, axis=1)
