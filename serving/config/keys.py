"""What a deployment is made of, as frozen dataclasses: the one configuration that every process is given.

This file is the list of all keys: a key's name, type, bounds, default and meaning stand here and nowhere else, and the
reader `reading` walks these dataclasses. A comment with `auto: ...` or `none: ...` also says how a file spells a
default of None, which `listing` reads. Which values do not fit together is in `faults`; the model's own shape is in its
folder's config.json.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from moonshard.serving.config.prices import Prices
from moonshard.serving.control.routing.names import QUEUE_WEIGHT, PolicyName
from moonshard.sharding.rules import DecodeRules, Rules
from moonshard.sharding.shape import MeshShape

EMBEDDED_MODEL_NAME = "pocket-kimi"

# No number is without an end: what would be allocated, listed or started by it is refused here, before any of that is.
MAX_INT = 2**31 - 1  # of what goes over a wire or to a device as 32 bits
MAX_GUESSED_TOKENS = 3  # kernels take rows of up to four positions
MAX_DEVICES = 4096  # of a mesh; on a CPU a worker makes itself so many

Positive = Annotated[int, Meta(ge=1, le=MAX_INT)]
NotNegative = Annotated[int, Meta(ge=0, le=MAX_INT)]
Large = Annotated[int, Meta(ge=1, le=2**50)]  # of bytes, or of tokens that are only added up
LargeOrNone = Annotated[int, Meta(ge=0, le=2**50)]  # 0: there is none
ContextTokens = Annotated[int, Meta(ge=2, le=MAX_INT)]
ChunkTokens = Annotated[int, Meta(ge=1, le=2**20)]
Replicas = Annotated[int, Meta(ge=1, le=1024)]  # processes
Slots = Annotated[int, Meta(ge=1, le=65_536)]  # rows of what a worker keeps for each of its devices
Port = Annotated[int, Meta(ge=0, le=65_535)]  # 0: any free port
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Text = Annotated[str, Meta(min_length=1)]
Stated = Annotated[str, Meta(pattern=r"\S")]  # more than white space
ListenPort = Annotated[int, Meta(ge=1, le=65_535)]

GuessingMethod = Literal["grammar", "lookup", "eagle3", "mtp"]
GuessedTokens = Annotated[int, Meta(ge=1, le=MAX_GUESSED_TOKENS)]

WorkerRole = Literal["both", "prefill", "decode"]  # both: aggregated


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
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of compute and KV; auto: float32 on CPU, bfloat16 on GPU
    weights: Literal["native", "float32", "bf16", "int8"] = "native"  # in memory; native: as stored. See README
    max_context_tokens: ContextTokens | None = None  # auto: what folder and cache allow, at most 8,192


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayConfig:
    """The process that clients talk to."""

    host: Text = "127.0.0.1"  # where HTTP and gRPC listen
    port: Port = 8000  # HTTP; 0: any free one
    grpc_port: Port = 50051  # gRPC; likewise
    workers: tuple[Text, ...] = ()  # host:port; empty: one of each role, at worker.host. `serve` starts its own
    registry: Literal["list", "grpc"] = "list"  # who the workers are: those of `workers`, or those that register here
    registry_host: Text = "127.0.0.1"  # of grpc: where workers register. Not `host`: clients have no business there
    registry_port: Port = 50052  # likewise
    keys: Path | None = None  # a file that names tenants by the hashes of their keys; none: one tenant, without a key
    tenant_tokens_per_minute: Large | None = None  # of prompts and completions; none: as many as it likes
    ledger: Path | None = None  # a row for each request that was sent is appended to it; none: no account is kept
    allowed_origins: tuple[Text, ...] = ()  # of pages that may call it from a browser; "*": any
    allowed_hosts: tuple[Text, ...] = ()  # names, in Host, under which it may be called; "*": any. See README
    keep_alive_s: Seconds = 75.0  # an idle connection stays open; more than proxies keep theirs, by default 60
    head_timeout_s: Seconds = 30.0  # for a request's head to be complete
    body_timeout_s: Seconds = 30.0  # for its body; and a second more for each 8 KiB that came
    max_idle_connections: Positive = 2048  # between two requests; one more, and the oldest is closed
    max_half_open_connections: Positive = 512  # whose request is not complete; likewise
    max_body_bytes: Positive = 32 * 1024 * 1024  # also of what a compressed one holds
    max_bytes_in_flight: Large = 256 * 1024 * 1024  # of the bodies of all requests that have not ended
    max_queued_requests: Annotated[int, Meta(ge=1, le=1_000_000)] = 512  # more are refused with 429
    queue_timeout_s: Seconds = 30.0  # a request whose prompt has waited longer is refused
    drain_timeout_s: Seconds = 20.0  # how long running requests may take to finish after SIGTERM
    unknown_fields: Literal["warn", "refuse"] = "warn"  # fields of a body that nothing here knows: named, or refused
    worker_silence_s: Seconds = 5.0  # a worker from which nothing came for so long is gone: its lease, too


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponsesConfig:
    """What a gateway keeps in its memory of the answers of /v1/responses, for requests that go on from them."""

    max_stored: Annotated[int, Meta(ge=0, le=1_000_000)] = 1024  # of each tenant; the least recently used is dropped
    max_stored_bytes: Large = 256 * 1024 * 1024  # likewise, with the conversations before them


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchesConfig:
    """What a gateway keeps on disk for /v1/files and /v1/batches."""

    path: Path | None = None  # a folder of this gateway's own, made where it is missing; none: neither is served
    max_bytes: Large = 16 * 1024**3  # of all tenants' files and results together


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingConfig:
    """Which worker a request goes to, and what becomes of it when that one is lost."""

    policy: PolicyName = "cost"  # how a worker is chosen: see README, "Configuration"
    queue_weight: Annotated[float, Meta(ge=0, le=1e3)] = QUEUE_WEIGHT  # of policy cost: a queued token beside one to do
    local_prefill: Literal["cost", "static"] = "cost"  # when decode workers prefill: where it costs less; static: below
    local_prefill_max_tokens: NotNegative = 0  # static: where at most so many are unknown there
    local_prefill_min_known: Annotated[float, Meta(ge=0, le=1)] = 1.0  # static: or where this share of it is known
    # a request whose first token is predicted to take longer is refused; auto: one that would queue for more than 2 s
    # and for more than four times its own prompt's time; none: nothing is refused
    ttft_slo_s: Seconds | Literal["auto"] | None = "auto"
    max_attempts: Annotated[int, Meta(ge=1, le=1000)] = 3  # how often a request is begun or continued on other workers
    failover_wait_s: Annotated[float, Meta(ge=0, le=86_400)] = 10.0  # of a request that lost its worker, for another


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """Where workers started by hand listen; `serve` gives its workers free ports."""

    host: Text = "127.0.0.1"  # of a worker of any role
    port: Port = 50061  # of an aggregated one
    # host:port of the registries of gateways, with which a worker of any role registers: of a name, all its addresses,
    # which are looked up again and again; empty: gateways are told of it
    gateways: tuple[Text, ...] = ()
    announced_host: Text | None = None  # by which gateways then call it, as certificates have it; auto: worker.host
    # which programs are there before a worker is ready: those without which nothing is served, while those of smaller
    # steps are made behind as they are asked for; what a first short request needs too; or all, so that no step that is
    # measured takes a larger one's
    prepare: Literal["needed", "first", "all"] = "needed"
    gang_timeout_s: Seconds = 5.0  # a member of a gang that is silent, or makes no progress, for so long ends all of it
    gang_join_timeout_s: Seconds = 300.0  # how long the members of a gang wait for each other at their start


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillConfig:
    """Prefill workers. In aggregated mode `chunk_tokens` and `short_share` alone apply, to the workers of [decode]."""

    replicas: Replicas = 1  # how many workers `serve` starts
    processes: Replicas = 1  # of each worker: a gang, which has its mesh together and divides its devices
    port: Port = 50071  # of one that is started by hand
    mesh: MeshShape = field(default_factory=MeshShape)
    rules: Rules = field(default_factory=Rules)  # over which axes of the mesh weights and KV are cut
    expert_loads: Path | None = None  # what `moonshard experts` wrote: by it experts are placed; none: in order
    redundant_experts: Annotated[int, Meta(ge=0, le=65_536)] = 0  # further copies of hot experts, in each MoE layer
    # the most prompt tokens of one step, rounded up to a multiple of 32; auto: what is best on the machine, see README
    chunk_tokens: ChunkTokens | None = None
    short_share: Annotated[float, Meta(ge=0, lt=1)] = 0.5  # of a step that a long prompt leaves to prompts that fit in
    max_slots: Slots = 16  # rows whose first token one step can draw, over all partitions


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """Decode workers; in aggregated mode, all the workers there are."""

    replicas: Replicas = 1  # how many workers `serve` starts
    processes: Replicas = 1  # of each worker: a gang, which has its mesh together and divides its devices
    port: Port = 50072  # of one that is started by hand; unused in aggregated mode, which has `worker.port`
    mesh: MeshShape = field(default_factory=MeshShape)
    rules: DecodeRules = field(default_factory=DecodeRules)
    expert_loads: Path | None = None  # as of [prefill]; none: in order
    redundant_experts: Annotated[int, Meta(ge=0, le=65_536)] = 0  # likewise
    max_slots: Slots = 16  # sequences decoded at once by one worker, over all its partitions


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreConfig:
    """Where blocks of the prefix cache are kept beyond the device's pages; sizes are of each worker, or say of what."""

    enabled: bool = False  # complete blocks are written to all tiers that follow, and found there again
    host_bytes: LargeOrNone = 2 * 1024**3  # in the worker's own memory; 0: none
    dram_bytes: LargeOrNone = 0  # of this machine, in Mooncake Store, which all workers share; 0: it gives none
    master: Text | None = None  # host:port of Mooncake Store's master; auto: `serve` starts one for this machine
    client: Text | None = None  # host:port of this machine's end of the store; auto: `serve` starts it
    ssd_path: Path | None = None  # a folder for files that outlive worker and machine; none: there are none
    ssd_bytes: Large = 16 * 1024**3  # of each worker's files there

    @property
    def is_shared(self) -> bool:
        """Whether there is a tier that all workers share: here, or at somebody's `client`."""
        return self.enabled and (self.dram_bytes > 0 or self.client is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class KvConfig:
    """The KV cache, and its way from prefill to decode: when aggregated all keys after `store` are unused, but those
    that say who reaches Mooncake, where its store is used: `host`, `ports`, `allow_unauthenticated`, `network_fence`.
    """

    block_size: Annotated[int, Meta(ge=1, le=1024)] = 64  # tokens
    num_blocks: Positive | None = None  # per partition; auto: what memory allows
    prefix_cache: bool = True  # blocks are found again by what they hold, until they are needed for something else
    store: StoreConfig = field(default_factory=StoreConfig)
    transport: Literal["mooncake", "grpc"] = "mooncake"  # how KV goes from prefill to decode workers
    slab_bytes: Large = 256 * 1024 * 1024  # of each worker's own: KV lands in it, or is staged in it
    slots_per_handoff: Positive | None = None  # auto: a quarter of the slab's slots, at least 1
    lease_s: Seconds = 60.0  # after which a reservation that nobody has used ends
    quarantine_s: Seconds = 60.0  # how long slots rest after a writer that may still write
    transfer_timeout_s: Seconds = 5.0  # without any copy landing
    host: Text | None = None  # the name by which peers reach this machine; auto: worker.host
    ports: tuple[ListenPort, ListenPort] | None = None  # first and last for Mooncake to listen at; auto: free ones
    allow_unauthenticated: bool = False  # serve KV beyond loopback to whoever reaches it
    network_fence: Stated | None = None  # how the KV plane's network is fenced, in words; none: nothing is said of it


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceConfig:
    """What every process records of its requests and steps, as Parquet: experiments/SCHEMA.md names the columns."""

    path: Path | None = None  # a folder, made where it is missing; none: nothing is recorded
    tokens: bool = False  # by the gateway, also a row for each token
    max_rows: Annotated[int, Meta(ge=1, le=10_000_000)] = 8192  # of one file
    max_age_s: Seconds = 10.0  # a row waits no longer to be written: what a killed process loses
    max_bytes: Large = 16 * 1024**3  # of the files of one process: then it deletes its oldest


@dataclass(frozen=True, kw_only=True, slots=True)
class TelemetryConfig:
    """Where every process sends its requests' spans; what is not said here, OpenTelemetry's variables may say."""

    endpoint: Text | None = None  # http:// or https:// of a collector that speaks OTLP; none: there are no spans
    whole_url: bool = False  # over HTTP the endpoint is used as it is; else /v1/traces is appended to it
    protocol: Literal["auto", "grpc", "http"] = "auto"  # auto: grpc
    sampled_ratio: Annotated[float, Meta(ge=0, le=1)] | None = None  # of the traces that begin here; auto: all
    parent_based: bool | None = None  # whoever began a trace has decided whether it is sampled; auto: yes
    service_name: Text | None = None  # auto: moonshard


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationConfig:
    """Guesses at the tokens that follow, of which a decode step verifies several at once. They change no token."""

    method: Literal["none", GuessingMethod] | tuple[GuessingMethod, ...] = "none"  # or several
    path: Path | None = None  # the folder of an eagle3 draft; none: of the embedded model its own
    # of a guess, at most; auto: 3, none where they cost more than they gain
    num_tokens: Literal["auto"] | GuessedTokens = "auto"

    @property
    def methods(self) -> tuple[GuessingMethod, ...]:
        """All that guess."""
        if isinstance(self.method, tuple):
            return self.method
        return () if self.method == "none" else (self.method,)

    @property
    def draft_model(self) -> Literal["eagle3", "mtp"] | None:
        """The kind of model that guesses; None: none does."""
        return next((method for method in self.methods if method == "eagle3" or method == "mtp"), None)

    @property
    def most_tokens(self) -> int:
        """Of a guess; 0: nothing guesses."""
        return (MAX_GUESSED_TOKENS if self.num_tokens == "auto" else self.num_tokens) if self.methods else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsConfig:
    """Mutual TLS between gateway and workers: PEM files, all or none. Workers and gateways each show `cert`."""

    cert: Path | None = None  # what workers and gateways show each other; none: they speak in the clear
    key: Path | None = None  # its own, not encrypted; none: likewise
    ca: Path | None = None  # whom to believe: a peer's certificate must be signed by it; none: likewise

    @property
    def is_complete(self) -> bool:
        return None not in (self.cert, self.key, self.ca)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """What gateways and workers know each other by."""

    key_file: Path | None = None  # made where it is missing; auto: moonshard/cluster.key in the user's state folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All of it."""

    mode: Literal["aggregated", "disaggregated"] = "disaggregated"  # aggregated: every worker prefills and decodes
    model: ModelConfig
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    responses: ResponsesConfig = field(default_factory=ResponsesConfig)
    batches: BatchesConfig = field(default_factory=BatchesConfig)
    prices: Prices = field(default_factory=Prices)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    kv: KvConfig = field(default_factory=KvConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


def embedded_model_path() -> Path:
    """The folder of the model served when no other is named. ConfigError without one."""
    path = Path(__file__).resolve().parents[2] / "models" / "pocket"
    if not (path / "config.json").is_file():
        raise ConfigError(["model.path: there is no embedded model in this installation; name a folder"])
    return path


def embedded_draft_path() -> Path:
    """The folder of the embedded model's draft. ConfigError without one."""
    path = Path(__file__).resolve().parents[2] / "models" / "pocket_draft"
    if not (path / "config.json").is_file():
        raise ConfigError(["speculation.path: there is no embedded draft in this installation; name a folder"])
    return path


def draft_path_of(config: Config) -> Path | None:
    """The folder of the draft model; None where there is none, or it lies in the model's own."""
    if config.speculation.draft_model != "eagle3":
        return None
    return config.speculation.path or embedded_draft_path()


def mesh_of(config: Config, role: WorkerRole) -> MeshShape:
    return config.prefill.mesh if role == "prefill" else config.decode.mesh


def processes_of(config: Config, role: WorkerRole) -> int:
    """How many processes a worker of that role is."""
    return config.prefill.processes if role == "prefill" else config.decode.processes


def workers_of(config: Config) -> dict[str, WorkerRole]:
    """The workers that `serve` starts, by their names, in the order in which the gateway is told of them."""
    return {
        f"{command_of(role)} {index}": role
        for role in roles_of(config)
        for index in range(config.prefill.replicas if role == "prefill" else config.decode.replicas)
    }


def rules_of(config: Config, role: WorkerRole) -> Rules:
    """A role's table of rules. A worker of both roles has that of decode."""
    return config.prefill.rules if role == "prefill" else config.decode.rules


def experts_of(config: Config, role: WorkerRole) -> tuple[Path | None, int]:
    """A role's file of measured loads, and its number of redundant experts."""
    own = config.prefill if role == "prefill" else config.decode
    return own.expert_loads, own.redundant_experts


def decode_positions(config: Config, role: WorkerRole) -> int:
    """How many positions of a row a worker's decode steps compute, at most: a token, and guesses at those behind it."""
    return 1 if role == "prefill" else 1 + config.speculation.most_tokens


def port_of(config: Config, role: WorkerRole) -> int:
    """Where a worker of that role listens, at `worker.host`."""
    return {"both": config.worker, "prefill": config.prefill, "decode": config.decode}[role].port


def command_of(role: WorkerRole) -> str:
    """The `moonshard` command that runs a worker of that role; its port is in the table of that name."""
    return "worker" if role == "both" else role


def port_key(role: WorkerRole) -> str:
    return f"{command_of(role)}.port"


def with_worker_at(config: Config, role: WorkerRole, host: str, port: int) -> Config:
    """The same for one worker of that role, at that place; the ports of the other roles are free ones."""
    return replace(
        config,
        worker=replace(config.worker, host=host, port=port if role == "both" else 0, announced_host=None),
        prefill=replace(config.prefill, port=port if role == "prefill" else 0),
        decode=replace(config.decode, port=port if role == "decode" else 0),
    )


def kv_host_of(config: Config) -> str:
    """The name by which peers reach this machine's KV."""
    return config.kv.host or config.worker.host


def announced_host_of(config: Config) -> str:
    """The host by which gateways call a worker that registers with them."""
    return config.worker.announced_host or config.worker.host


def roles_of(config: Config) -> tuple[WorkerRole, ...]:
    """The roles of the workers that the mode asks for."""
    return ("both",) if config.mode == "aggregated" else ("prefill", "decode")
