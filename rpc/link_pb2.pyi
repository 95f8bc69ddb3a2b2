from moonshard.rpc import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HandoffCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HANDOFF_CAUSE_UNSPECIFIED: _ClassVar[HandoffCause]
    HANDOFF_CAUSE_OVERLOADED: _ClassVar[HandoffCause]
    HANDOFF_CAUSE_CORRUPT: _ClassVar[HandoffCause]
    HANDOFF_CAUSE_WRITE_FAILED: _ClassVar[HandoffCause]
    HANDOFF_CAUSE_LEASE: _ClassVar[HandoffCause]
    HANDOFF_CAUSE_PREFILL_GONE: _ClassVar[HandoffCause]
    HANDOFF_CAUSE_DECODE_GONE: _ClassVar[HandoffCause]
    HANDOFF_CAUSE_CANCELLED: _ClassVar[HandoffCause]
HANDOFF_CAUSE_UNSPECIFIED: HandoffCause
HANDOFF_CAUSE_OVERLOADED: HandoffCause
HANDOFF_CAUSE_CORRUPT: HandoffCause
HANDOFF_CAUSE_WRITE_FAILED: HandoffCause
HANDOFF_CAUSE_LEASE: HandoffCause
HANDOFF_CAUSE_PREFILL_GONE: HandoffCause
HANDOFF_CAUSE_DECODE_GONE: HandoffCause
HANDOFF_CAUSE_CANCELLED: HandoffCause

