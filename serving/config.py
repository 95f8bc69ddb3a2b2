"""What a deployment is made of, as frozen dataclasses: the one configuration that every process is given.

This file is the list of all keys: a key's name, type, bounds, default and meaning stand here and nowhere else, and the
reader `config_file` walks these dataclasses. Left out: the model's own shape, which its folder's config.json tells.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from moonshard.sharding.shape import MeshShape

EMBEDDED_MODEL_NAME = "kimi-tiny-random"

Positive = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65_535)]  # 0: any free port
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Text = Annotated[str, Meta(min_length=1)]


class ConfigError(ValueError):
    """A configuration that cannot be served. `faults` names every one of them, not only the first."""

    def __init__(self, faults: Sequence[str]):
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which checkpoint, and how it is held."""

    path: Path  # a Hugging Face folder; without one the embedded model is served
    name: Text  # what clients call it; the folder's name by default
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: float32 on CPU, bfloat16 on GPU
    max_context_tokens: Annotated[int, Meta(ge=2)] | None = None  # None: what folder and cache allow, at most 8,192


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayConfig:
    """The process that clients talk to."""

    host: Text = "127.0.0.1"
    port: Port = 8000  # HTTP
    grpc_port: Port = 50051
    workers: tuple[Text, ...] = ()  # host:port; empty: the one at [worker]. `serve` starts its own
    max_body_bytes: Positive = 32 * 1024 * 1024
    max_queued_requests: Positive = 512
    queue_timeout_s: Seconds = 30.0
    drain_timeout_s: Seconds = 20.0  # how long running requests may take to finish after SIGTERM


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """Where a worker started by hand listens; `serve` gives its workers free ports."""

    host: Text = "127.0.0.1"
    port: Port = 50061


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillConfig:
    """Prefill workers. In aggregated mode only `chunk_tokens` applies, to the workers of [decode]."""

    replicas: Positive = 1
    mesh: MeshShape = field(default_factory=MeshShape)
    chunk_tokens: Positive = 512  # the most prompt tokens of one step


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """Decode workers; in aggregated mode, all the workers there are."""

    replicas: Positive = 1
    mesh: MeshShape = field(default_factory=MeshShape)
    max_slots: Positive = 16  # sequences decoded at once by one worker, over all its partitions


@dataclass(frozen=True, kw_only=True, slots=True)
class KvConfig:
    """The KV cache."""

    block_size: Annotated[int, Meta(ge=1, le=1024)] = 64  # tokens
    num_blocks: Positive | None = None  # per partition; None: what memory allows
    transport: Literal["mooncake", "grpc", "inproc"] = "mooncake"  # prefill to decode; unused when aggregated


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All of it."""

    mode: Literal["aggregated", "disaggregated"] = "aggregated"
    model: ModelConfig
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    kv: KvConfig = field(default_factory=KvConfig)


def embedded_model_path() -> Path:
    """The folder of the model served when no other is named: small, with random weights. ConfigError without one."""
    path = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "kimi_k2"
    if not (path / "config.json").is_file():
        raise ConfigError(["model.path: there is no embedded model in this installation; name a folder"])
    return path


def joint_faults(config: Config) -> list[str]:
    """What no bounds of a single value can tell: above all, keys that are valid alone and do not fit together."""
    gateway, decode, kv = config.gateway, config.decode, config.kv
    faults = [f"gateway.workers: expected host:port, got {w!r}" for w in gateway.workers if not _is_address(w)]
    if config.mode == "disaggregated":
        faults.append("mode: disaggregated is not served yet; use aggregated")
    if gateway.port == gateway.grpc_port != 0:
        faults.append(f"gateway.grpc_port: {gateway.grpc_port} is gateway.port too; HTTP and gRPC need one each")
    if config.prefill.chunk_tokens % kv.block_size:
        faults.append(
            f"prefill.chunk_tokens: {config.prefill.chunk_tokens} is not a multiple of kv.block_size ({kv.block_size})"
        )
    if decode.max_slots % decode.mesh.num_partitions:
        faults.append(
            f"decode.max_slots: {decode.max_slots} cannot be shared out equally among the "
            f"{decode.mesh.num_partitions} partitions (data x expert) of decode.mesh"
        )
    return faults


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) <= 65_535
