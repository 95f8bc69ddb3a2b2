"""The jitted programs of a worker: prefill, decode, and the small ones that load a slot and copy blocks.

Each takes the weights, the donated state and one packed array, and gives the state back. Programs are compiled for
every bucket before the worker is ready; nothing compiles afterwards. No scheduler object comes here.
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

from moonshard.kv.pages import Pages, allocate_pages, copy_blocks
from moonshard.models import kimi, moe, sampling
from moonshard.models.sampling import Draws, RowSampling, SlotState
from moonshard.models.spec import matmul_precision
from moonshard.serving.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKENS, Logprobs
from moonshard.serving.steps import Step, StepKind, StepLayout, StepShapes
from moonshard.sharding.rules import replicated


@struct.dataclass
class DeviceState:
    """All that changes from step to step on the device."""

    pages: Pages
    slots: SlotState


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight: its drawn tokens, still on the device. None for kinds that draw none."""

    number: int
    packed: jax.Array | None


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
        self._programs = dict(_build(config, shapes, backend, matmul_precision(dtype)))

    @property
    def state(self) -> DeviceState:
        """For inspection between steps; the next launch donates it."""
        return self._state

    def compile(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Runs every program once on padding, which compiles it, or loads it from the persistent cache."""
        for done, (kind, bucket) in enumerate(self._programs):
            progress(done, len(self._programs))
            packed, _ = self.shapes.layout(kind, bucket).blank()
            self.fetch(self.launch(Step(-1, kind, bucket, packed)))
        progress(len(self._programs), len(self._programs))
        jax.block_until_ready(self._state)

    def launch(self, step: Step) -> Launched:
        """Enqueues a step and returns without waiting for it."""
        program = self._programs[step.kind, step.bucket]
        self._state, packed = program(self._weights, self._state, step.metadata)
        return Launched(step.number, packed)

    def fetch(self, launched: Launched) -> Drawn | None:
        """Waits for a step's tokens. Steps that draw none give None at once."""
        if launched.packed is None:
            return None
        host = np.asarray(launched.packed)
        top = (host.shape[1] - 2) // 2
        return Drawn(
            tokens=host[:, 0],
            logprobs=np.ascontiguousarray(host[:, 1]).view(np.float32),
            top_ids=host[:, 2 : 2 + top],
            top_logprobs=np.ascontiguousarray(host[:, 2 + top :]).view(np.float32),
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
        yield (kind, bucket), _jitted(bodies[kind], shapes.layout(kind, bucket), precision)


def _jitted(body: Callable[..., Any], layout: StepLayout, precision: str) -> Callable[..., Any]:
    @functools.partial(jax.jit, donate_argnums=1)
    def program(weights: Any, state: DeviceState, packed: jax.Array) -> tuple[DeviceState, jax.Array | None]:
        with jax.default_matmul_precision(precision):
            return body(weights, state, layout.unpack(packed))

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