class WorkerNotice(_message.Message):
    __slots__ = ("announcement", "renewal", "goodbye")
    ANNOUNCEMENT_FIELD_NUMBER: _ClassVar[int]
    RENEWAL_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    announcement: Announcement
    renewal: Renewal
    goodbye: Goodbye
    def __init__(self, announcement: _Optional[_Union[Announcement, _Mapping]] = ..., renewal: _Optional[_Union[Renewal, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class Announcement(_message.Message):
    __slots__ = ("address", "welcome")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    address: str
    welcome: Welcome
    def __init__(self, address: _Optional[str] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ...) -> None: ...

class Renewal(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease_s",)
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    def __init__(self, lease_s: _Optional[float] = ...) -> None: ...

class KvWrite(_message.Message):
    __slots__ = ("session", "address", "data")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    session: str
    address: int
    data: bytes
    def __init__(self, session: _Optional[str] = ..., address: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class KvWritten(_message.Message):
    __slots__ = ("num_bytes",)
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "gateway_epoch")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    gateway_epoch: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., gateway_epoch: _Optional[bytes] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("field", "message")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    field: str
    message: str
    def __init__(self, field: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class EngineSampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "bias_ids", "bias_values", "seed")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_ids: _containers.RepeatedScalarFieldContainer[int]
    bias_values: _containers.RepeatedScalarFieldContainer[float]
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., bias_ids: _Optional[_Iterable[int]] = ..., bias_values: _Optional[_Iterable[float]] = ..., seed: _Optional[int] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("request_id", "prompt_tokens", "sampling", "stop_token_ids", "max_tokens", "min_tokens", "n", "logprobs", "resumed", "partition", "target", "endpoint", "prefix_root", "block_names", "traceparent", "tracestate", "prompt_logprobs", "grammar", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_ROOT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NAMES_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    prompt_tokens: _containers.RepeatedScalarFieldContainer[int]
    sampling: EngineSampling
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    min_tokens: int
    n: int
    logprobs: int
    resumed: _containers.RepeatedCompositeFieldContainer[Resumed]
    partition: int
    target: Target
    endpoint: KvEndpoint
    prefix_root: bytes
    block_names: bytes
    traceparent: str
    tracestate: str
    prompt_logprobs: int
    grammar: str
    priority: int
    def __init__(self, request_id: _Optional[bytes] = ..., prompt_tokens: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[EngineSampling, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., n: _Optional[int] = ..., logprobs: _Optional[int] = ..., resumed: _Optional[_Iterable[_Union[Resumed, _Mapping]]] = ..., partition: _Optional[int] = ..., target: _Optional[_Union[Target, _Mapping]] = ..., endpoint: _Optional[_Union[KvEndpoint, _Mapping]] = ..., prefix_root: _Optional[bytes] = ..., block_names: _Optional[bytes] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class Resumed(_message.Message):
    __slots__ = ("choice", "token_ids")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, choice: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id", "target_epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    target_epoch: bytes
    def __init__(self, request_id: _Optional[bytes] = ..., target_epoch: _Optional[bytes] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("run", "writer_epoch", "lease_s")
    RUN_FIELD_NUMBER: _ClassVar[int]
    WRITER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    run: Run
    writer_epoch: bytes
    lease_s: float
    def __init__(self, run: _Optional[_Union[Run, _Mapping]] = ..., writer_epoch: _Optional[bytes] = ..., lease_s: _Optional[float] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("cell", "number")
    CELL_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    cell: int
    number: int
    def __init__(self, cell: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class Target(_message.Message):
    __slots__ = ("handoff", "epoch", "writer_epoch", "session", "partition", "num_blocks", "num_blocks_held", "grants", "lease_s", "queue_ms")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WRITER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_HELD_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    handoff: bytes
    epoch: bytes
    writer_epoch: bytes
    session: str
    partition: int
    num_blocks: int
    num_blocks_held: int
    grants: _containers.RepeatedCompositeFieldContainer[Grant]
    lease_s: float
    queue_ms: float
    def __init__(self, handoff: _Optional[bytes] = ..., epoch: _Optional[bytes] = ..., writer_epoch: _Optional[bytes] = ..., session: _Optional[str] = ..., partition: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_blocks_held: _Optional[int] = ..., grants: _Optional[_Iterable[_Union[Grant, _Mapping]]] = ..., lease_s: _Optional[float] = ..., queue_ms: _Optional[float] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("handoff", "writer_epoch", "target_epoch", "blocks", "grants", "checksums", "is_last", "phases", "pieces")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    WRITER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    handoff: bytes
    writer_epoch: bytes
    target_epoch: bytes
    blocks: _containers.RepeatedScalarFieldContainer[int]
    grants: _containers.RepeatedCompositeFieldContainer[Grant]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    is_last: bool
    phases: TransferPhases
    pieces: _containers.RepeatedCompositeFieldContainer[KvTile]
    def __init__(self, handoff: _Optional[bytes] = ..., writer_epoch: _Optional[bytes] = ..., target_epoch: _Optional[bytes] = ..., blocks: _Optional[_Iterable[int]] = ..., grants: _Optional[_Iterable[_Union[Grant, _Mapping]]] = ..., checksums: _Optional[_Iterable[int]] = ..., is_last: _Optional[bool] = ..., phases: _Optional[_Union[TransferPhases, _Mapping]] = ..., pieces: _Optional[_Iterable[_Union[KvTile, _Mapping]]] = ...) -> None: ...

class TransferPhases(_message.Message):
    __slots__ = ("transfer_ms", "exposed_ms")
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_MS_FIELD_NUMBER: _ClassVar[int]
    transfer_ms: float
    exposed_ms: float
    def __init__(self, transfer_ms: _Optional[float] = ..., exposed_ms: _Optional[float] = ...) -> None: ...

class Credits(_message.Message):
    __slots__ = ("handoff", "target_epoch", "grants")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    handoff: bytes
    target_epoch: bytes
    grants: _containers.RepeatedCompositeFieldContainer[Grant]
    def __init__(self, handoff: _Optional[bytes] = ..., target_epoch: _Optional[bytes] = ..., grants: _Optional[_Iterable[_Union[Grant, _Mapping]]] = ...) -> None: ...

class FirstTokens(_message.Message):
    __slots__ = ("handoff", "writer_epoch", "target_epoch", "outputs")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    WRITER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    handoff: bytes
    writer_epoch: bytes
    target_epoch: bytes
    outputs: _containers.RepeatedCompositeFieldContainer[SequenceOutput]
    def __init__(self, handoff: _Optional[bytes] = ..., writer_epoch: _Optional[bytes] = ..., target_epoch: _Optional[bytes] = ..., outputs: _Optional[_Iterable[_Union[SequenceOutput, _Mapping]]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("handoff", "token_ids", "last", "guesses")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    handoff: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    last: Manifest
    guesses: _containers.RepeatedCompositeFieldContainer[Guesses]
    def __init__(self, handoff: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., last: _Optional[_Union[Manifest, _Mapping]] = ..., guesses: _Optional[_Iterable[_Union[Guesses, _Mapping]]] = ...) -> None: ...

class Guesses(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Drained(_message.Message):
    __slots__ = ("handoff", "writer_epoch", "target_epoch")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    WRITER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    handoff: bytes
    writer_epoch: bytes
    target_epoch: bytes
    def __init__(self, handoff: _Optional[bytes] = ..., writer_epoch: _Optional[bytes] = ..., target_epoch: _Optional[bytes] = ...) -> None: ...

class KvEndpoint(_message.Message):
    __slots__ = ("transport", "session", "num_cells", "regions", "layout", "fingerprint")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NUM_CELLS_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    transport: str
    session: str
    num_cells: int
    regions: _containers.RepeatedCompositeFieldContainer[KvRegion]
    layout: KvLayout
    fingerprint: str
    def __init__(self, transport: _Optional[str] = ..., session: _Optional[str] = ..., num_cells: _Optional[int] = ..., regions: _Optional[_Iterable[_Union[KvRegion, _Mapping]]] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class KvRegion(_message.Message):
    __slots__ = ("owner", "address", "cell_bytes", "partition", "session")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CELL_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    owner: int
    address: int
    cell_bytes: int
    partition: int
    session: str
    def __init__(self, owner: _Optional[int] = ..., address: _Optional[int] = ..., cell_bytes: _Optional[int] = ..., partition: _Optional[int] = ..., session: _Optional[str] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("version", "groups")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    version: int
    groups: _containers.RepeatedCompositeFieldContainer[KvGroupLayout]
    def __init__(self, version: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[KvGroupLayout, _Mapping]]] = ...) -> None: ...

class KvGroupLayout(_message.Message):
    __slots__ = ("name", "dtype", "itemsize_bytes", "block_size", "num_layers", "num_features", "shards")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ITEMSIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_FEATURES_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    itemsize_bytes: int
    block_size: int
    num_layers: int
    num_features: int
    shards: _containers.RepeatedCompositeFieldContainer[KvShardLayout]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., itemsize_bytes: _Optional[int] = ..., block_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_features: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[KvShardLayout, _Mapping]]] = ...) -> None: ...

class KvShardLayout(_message.Message):
    __slots__ = ("owner", "tile")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TILE_FIELD_NUMBER: _ClassVar[int]
    owner: int
    tile: KvTile
    def __init__(self, owner: _Optional[int] = ..., tile: _Optional[_Union[KvTile, _Mapping]] = ...) -> None: ...

class KvTile(_message.Message):
    __slots__ = ("layer_start", "layer_stop", "token_start", "token_stop", "feature_start", "feature_stop")
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_STOP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_STOP_FIELD_NUMBER: _ClassVar[int]
    FEATURE_START_FIELD_NUMBER: _ClassVar[int]
    FEATURE_STOP_FIELD_NUMBER: _ClassVar[int]
    layer_start: int
    layer_stop: int
    token_start: int
    token_stop: int
    feature_start: int
    feature_stop: int
    def __init__(self, layer_start: _Optional[int] = ..., layer_stop: _Optional[int] = ..., token_start: _Optional[int] = ..., token_stop: _Optional[int] = ..., feature_start: _Optional[int] = ..., feature_stop: _Optional[int] = ...) -> None: ...

class GatewayMessage(_message.Message):
    __slots__ = ("hello", "run", "cancel", "refused", "reserve", "landed", "start", "credits", "drained", "tell_prefixes")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    LANDED_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    TELL_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    run: Run
    cancel: Cancel
    refused: Refused
    reserve: Reserve
    landed: Manifest
    start: Start
    credits: Credits
    drained: Drained
    tell_prefixes: TellPrefixes
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., run: _Optional[_Union[Run, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., landed: _Optional[_Union[Manifest, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., credits: _Optional[_Union[Credits, _Mapping]] = ..., drained: _Optional[_Union[Drained, _Mapping]] = ..., tell_prefixes: _Optional[_Union[TellPrefixes, _Mapping]] = ...) -> None: ...

class TellPrefixes(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "epoch", "fingerprint", "role", "dtype", "vocab_size", "max_context_tokens", "block_size", "num_partitions", "num_blocks", "max_slots", "load_s", "compile_s", "endpoint", "kernels", "num_processes")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_SLOTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    COMPILE_S_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROCESSES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    epoch: bytes
    fingerprint: str
    role: str
    dtype: str
    vocab_size: int
    max_context_tokens: int
    block_size: int
    num_partitions: int
    num_blocks: int
    max_slots: int
    load_s: float
    compile_s: float
    endpoint: KvEndpoint
    kernels: str
    num_processes: int
    def __init__(self, protocol_version: _Optional[int] = ..., epoch: _Optional[bytes] = ..., fingerprint: _Optional[str] = ..., role: _Optional[str] = ..., dtype: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., block_size: _Optional[int] = ..., num_partitions: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_slots: _Optional[int] = ..., load_s: _Optional[float] = ..., compile_s: _Optional[float] = ..., endpoint: _Optional[_Union[KvEndpoint, _Mapping]] = ..., kernels: _Optional[str] = ..., num_processes: _Optional[int] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("num_running", "num_waiting", "queued_tokens", "active_tokens", "free_blocks", "num_preemptions", "num_compilations", "num_compilations_while_serving", "num_prefill_steps", "num_decode_steps", "prefill_tokens", "decode_tokens", "wasted_tokens", "overlapped_steps", "peak_memory_bytes", "draining", "kv_transfer", "cached_tokens", "num_seen", "reserved_tokens", "num_lost_spans", "num_lost_rows", "num_drafts", "draft_tokens", "accepted_tokens", "accepted_per_position", "num_model_drafts", "model_accepted_tokens", "kv_store")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPILATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPILATIONS_WHILE_SERVING_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WASTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OVERLAPPED_STEPS_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEEN_FIELD_NUMBER: _ClassVar[int]
    RESERVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOST_SPANS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOST_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_MODEL_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_STORE_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    queued_tokens: _containers.RepeatedScalarFieldContainer[int]
    active_tokens: _containers.RepeatedScalarFieldContainer[int]
    free_blocks: _containers.RepeatedScalarFieldContainer[int]
    num_preemptions: int
    num_compilations: int
    num_compilations_while_serving: int
    num_prefill_steps: int
    num_decode_steps: int
    prefill_tokens: int
    decode_tokens: int
    wasted_tokens: int
    overlapped_steps: int
    peak_memory_bytes: int
    draining: bool
    kv_transfer: KvTransfer
    cached_tokens: int
    num_seen: int
    reserved_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_lost_spans: int
    num_lost_rows: int
    num_drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: _containers.RepeatedScalarFieldContainer[int]
    num_model_drafts: int
    model_accepted_tokens: int
    kv_store: KvStore
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., queued_tokens: _Optional[_Iterable[int]] = ..., active_tokens: _Optional[_Iterable[int]] = ..., free_blocks: _Optional[_Iterable[int]] = ..., num_preemptions: _Optional[int] = ..., num_compilations: _Optional[int] = ..., num_compilations_while_serving: _Optional[int] = ..., num_prefill_steps: _Optional[int] = ..., num_decode_steps: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., decode_tokens: _Optional[int] = ..., wasted_tokens: _Optional[int] = ..., overlapped_steps: _Optional[int] = ..., peak_memory_bytes: _Optional[int] = ..., draining: _Optional[bool] = ..., kv_transfer: _Optional[_Union[KvTransfer, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., num_seen: _Optional[int] = ..., reserved_tokens: _Optional[_Iterable[int]] = ..., num_lost_spans: _Optional[int] = ..., num_lost_rows: _Optional[int] = ..., num_drafts: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., accepted_per_position: _Optional[_Iterable[int]] = ..., num_model_drafts: _Optional[int] = ..., model_accepted_tokens: _Optional[int] = ..., kv_store: _Optional[_Union[KvStore, _Mapping]] = ...) -> None: ...

class KvStore(_message.Message):
    __slots__ = ("tiers", "num_late_fetches", "num_queued_blocks", "num_aside_blocks", "num_dropped_blocks", "num_lost_blocks", "own_fetch_share", "shared_fetch_share")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    NUM_LATE_FETCHES_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_ASIDE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OWN_FETCH_SHARE_FIELD_NUMBER: _ClassVar[int]
    SHARED_FETCH_SHARE_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[KvTier]
    num_late_fetches: int
    num_queued_blocks: int
    num_aside_blocks: int
    num_dropped_blocks: int
    num_lost_blocks: int
    own_fetch_share: float
    shared_fetch_share: float
    def __init__(self, tiers: _Optional[_Iterable[_Union[KvTier, _Mapping]]] = ..., num_late_fetches: _Optional[int] = ..., num_queued_blocks: _Optional[int] = ..., num_aside_blocks: _Optional[int] = ..., num_dropped_blocks: _Optional[int] = ..., num_lost_blocks: _Optional[int] = ..., own_fetch_share: _Optional[float] = ..., shared_fetch_share: _Optional[float] = ...) -> None: ...

class KvTier(_message.Message):
    __slots__ = ("name", "num_hits", "num_misses", "num_kept", "num_not_kept", "num_evicted", "read_bytes", "written_bytes", "held_bytes", "is_up")
    class NumMissesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_MISSES_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_FIELD_NUMBER: _ClassVar[int]
    NUM_NOT_KEPT_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTED_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_UP_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_hits: int
    num_misses: _containers.ScalarMap[str, int]
    num_kept: int
    num_not_kept: int
    num_evicted: int
    read_bytes: int
    written_bytes: int
    held_bytes: int
    is_up: bool
    def __init__(self, name: _Optional[str] = ..., num_hits: _Optional[int] = ..., num_misses: _Optional[_Mapping[str, int]] = ..., num_kept: _Optional[int] = ..., num_not_kept: _Optional[int] = ..., num_evicted: _Optional[int] = ..., read_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ..., held_bytes: _Optional[int] = ..., is_up: _Optional[bool] = ...) -> None: ...

class KvTransfer(_message.Message):
    __slots__ = ("num_handoffs", "published_bytes", "num_transfers", "publish_s", "num_failures", "landed_bytes", "num_landed_blocks", "num_checksum_mismatches", "free_slab_slots", "used_slab_slots", "leased_slab_slots", "quarantined_slab_slots", "total_slab_slots")
    class NumFailuresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_S_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILURES_FIELD_NUMBER: _ClassVar[int]
    LANDED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_LANDED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHECKSUM_MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    FREE_SLAB_SLOTS_FIELD_NUMBER: _ClassVar[int]
    USED_SLAB_SLOTS_FIELD_NUMBER: _ClassVar[int]
    LEASED_SLAB_SLOTS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_SLAB_SLOTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SLAB_SLOTS_FIELD_NUMBER: _ClassVar[int]
    num_handoffs: int
    published_bytes: int
    num_transfers: int
    publish_s: float
    num_failures: _containers.ScalarMap[str, int]
    landed_bytes: int
    num_landed_blocks: int
    num_checksum_mismatches: int
    free_slab_slots: int
    used_slab_slots: int
    leased_slab_slots: int
    quarantined_slab_slots: int
    total_slab_slots: int
    def __init__(self, num_handoffs: _Optional[int] = ..., published_bytes: _Optional[int] = ..., num_transfers: _Optional[int] = ..., publish_s: _Optional[float] = ..., num_failures: _Optional[_Mapping[str, int]] = ..., landed_bytes: _Optional[int] = ..., num_landed_blocks: _Optional[int] = ..., num_checksum_mismatches: _Optional[int] = ..., free_slab_slots: _Optional[int] = ..., used_slab_slots: _Optional[int] = ..., leased_slab_slots: _Optional[int] = ..., quarantined_slab_slots: _Optional[int] = ..., total_slab_slots: _Optional[int] = ...) -> None: ...

class WorkerPhases(_message.Message):
    __slots__ = ("queue_ms", "prefill_ms", "decode_ms", "land_ms", "join_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    LAND_MS_FIELD_NUMBER: _ClassVar[int]
    JOIN_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    land_ms: float
    join_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ..., land_ms: _Optional[float] = ..., join_ms: _Optional[float] = ...) -> None: ...

class SequenceOutput(_message.Message):
    __slots__ = ("request_id", "choice", "token_ids", "logprobs", "finish_reason", "phases", "cached_tokens", "prompt_logprobs", "guesses", "cached_by_tier")
    class CachedByTierEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    CACHED_BY_TIER_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    choice: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.PositionLogprobs]
    finish_reason: _inference_pb2.FinishReason
    phases: WorkerPhases
    cached_tokens: int
    prompt_logprobs: _inference_pb2.PromptLogprobs
    guesses: _containers.RepeatedScalarFieldContainer[int]
    cached_by_tier: _containers.ScalarMap[str, int]
    def __init__(self, request_id: _Optional[bytes] = ..., choice: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.PositionLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., phases: _Optional[_Union[WorkerPhases, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[_inference_pb2.PromptLogprobs, _Mapping]] = ..., guesses: _Optional[_Iterable[int]] = ..., cached_by_tier: _Optional[_Mapping[str, int]] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("step", "outputs", "load")
    STEP_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    step: int
    outputs: _containers.RepeatedCompositeFieldContainer[SequenceOutput]
    load: WorkerLoad
    def __init__(self, step: _Optional[int] = ..., outputs: _Optional[_Iterable[_Union[SequenceOutput, _Mapping]]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("request_id", "code", "message", "field", "retry_after_s", "cause")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    code: int
    message: str
    field: str
    retry_after_s: float
    cause: HandoffCause
    def __init__(self, request_id: _Optional[bytes] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., cause: _Optional[_Union[HandoffCause, str]] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("welcome", "step", "failed", "load", "target", "credits", "chunk", "first_tokens", "drained", "prefix_snapshot", "prefix_events")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_EVENTS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    step: StepOutput
    failed: Failed
    load: WorkerLoad
    target: Target
    credits: Credits
    chunk: Manifest
    first_tokens: FirstTokens
    drained: Drained
    prefix_snapshot: PrefixSnapshot
    prefix_events: PrefixEvents
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., step: _Optional[_Union[StepOutput, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., target: _Optional[_Union[Target, _Mapping]] = ..., credits: _Optional[_Union[Credits, _Mapping]] = ..., chunk: _Optional[_Union[Manifest, _Mapping]] = ..., first_tokens: _Optional[_Union[FirstTokens, _Mapping]] = ..., drained: _Optional[_Union[Drained, _Mapping]] = ..., prefix_snapshot: _Optional[_Union[PrefixSnapshot, _Mapping]] = ..., prefix_events: _Optional[_Union[PrefixEvents, _Mapping]] = ...) -> None: ...

class PrefixSnapshot(_message.Message):
    __slots__ = ("goes_on", "has_more", "next_number", "names")
    GOES_ON_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    NEXT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    goes_on: bool
    has_more: bool
    next_number: int
    names: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, goes_on: _Optional[bool] = ..., has_more: _Optional[bool] = ..., next_number: _Optional[int] = ..., names: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PrefixEvents(_message.Message):
    __slots__ = ("first_number", "names", "partitions", "is_known")
    FIRST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    IS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    first_number: int
    names: bytes
    partitions: _containers.RepeatedScalarFieldContainer[int]
    is_known: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, first_number: _Optional[int] = ..., names: _Optional[bytes] = ..., partitions: _Optional[_Iterable[int]] = ..., is_known: _Optional[_Iterable[bool]] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PartitionState(_message.Message):
    __slots__ = ("free_blocks", "used_blocks", "leased_blocks", "quarantined_blocks", "total_blocks", "free_slots", "total_slots")
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SLOTS_FIELD_NUMBER: _ClassVar[int]
    free_blocks: int
    used_blocks: int
    leased_blocks: int
    quarantined_blocks: int
    total_blocks: int
    free_slots: int
    total_slots: int
    def __init__(self, free_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., free_slots: _Optional[int] = ..., total_slots: _Optional[int] = ...) -> None: ...

class Inspection(_message.Message):
    __slots__ = ("epoch", "partitions", "load")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    epoch: bytes
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionState]
    load: WorkerLoad
    def __init__(self, epoch: _Optional[bytes] = ..., partitions: _Optional[_Iterable[_Union[PartitionState, _Mapping]]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ...) -> None: ...

class FollowerMessage(_message.Message):
    __slots__ = ("hello", "ready", "done", "beat", "fault", "answer", "tier_answer", "leaving")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    TIER_ANSWER_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    hello: FollowerHello
    ready: FollowerReady
    done: FollowerDone
    beat: FollowerBeat
    fault: FollowerFault
    answer: FollowerAnswer
    tier_answer: TierAnswer
    leaving: FollowerLeaving
    def __init__(self, hello: _Optional[_Union[FollowerHello, _Mapping]] = ..., ready: _Optional[_Union[FollowerReady, _Mapping]] = ..., done: _Optional[_Union[FollowerDone, _Mapping]] = ..., beat: _Optional[_Union[FollowerBeat, _Mapping]] = ..., fault: _Optional[_Union[FollowerFault, _Mapping]] = ..., answer: _Optional[_Union[FollowerAnswer, _Mapping]] = ..., tier_answer: _Optional[_Union[TierAnswer, _Mapping]] = ..., leaving: _Optional[_Union[FollowerLeaving, _Mapping]] = ...) -> None: ...

class FollowerHello(_message.Message):
    __slots__ = ("protocol_version", "member", "made_of")
    class MadeOfEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    MADE_OF_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    member: int
    made_of: _containers.ScalarMap[str, str]
    def __init__(self, protocol_version: _Optional[int] = ..., member: _Optional[int] = ..., made_of: _Optional[_Mapping[str, str]] = ...) -> None: ...

class FollowerReady(_message.Message):
    __slots__ = ("session", "regions", "tiers", "loaded_as")
    class LoadedAsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    LOADED_AS_FIELD_NUMBER: _ClassVar[int]
    session: str
    regions: _containers.RepeatedCompositeFieldContainer[KvRegion]
    tiers: _containers.RepeatedCompositeFieldContainer[TierKind]
    loaded_as: _containers.ScalarMap[str, str]
    def __init__(self, session: _Optional[str] = ..., regions: _Optional[_Iterable[_Union[KvRegion, _Mapping]]] = ..., tiers: _Optional[_Iterable[_Union[TierKind, _Mapping]]] = ..., loaded_as: _Optional[_Mapping[str, str]] = ...) -> None: ...

class TierKind(_message.Message):
    __slots__ = ("name", "is_shared")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IS_SHARED_FIELD_NUMBER: _ClassVar[int]
    name: str
    is_shared: bool
    def __init__(self, name: _Optional[str] = ..., is_shared: _Optional[bool] = ...) -> None: ...

class FollowerDone(_message.Message):
    __slots__ = ("number", "drawn")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DRAWN_FIELD_NUMBER: _ClassVar[int]
    number: int
    drawn: bytes
    def __init__(self, number: _Optional[int] = ..., drawn: _Optional[bytes] = ...) -> None: ...

class FollowerBeat(_message.Message):
    __slots__ = ("tiers",)
    TIERS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[KvTier]
    def __init__(self, tiers: _Optional[_Iterable[_Union[KvTier, _Mapping]]] = ...) -> None: ...

class FollowerLeaving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FollowerFault(_message.Message):
    __slots__ = ("message", "is_startup")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    IS_STARTUP_FIELD_NUMBER: _ClassVar[int]
    message: str
    is_startup: bool
    def __init__(self, message: _Optional[str] = ..., is_startup: _Optional[bool] = ...) -> None: ...

class FollowerAnswer(_message.Message):
    __slots__ = ("number", "staged", "published", "unpublished", "copied", "mismatch")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    UNPUBLISHED_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    MISMATCH_FIELD_NUMBER: _ClassVar[int]
    number: int
    staged: KvStaged
    published: KvPublished
    unpublished: KvUnpublished
    copied: KvCopied
    mismatch: KvMismatch
    def __init__(self, number: _Optional[int] = ..., staged: _Optional[_Union[KvStaged, _Mapping]] = ..., published: _Optional[_Union[KvPublished, _Mapping]] = ..., unpublished: _Optional[_Union[KvUnpublished, _Mapping]] = ..., copied: _Optional[_Union[KvCopied, _Mapping]] = ..., mismatch: _Optional[_Union[KvMismatch, _Mapping]] = ...) -> None: ...

class KvStaged(_message.Message):
    __slots__ = ("checksums",)
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class KvPublished(_message.Message):
    __slots__ = ("num_bytes", "num_transfers", "duration_s")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    num_transfers: int
    duration_s: float
    def __init__(self, num_bytes: _Optional[int] = ..., num_transfers: _Optional[int] = ..., duration_s: _Optional[float] = ...) -> None: ...

class KvUnpublished(_message.Message):
    __slots__ = ("cause", "detail", "may_still_land")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    MAY_STILL_LAND_FIELD_NUMBER: _ClassVar[int]
    cause: str
    detail: str
    may_still_land: bool
    def __init__(self, cause: _Optional[str] = ..., detail: _Optional[str] = ..., may_still_land: _Optional[bool] = ...) -> None: ...

class KvCopied(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KvMismatch(_message.Message):
    __slots__ = ("detail",)
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    detail: str
    def __init__(self, detail: _Optional[str] = ...) -> None: ...

class LeaderMessage(_message.Message):
    __slots__ = ("welcome", "step", "beat", "end", "order", "tier_order", "masks")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    TIER_ORDER_FIELD_NUMBER: _ClassVar[int]
    MASKS_FIELD_NUMBER: _ClassVar[int]
    welcome: GangWelcome
    step: GangStep
    beat: GangBeat
    end: GangEnd
    order: GangOrder
    tier_order: TierOrder
    masks: GangMasks
    def __init__(self, welcome: _Optional[_Union[GangWelcome, _Mapping]] = ..., step: _Optional[_Union[GangStep, _Mapping]] = ..., beat: _Optional[_Union[GangBeat, _Mapping]] = ..., end: _Optional[_Union[GangEnd, _Mapping]] = ..., order: _Optional[_Union[GangOrder, _Mapping]] = ..., tier_order: _Optional[_Union[TierOrder, _Mapping]] = ..., masks: _Optional[_Union[GangMasks, _Mapping]] = ...) -> None: ...

class GangWelcome(_message.Message):
    __slots__ = ("coordinator",)
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    coordinator: str
    def __init__(self, coordinator: _Optional[str] = ...) -> None: ...

class GangBeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GangEnd(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GangStep(_message.Message):
    __slots__ = ("sequence", "digest", "number", "kind", "bucket", "metadata", "sampling", "scoring", "guessing", "is_masked", "num_ahead", "partition", "num_blocks", "ticket")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SCORING_FIELD_NUMBER: _ClassVar[int]
    GUESSING_FIELD_NUMBER: _ClassVar[int]
    IS_MASKED_FIELD_NUMBER: _ClassVar[int]
    NUM_AHEAD_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    digest: bytes
    number: int
    kind: str
    bucket: int
    metadata: bytes
    sampling: bytes
    scoring: bytes
    guessing: bytes
    is_masked: bool
    num_ahead: int
    partition: int
    num_blocks: int
    ticket: int
    def __init__(self, sequence: _Optional[int] = ..., digest: _Optional[bytes] = ..., number: _Optional[int] = ..., kind: _Optional[str] = ..., bucket: _Optional[int] = ..., metadata: _Optional[bytes] = ..., sampling: _Optional[bytes] = ..., scoring: _Optional[bytes] = ..., guessing: _Optional[bytes] = ..., is_masked: _Optional[bool] = ..., num_ahead: _Optional[int] = ..., partition: _Optional[int] = ..., num_blocks: _Optional[int] = ..., ticket: _Optional[int] = ...) -> None: ...

class GangMasks(_message.Message):
    __slots__ = ("sequence", "digest", "num_rows", "rows", "allowed")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    digest: bytes
    num_rows: int
    rows: _containers.RepeatedScalarFieldContainer[int]
    allowed: bytes
    def __init__(self, sequence: _Optional[int] = ..., digest: _Optional[bytes] = ..., num_rows: _Optional[int] = ..., rows: _Optional[_Iterable[int]] = ..., allowed: _Optional[bytes] = ...) -> None: ...

class GangOrder(_message.Message):
    __slots__ = ("number", "stage", "publish", "copy_out", "clear", "drop")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    COPY_OUT_FIELD_NUMBER: _ClassVar[int]
    CLEAR_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    number: int
    stage: KvStage
    publish: KvPublish
    copy_out: KvCopyOut
    clear: KvClear
    drop: KvDrop
    def __init__(self, number: _Optional[int] = ..., stage: _Optional[_Union[KvStage, _Mapping]] = ..., publish: _Optional[_Union[KvPublish, _Mapping]] = ..., copy_out: _Optional[_Union[KvCopyOut, _Mapping]] = ..., clear: _Optional[_Union[KvClear, _Mapping]] = ..., drop: _Optional[_Union[KvDrop, _Mapping]] = ...) -> None: ...

class KvStage(_message.Message):
    __slots__ = ("ticket", "partition", "cells", "pieces")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    partition: int
    cells: _containers.RepeatedScalarFieldContainer[int]
    pieces: _containers.RepeatedCompositeFieldContainer[KvTile]
    def __init__(self, ticket: _Optional[int] = ..., partition: _Optional[int] = ..., cells: _Optional[_Iterable[int]] = ..., pieces: _Optional[_Iterable[_Union[KvTile, _Mapping]]] = ...) -> None: ...

class KvPublish(_message.Message):
    __slots__ = ("partition", "cells", "endpoint", "to_partition", "to_cells")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TO_PARTITION_FIELD_NUMBER: _ClassVar[int]
    TO_CELLS_FIELD_NUMBER: _ClassVar[int]
    partition: int
    cells: _containers.RepeatedScalarFieldContainer[int]
    endpoint: KvEndpoint
    to_partition: int
    to_cells: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, partition: _Optional[int] = ..., cells: _Optional[_Iterable[int]] = ..., endpoint: _Optional[_Union[KvEndpoint, _Mapping]] = ..., to_partition: _Optional[int] = ..., to_cells: _Optional[_Iterable[int]] = ...) -> None: ...

class KvCopyOut(_message.Message):
    __slots__ = ("ticket", "partition", "cells", "checksums", "pieces")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    partition: int
    cells: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    pieces: _containers.RepeatedCompositeFieldContainer[KvTile]
    def __init__(self, ticket: _Optional[int] = ..., partition: _Optional[int] = ..., cells: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ..., pieces: _Optional[_Iterable[_Union[KvTile, _Mapping]]] = ...) -> None: ...

class KvClear(_message.Message):
    __slots__ = ("partition", "cells")
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    partition: int
    cells: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, partition: _Optional[int] = ..., cells: _Optional[_Iterable[int]] = ...) -> None: ...

class KvDrop(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    def __init__(self, ticket: _Optional[int] = ...) -> None: ...

class TierOrder(_message.Message):
    __slots__ = ("number", "find", "fetch", "land", "forget", "give_up", "lacking", "renew", "keep", "held", "upkeep")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FIND_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    LAND_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    GIVE_UP_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    UPKEEP_FIELD_NUMBER: _ClassVar[int]
    number: int
    find: TierChain
    fetch: TierFetch
    land: TierLand
    forget: TierForget
    give_up: TierForget
    lacking: TierLacking
    renew: TierChain
    keep: TierPiece
    held: TierHeld
    upkeep: TierUpkeep
    def __init__(self, number: _Optional[int] = ..., find: _Optional[_Union[TierChain, _Mapping]] = ..., fetch: _Optional[_Union[TierFetch, _Mapping]] = ..., land: _Optional[_Union[TierLand, _Mapping]] = ..., forget: _Optional[_Union[TierForget, _Mapping]] = ..., give_up: _Optional[_Union[TierForget, _Mapping]] = ..., lacking: _Optional[_Union[TierLacking, _Mapping]] = ..., renew: _Optional[_Union[TierChain, _Mapping]] = ..., keep: _Optional[_Union[TierPiece, _Mapping]] = ..., held: _Optional[_Union[TierHeld, _Mapping]] = ..., upkeep: _Optional[_Union[TierUpkeep, _Mapping]] = ...) -> None: ...

class TierChain(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: bytes
    def __init__(self, names: _Optional[bytes] = ...) -> None: ...

class TierFetch(_message.Message):
    __slots__ = ("ticket", "names", "tiers")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    names: bytes
    tiers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ticket: _Optional[int] = ..., names: _Optional[bytes] = ..., tiers: _Optional[_Iterable[str]] = ...) -> None: ...

class TierLand(_message.Message):
    __slots__ = ("ticket", "first", "num_blocks")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    first: int
    num_blocks: int
    def __init__(self, ticket: _Optional[int] = ..., first: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class TierForget(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    def __init__(self, ticket: _Optional[int] = ...) -> None: ...

class TierLacking(_message.Message):
    __slots__ = ("chains", "only")
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    ONLY_FIELD_NUMBER: _ClassVar[int]
    chains: _containers.RepeatedScalarFieldContainer[bytes]
    only: str
    def __init__(self, chains: _Optional[_Iterable[bytes]] = ..., only: _Optional[str] = ...) -> None: ...

class TierPiece(_message.Message):
    __slots__ = ("ticket", "partition", "names", "parents", "again_for")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FOR_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    partition: int
    names: bytes
    parents: _containers.RepeatedScalarFieldContainer[bytes]
    again_for: str
    def __init__(self, ticket: _Optional[int] = ..., partition: _Optional[int] = ..., names: _Optional[bytes] = ..., parents: _Optional[_Iterable[bytes]] = ..., again_for: _Optional[str] = ...) -> None: ...

class TierHeld(_message.Message):
    __slots__ = ("first",)
    FIRST_FIELD_NUMBER: _ClassVar[int]
    first: int
    def __init__(self, first: _Optional[int] = ...) -> None: ...

class TierUpkeep(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TierAnswer(_message.Message):
    __slots__ = ("number", "found", "came", "lacking", "names")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    CAME_FIELD_NUMBER: _ClassVar[int]
    LACKING_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    number: int
    found: TierFound
    came: TierCame
    lacking: TierChain
    names: TierNames
    def __init__(self, number: _Optional[int] = ..., found: _Optional[_Union[TierFound, _Mapping]] = ..., came: _Optional[_Union[TierCame, _Mapping]] = ..., lacking: _Optional[_Union[TierChain, _Mapping]] = ..., names: _Optional[_Union[TierNames, _Mapping]] = ...) -> None: ...

class TierFound(_message.Message):
    __slots__ = ("tiers",)
    TIERS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tiers: _Optional[_Iterable[str]] = ...) -> None: ...

class TierCame(_message.Message):
    __slots__ = ("num_blocks", "runs")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    runs: _containers.RepeatedCompositeFieldContainer[TierRun]
    def __init__(self, num_blocks: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[TierRun, _Mapping]]] = ...) -> None: ...

class TierRun(_message.Message):
    __slots__ = ("tier", "num_asked", "num_blocks", "seconds")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_ASKED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    num_asked: int
    num_blocks: int
    seconds: float
    def __init__(self, tier: _Optional[str] = ..., num_asked: _Optional[int] = ..., num_blocks: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class TierNames(_message.Message):
    __slots__ = ("by_tier",)
    class ByTierEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    BY_TIER_FIELD_NUMBER: _ClassVar[int]
    by_tier: _containers.ScalarMap[str, bytes]
    def __init__(self, by_tier: _Optional[_Mapping[str, bytes]] = ...) -> None: ...
