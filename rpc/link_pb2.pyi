from moonshard.rpc import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("protocol_version", "gateway_epoch")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    gateway_epoch: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., gateway_epoch: _Optional[bytes] = ...) -> None: ...

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
    __slots__ = ("request_id", "prompt_tokens", "sampling", "stop_token_ids", "max_tokens", "min_tokens", "n", "logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    prompt_tokens: _containers.RepeatedScalarFieldContainer[int]
    sampling: EngineSampling
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    min_tokens: int
    n: int
    logprobs: int
    def __init__(self, request_id: _Optional[bytes] = ..., prompt_tokens: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[EngineSampling, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., n: _Optional[int] = ..., logprobs: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    def __init__(self, request_id: _Optional[bytes] = ...) -> None: ...

class GatewayMessage(_message.Message):
    __slots__ = ("hello", "run", "cancel")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    run: Run
    cancel: Cancel
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., run: _Optional[_Union[Run, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "epoch", "fingerprint", "role", "dtype", "vocab_size", "max_context_tokens", "block_size", "num_partitions", "num_blocks", "max_slots", "load_s", "compile_s")
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
    def __init__(self, protocol_version: _Optional[int] = ..., epoch: _Optional[bytes] = ..., fingerprint: _Optional[str] = ..., role: _Optional[str] = ..., dtype: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., block_size: _Optional[int] = ..., num_partitions: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_slots: _Optional[int] = ..., load_s: _Optional[float] = ..., compile_s: _Optional[float] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("num_running", "num_waiting", "queued_tokens", "active_tokens", "free_blocks", "num_preemptions", "num_compilations", "num_compilations_while_serving", "num_prefill_steps", "num_decode_steps", "prefill_tokens", "decode_tokens", "wasted_tokens", "overlapped_steps", "peak_memory_bytes", "draining")
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
    num_running: int
    num_waiting: int
    queued_tokens: int
    active_tokens: int
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
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., active_tokens: _Optional[int] = ..., free_blocks: _Optional[_Iterable[int]] = ..., num_preemptions: _Optional[int] = ..., num_compilations: _Optional[int] = ..., num_compilations_while_serving: _Optional[int] = ..., num_prefill_steps: _Optional[int] = ..., num_decode_steps: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., decode_tokens: _Optional[int] = ..., wasted_tokens: _Optional[int] = ..., overlapped_steps: _Optional[int] = ..., peak_memory_bytes: _Optional[int] = ..., draining: _Optional[bool] = ...) -> None: ...

class WorkerPhases(_message.Message):
    __slots__ = ("queue_ms", "prefill_ms", "decode_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ...) -> None: ...

class SequenceOutput(_message.Message):
    __slots__ = ("request_id", "choice", "token_ids", "logprobs", "finish_reason", "phases", "cached_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    choice: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.PositionLogprobs]
    finish_reason: _inference_pb2.FinishReason
    phases: WorkerPhases
    cached_tokens: int
    def __init__(self, request_id: _Optional[bytes] = ..., choice: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_inference_pb2.PositionLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., phases: _Optional[_Union[WorkerPhases, _Mapping]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("request_id", "code", "message", "field", "retry_after_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    code: int
    message: str
    field: str
    retry_after_s: float
    def __init__(self, request_id: _Optional[bytes] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("welcome", "step", "failed", "load")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    step: StepOutput
    failed: Failed
    load: WorkerLoad
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., step: _Optional[_Union[StepOutput, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ...) -> None: ...

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
