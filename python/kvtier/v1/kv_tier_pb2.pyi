from kvtier.v1 import kv_events_pb2 as _kv_events_pb2
from kvtier.v1 import model_pb2 as _model_pb2
from kvtier.v1 import transport_pb2 as _transport_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

from kvtier.v1.model_pb2 import LayerSpec
from kvtier.v1.model_pb2 import ModelSpec
from kvtier.v1.model_pb2 import FormatPolicy
from kvtier.v1.model_pb2 import LayerScales
from kvtier.v1.model_pb2 import RegisterModelRequest
from kvtier.v1.model_pb2 import RegisterModelResponse
from kvtier.v1.model_pb2 import DType
from kvtier.v1.model_pb2 import LayerKind
from kvtier.v1.model_pb2 import RopeState
from kvtier.v1.model_pb2 import Retention
from kvtier.v1.transport_pb2 import OpenTransportRequest
from kvtier.v1.transport_pb2 import ShmTransport
from kvtier.v1.transport_pb2 import NcclTransport
from kvtier.v1.transport_pb2 import OpenTransportResponse
from kvtier.v1.transport_pb2 import CloseTransportRequest
from kvtier.v1.transport_pb2 import CloseTransportResponse
from kvtier.v1.transport_pb2 import ReadTarget
from kvtier.v1.transport_pb2 import LayerBlocks
from kvtier.v1.transport_pb2 import GrantCreditRequest
from kvtier.v1.transport_pb2 import GrantCreditResponse
from kvtier.v1.transport_pb2 import Direction
DESCRIPTOR: _descriptor.FileDescriptor
DIRECTION_APPEND: _transport_pb2.Direction
DIRECTION_READ: _transport_pb2.Direction
DIRECTION_UNSPECIFIED: _transport_pb2.Direction
DTYPE_BF16: _model_pb2.DType
DTYPE_FP16: _model_pb2.DType
DTYPE_FP32: _model_pb2.DType
DTYPE_FP8_E4M3: _model_pb2.DType
DTYPE_FP8_E5M2: _model_pb2.DType
DTYPE_Q4_0: _model_pb2.DType
DTYPE_Q8_0: _model_pb2.DType
DTYPE_UNSPECIFIED: _model_pb2.DType
LAYER_KIND_FULL: _model_pb2.LayerKind
LAYER_KIND_MLA: _model_pb2.LayerKind
LAYER_KIND_SLIDING_WINDOW: _model_pb2.LayerKind
LAYER_KIND_UNSPECIFIED: _model_pb2.LayerKind
LAYOUT_HND: Layout
LAYOUT_NHD: Layout
LAYOUT_UNSPECIFIED: Layout
NON_FINITE_POLICY_REFUSE: NonFinitePolicy
NON_FINITE_POLICY_SATURATE: NonFinitePolicy
NON_FINITE_POLICY_UNSPECIFIED: NonFinitePolicy
PIN_KIND_HARD: PinKind
PIN_KIND_SOFT: PinKind
PIN_KIND_UNSPECIFIED: PinKind
PRESSURE_EVICT: Pressure
PRESSURE_LADDER: Pressure
PRESSURE_UNSPECIFIED: Pressure
READ_AS_BF16: ReadAs
READ_AS_FP16: ReadAs
READ_AS_FP32: ReadAs
READ_AS_FP8_E4M3: ReadAs
READ_AS_FP8_E5M2: ReadAs
READ_AS_SOURCE: ReadAs
READ_AS_STORED: ReadAs
READ_AS_UNSPECIFIED: ReadAs
RETENTION_ALL: _model_pb2.Retention
RETENTION_UNSPECIFIED: _model_pb2.Retention
RETENTION_WINDOW: _model_pb2.Retention
ROPE_STATE_AFTER: _model_pb2.RopeState
ROPE_STATE_BEFORE: _model_pb2.RopeState
ROPE_STATE_UNSPECIFIED: _model_pb2.RopeState
SEQUENCE_STATE_OPEN: SequenceState
SEQUENCE_STATE_SEALED: SequenceState
SEQUENCE_STATE_UNSPECIFIED: SequenceState

class AbortRequest(_message.Message):
    __slots__ = ["namespace", "sequence"]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    sequence: str
    def __init__(self, namespace: _Optional[str] = ..., sequence: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ["boot_id"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    def __init__(self, boot_id: _Optional[str] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ["duration_ms", "model_id", "namespace", "prompt", "sequence"]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    duration_ms: int
    model_id: str
    namespace: str
    prompt: Prompt
    sequence: str
    def __init__(self, namespace: _Optional[str] = ..., model_id: _Optional[str] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., sequence: _Optional[str] = ..., duration_ms: _Optional[int] = ...) -> None: ...

class AcquireResponse(_message.Message):
    __slots__ = ["boot_id", "duration_ms", "lease_id", "tokens"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    duration_ms: int
    lease_id: int
    tokens: int
    def __init__(self, boot_id: _Optional[str] = ..., lease_id: _Optional[int] = ..., tokens: _Optional[int] = ..., duration_ms: _Optional[int] = ...) -> None: ...

class AppendBatchRequest(_message.Message):
    __slots__ = ["entries", "namespace"]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[AppendEntry]
    namespace: str
    def __init__(self, namespace: _Optional[str] = ..., entries: _Optional[_Iterable[_Union[AppendEntry, _Mapping]]] = ...) -> None: ...

class AppendBatchResponse(_message.Message):
    __slots__ = ["boot_id", "outcomes"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    outcomes: _containers.RepeatedCompositeFieldContainer[AppendOutcome]
    def __init__(self, boot_id: _Optional[str] = ..., outcomes: _Optional[_Iterable[_Union[AppendOutcome, _Mapping]]] = ...) -> None: ...

class AppendChunk(_message.Message):
    __slots__ = ["first_layer", "first_token", "k", "k_offset", "k_parts", "num_layers", "num_tokens", "transfer", "v", "v_offset", "v_parts"]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    K_OFFSET_FIELD_NUMBER: _ClassVar[int]
    K_PARTS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    V_OFFSET_FIELD_NUMBER: _ClassVar[int]
    V_PARTS_FIELD_NUMBER: _ClassVar[int]
    first_layer: int
    first_token: int
    k: bytes
    k_offset: int
    k_parts: _containers.RepeatedCompositeFieldContainer[StoredPart]
    num_layers: int
    num_tokens: int
    transfer: int
    v: bytes
    v_offset: int
    v_parts: _containers.RepeatedCompositeFieldContainer[StoredPart]
    def __init__(self, first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., k: _Optional[bytes] = ..., v: _Optional[bytes] = ..., k_parts: _Optional[_Iterable[_Union[StoredPart, _Mapping]]] = ..., v_parts: _Optional[_Iterable[_Union[StoredPart, _Mapping]]] = ..., k_offset: _Optional[int] = ..., v_offset: _Optional[int] = ..., transfer: _Optional[int] = ...) -> None: ...

class AppendEntry(_message.Message):
    __slots__ = ["chunks", "open"]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[AppendChunk]
    open: AppendOpen
    def __init__(self, open: _Optional[_Union[AppendOpen, _Mapping]] = ..., chunks: _Optional[_Iterable[_Union[AppendChunk, _Mapping]]] = ...) -> None: ...

class AppendOpen(_message.Message):
    __slots__ = ["first_head", "first_layer", "fused_kv", "layout", "model_id", "namespace", "non_finite", "num_heads", "num_layers", "prompt", "sequence", "transport_id", "writer_epoch"]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    FUSED_KV_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NON_FINITE_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_ID_FIELD_NUMBER: _ClassVar[int]
    WRITER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    first_head: int
    first_layer: int
    fused_kv: bool
    layout: Layout
    model_id: str
    namespace: str
    non_finite: NonFinitePolicy
    num_heads: int
    num_layers: int
    prompt: Prompt
    sequence: str
    transport_id: bytes
    writer_epoch: int
    def __init__(self, namespace: _Optional[str] = ..., sequence: _Optional[str] = ..., model_id: _Optional[str] = ..., first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., first_head: _Optional[int] = ..., num_heads: _Optional[int] = ..., layout: _Optional[_Union[Layout, str]] = ..., fused_kv: bool = ..., writer_epoch: _Optional[int] = ..., non_finite: _Optional[_Union[NonFinitePolicy, str]] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., transport_id: _Optional[bytes] = ...) -> None: ...

class AppendOutcome(_message.Message):
    __slots__ = ["ack", "code", "message", "reason"]
    ACK_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ack: AppendResponse
    code: int
    message: str
    reason: str
    def __init__(self, ack: _Optional[_Union[AppendResponse, _Mapping]] = ..., code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class AppendRequest(_message.Message):
    __slots__ = ["chunk", "open"]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    chunk: AppendChunk
    open: AppendOpen
    def __init__(self, open: _Optional[_Union[AppendOpen, _Mapping]] = ..., chunk: _Optional[_Union[AppendChunk, _Mapping]] = ...) -> None: ...

class AppendResponse(_message.Message):
    __slots__ = ["boot_id", "chunks", "committed_tokens", "received_tokens", "residual_origin", "saturated_values", "skipped_tokens"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_ORIGIN_FIELD_NUMBER: _ClassVar[int]
    SATURATED_VALUES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    chunks: int
    committed_tokens: int
    received_tokens: int
    residual_origin: int
    saturated_values: int
    skipped_tokens: int
    def __init__(self, boot_id: _Optional[str] = ..., received_tokens: _Optional[int] = ..., committed_tokens: _Optional[int] = ..., skipped_tokens: _Optional[int] = ..., saturated_values: _Optional[int] = ..., chunks: _Optional[int] = ..., residual_origin: _Optional[int] = ...) -> None: ...

class CapacityRequest(_message.Message):
    __slots__ = ["kv_cache_dtype", "model_id"]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    kv_cache_dtype: str
    model_id: str
    def __init__(self, model_id: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ...) -> None: ...

class CapacityResponse(_message.Message):
    __slots__ = ["boot_id", "budget_bytes", "compression_ratio", "memory", "models", "sequences", "tokens_held"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_RATIO_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_HELD_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    budget_bytes: int
    compression_ratio: float
    memory: MemoryParts
    models: _containers.RepeatedCompositeFieldContainer[ModelCapacity]
    sequences: int
    tokens_held: int
    def __init__(self, boot_id: _Optional[str] = ..., budget_bytes: _Optional[int] = ..., memory: _Optional[_Union[MemoryParts, _Mapping]] = ..., sequences: _Optional[int] = ..., tokens_held: _Optional[int] = ..., compression_ratio: _Optional[float] = ..., models: _Optional[_Iterable[_Union[ModelCapacity, _Mapping]]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ["namespace", "sequence"]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    sequence: str
    def __init__(self, namespace: _Optional[str] = ..., sequence: _Optional[str] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ["boot_id", "info", "layers", "page_tokens", "spec"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    info: SequenceInfo
    layers: _containers.RepeatedCompositeFieldContainer[LayerInfo]
    page_tokens: int
    spec: _model_pb2.ModelSpec
    def __init__(self, boot_id: _Optional[str] = ..., info: _Optional[_Union[SequenceInfo, _Mapping]] = ..., spec: _Optional[_Union[_model_pb2.ModelSpec, _Mapping]] = ..., page_tokens: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerInfo, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ["boot_id"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    def __init__(self, boot_id: _Optional[str] = ...) -> None: ...

class ExtraKey(_message.Message):
    __slots__ = ["block", "key"]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    block: int
    key: bytes
    def __init__(self, block: _Optional[int] = ..., key: _Optional[bytes] = ...) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ["namespace", "new_sequence", "sequence", "tokens"]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NEW_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    new_sequence: str
    sequence: str
    tokens: int
    def __init__(self, namespace: _Optional[str] = ..., sequence: _Optional[str] = ..., new_sequence: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class ForkResponse(_message.Message):
    __slots__ = ["boot_id", "tokens"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    tokens: int
    def __init__(self, boot_id: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class GetQuotaRequest(_message.Message):
    __slots__ = ["namespace"]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    def __init__(self, namespace: _Optional[str] = ...) -> None: ...

class GetQuotaResponse(_message.Message):
    __slots__ = ["boot_id", "held_bytes", "pressure", "quota_bytes"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    held_bytes: int
    pressure: Pressure
    quota_bytes: int
    def __init__(self, boot_id: _Optional[str] = ..., quota_bytes: _Optional[int] = ..., held_bytes: _Optional[int] = ..., pressure: _Optional[_Union[Pressure, str]] = ...) -> None: ...

class LayerInfo(_message.Message):
    __slots__ = ["k_code_tokens", "k_saturated_values", "kv_cache_dtype", "layer", "received_tokens", "v_code_tokens", "v_saturated_values"]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    K_CODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    K_SATURATED_VALUES_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    V_CODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    V_SATURATED_VALUES_FIELD_NUMBER: _ClassVar[int]
    k_code_tokens: int
    k_saturated_values: int
    kv_cache_dtype: str
    layer: int
    received_tokens: int
    v_code_tokens: int
    v_saturated_values: int
    def __init__(self, layer: _Optional[int] = ..., kv_cache_dtype: _Optional[str] = ..., received_tokens: _Optional[int] = ..., k_code_tokens: _Optional[int] = ..., v_code_tokens: _Optional[int] = ..., k_saturated_values: _Optional[int] = ..., v_saturated_values: _Optional[int] = ...) -> None: ...

class LayerManifest(_message.Message):
    __slots__ = ["dtype", "first_token", "k_code_tokens", "k_head_dim", "k_offset", "k_scale", "kv_cache_dtype", "kv_heads", "layer", "num_heads", "q_scale", "v_code_tokens", "v_head_dim", "v_offset", "v_scale"]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    K_CODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    K_HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    K_OFFSET_FIELD_NUMBER: _ClassVar[int]
    K_SCALE_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    Q_SCALE_FIELD_NUMBER: _ClassVar[int]
    V_CODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    V_HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    V_OFFSET_FIELD_NUMBER: _ClassVar[int]
    V_SCALE_FIELD_NUMBER: _ClassVar[int]
    dtype: _model_pb2.DType
    first_token: int
    k_code_tokens: int
    k_head_dim: int
    k_offset: int
    k_scale: _containers.RepeatedScalarFieldContainer[float]
    kv_cache_dtype: str
    kv_heads: int
    layer: int
    num_heads: int
    q_scale: _containers.RepeatedScalarFieldContainer[float]
    v_code_tokens: int
    v_head_dim: int
    v_offset: int
    v_scale: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, layer: _Optional[int] = ..., num_heads: _Optional[int] = ..., k_head_dim: _Optional[int] = ..., v_head_dim: _Optional[int] = ..., dtype: _Optional[_Union[_model_pb2.DType, str]] = ..., k_scale: _Optional[_Iterable[float]] = ..., v_scale: _Optional[_Iterable[float]] = ..., k_code_tokens: _Optional[int] = ..., v_code_tokens: _Optional[int] = ..., q_scale: _Optional[_Iterable[float]] = ..., kv_cache_dtype: _Optional[str] = ..., kv_heads: _Optional[int] = ..., first_token: _Optional[int] = ..., k_offset: _Optional[int] = ..., v_offset: _Optional[int] = ...) -> None: ...

class LayerObservation(_message.Message):
    __slots__ = ["k_amax", "k_scale", "kv_cache_dtype", "layer", "q_scale", "tokens", "v_amax", "v_scale"]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    K_AMAX_FIELD_NUMBER: _ClassVar[int]
    K_SCALE_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    Q_SCALE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    V_AMAX_FIELD_NUMBER: _ClassVar[int]
    V_SCALE_FIELD_NUMBER: _ClassVar[int]
    k_amax: _containers.RepeatedScalarFieldContainer[float]
    k_scale: _containers.RepeatedScalarFieldContainer[float]
    kv_cache_dtype: str
    layer: int
    q_scale: _containers.RepeatedScalarFieldContainer[float]
    tokens: int
    v_amax: _containers.RepeatedScalarFieldContainer[float]
    v_scale: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, layer: _Optional[int] = ..., kv_cache_dtype: _Optional[str] = ..., k_scale: _Optional[_Iterable[float]] = ..., v_scale: _Optional[_Iterable[float]] = ..., q_scale: _Optional[_Iterable[float]] = ..., k_amax: _Optional[_Iterable[float]] = ..., v_amax: _Optional[_Iterable[float]] = ..., tokens: _Optional[int] = ...) -> None: ...

class ListSequencesRequest(_message.Message):
    __slots__ = ["namespace", "page_size", "page_token"]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    page_size: int
    page_token: str
    def __init__(self, namespace: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListSequencesResponse(_message.Message):
    __slots__ = ["boot_id", "next_page_token", "sequences"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    next_page_token: str
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceInfo]
    def __init__(self, boot_id: _Optional[str] = ..., sequences: _Optional[_Iterable[_Union[SequenceInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ["model_id", "namespace", "prompts"]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    namespace: str
    prompts: _containers.RepeatedCompositeFieldContainer[Prompt]
    def __init__(self, namespace: _Optional[str] = ..., model_id: _Optional[str] = ..., prompts: _Optional[_Iterable[_Union[Prompt, _Mapping]]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ["boot_id", "tokens"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, boot_id: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class LoweredPages(_message.Message):
    __slots__ = ["kv_cache_dtype", "pages"]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    kv_cache_dtype: str
    pages: int
    def __init__(self, kv_cache_dtype: _Optional[str] = ..., pages: _Optional[int] = ...) -> None: ...

class MemoryParts(_message.Message):
    __slots__ = ["codes", "free", "header", "residual", "scales", "slack", "staging"]
    CODES_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    SLACK_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    codes: int
    free: int
    header: int
    residual: int
    scales: int
    slack: int
    staging: int
    def __init__(self, codes: _Optional[int] = ..., scales: _Optional[int] = ..., residual: _Optional[int] = ..., header: _Optional[int] = ..., slack: _Optional[int] = ..., staging: _Optional[int] = ..., free: _Optional[int] = ...) -> None: ...

class ModelCapacity(_message.Message):
    __slots__ = ["bytes_per_token", "compression_ratio", "kv_cache_dtype", "layers", "mean_tokens", "model_id", "more_sequences", "more_tokens", "name", "planned_compression_ratio", "sequences", "source_bytes", "stored_bytes", "tokens_held", "unit_scale_layers"]
    BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_RATIO_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MEAN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    MORE_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MORE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PLANNED_COMPRESSION_RATIO_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_HELD_FIELD_NUMBER: _ClassVar[int]
    UNIT_SCALE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    bytes_per_token: float
    compression_ratio: float
    kv_cache_dtype: str
    layers: int
    mean_tokens: int
    model_id: str
    more_sequences: int
    more_tokens: int
    name: str
    planned_compression_ratio: float
    sequences: int
    source_bytes: int
    stored_bytes: int
    tokens_held: int
    unit_scale_layers: int
    def __init__(self, model_id: _Optional[str] = ..., name: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ..., sequences: _Optional[int] = ..., tokens_held: _Optional[int] = ..., source_bytes: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., compression_ratio: _Optional[float] = ..., more_tokens: _Optional[int] = ..., more_sequences: _Optional[int] = ..., mean_tokens: _Optional[int] = ..., layers: _Optional[int] = ..., unit_scale_layers: _Optional[int] = ..., bytes_per_token: _Optional[float] = ..., planned_compression_ratio: _Optional[float] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ["duration_ms", "kind", "model_id", "namespace", "prompt", "sequence"]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    duration_ms: int
    kind: PinKind
    model_id: str
    namespace: str
    prompt: Prompt
    sequence: str
    def __init__(self, namespace: _Optional[str] = ..., model_id: _Optional[str] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., sequence: _Optional[str] = ..., kind: _Optional[_Union[PinKind, str]] = ..., duration_ms: _Optional[int] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ["boot_id", "duration_ms", "pin_id", "tokens"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    duration_ms: int
    pin_id: int
    tokens: int
    def __init__(self, boot_id: _Optional[str] = ..., pin_id: _Optional[int] = ..., tokens: _Optional[int] = ..., duration_ms: _Optional[int] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ["adapter", "block_hashes", "extra_keys", "salt", "token_ids"]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    extra_keys: _containers.RepeatedCompositeFieldContainer[ExtraKey]
    salt: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, salt: _Optional[bytes] = ..., adapter: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., extra_keys: _Optional[_Iterable[_Union[ExtraKey, _Mapping]]] = ...) -> None: ...

class ReadChunk(_message.Message):
    __slots__ = ["first_token", "k", "k_offset", "k_parts", "layer", "num_tokens", "sequence_index", "transfer", "transfer_bytes", "v", "v_offset", "v_parts"]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    K_OFFSET_FIELD_NUMBER: _ClassVar[int]
    K_PARTS_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    V_OFFSET_FIELD_NUMBER: _ClassVar[int]
    V_PARTS_FIELD_NUMBER: _ClassVar[int]
    first_token: int
    k: bytes
    k_offset: int
    k_parts: _containers.RepeatedCompositeFieldContainer[StoredPart]
    layer: int
    num_tokens: int
    sequence_index: int
    transfer: int
    transfer_bytes: int
    v: bytes
    v_offset: int
    v_parts: _containers.RepeatedCompositeFieldContainer[StoredPart]
    def __init__(self, sequence_index: _Optional[int] = ..., layer: _Optional[int] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., k: _Optional[bytes] = ..., v: _Optional[bytes] = ..., k_parts: _Optional[_Iterable[_Union[StoredPart, _Mapping]]] = ..., v_parts: _Optional[_Iterable[_Union[StoredPart, _Mapping]]] = ..., k_offset: _Optional[int] = ..., v_offset: _Optional[int] = ..., transfer: _Optional[int] = ..., transfer_bytes: _Optional[int] = ...) -> None: ...

class ReadManifest(_message.Message):
    __slots__ = ["boot_id", "sequences", "total_bytes"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceManifest]
    total_bytes: int
    def __init__(self, boot_id: _Optional[str] = ..., sequences: _Optional[_Iterable[_Union[SequenceManifest, _Mapping]]] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ["accept_k_rotation", "block_tokens", "first_head", "first_layer", "follow", "k_scale", "layout", "measure_scales", "namespace", "num_heads", "num_layers", "per_tensor_scales_only", "sequences", "target", "v_scale", "within_windows"]
    ACCEPT_K_ROTATION_FIELD_NUMBER: _ClassVar[int]
    AS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    K_SCALE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MEASURE_SCALES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    PER_TENSOR_SCALES_ONLY_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    V_SCALE_FIELD_NUMBER: _ClassVar[int]
    WITHIN_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    accept_k_rotation: bool
    block_tokens: int
    first_head: int
    first_layer: int
    follow: bool
    k_scale: float
    layout: Layout
    measure_scales: bool
    namespace: str
    num_heads: int
    num_layers: int
    per_tensor_scales_only: bool
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceRange]
    target: _transport_pb2.ReadTarget
    v_scale: float
    within_windows: bool
    def __init__(self, namespace: _Optional[str] = ..., sequences: _Optional[_Iterable[_Union[SequenceRange, _Mapping]]] = ..., first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., first_head: _Optional[int] = ..., num_heads: _Optional[int] = ..., layout: _Optional[_Union[Layout, str]] = ..., block_tokens: _Optional[int] = ..., k_scale: _Optional[float] = ..., v_scale: _Optional[float] = ..., per_tensor_scales_only: bool = ..., measure_scales: bool = ..., accept_k_rotation: bool = ..., follow: bool = ..., within_windows: bool = ..., target: _Optional[_Union[_transport_pb2.ReadTarget, _Mapping]] = ..., **kwargs) -> None: ...

class ReadResponse(_message.Message):
    __slots__ = ["chunk", "manifest", "summary"]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    chunk: ReadChunk
    manifest: ReadManifest
    summary: ReadSummary
    def __init__(self, manifest: _Optional[_Union[ReadManifest, _Mapping]] = ..., chunk: _Optional[_Union[ReadChunk, _Mapping]] = ..., summary: _Optional[_Union[ReadSummary, _Mapping]] = ...) -> None: ...

class ReadSummary(_message.Message):
    __slots__ = ["saturated_values", "tokens"]
    SATURATED_VALUES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    saturated_values: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, saturated_values: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ["lease_id", "namespace"]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    namespace: str
    def __init__(self, namespace: _Optional[str] = ..., lease_id: _Optional[int] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ["boot_id"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    def __init__(self, boot_id: _Optional[str] = ...) -> None: ...

class RemoveRequest(_message.Message):
    __slots__ = ["namespace", "sequence"]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    sequence: str
    def __init__(self, namespace: _Optional[str] = ..., sequence: _Optional[str] = ...) -> None: ...

class RemoveResponse(_message.Message):
    __slots__ = ["boot_id"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    def __init__(self, boot_id: _Optional[str] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ["duration_ms", "lease_id", "namespace"]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    duration_ms: int
    lease_id: int
    namespace: str
    def __init__(self, namespace: _Optional[str] = ..., lease_id: _Optional[int] = ..., duration_ms: _Optional[int] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ["boot_id", "duration_ms"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    duration_ms: int
    def __init__(self, boot_id: _Optional[str] = ..., duration_ms: _Optional[int] = ...) -> None: ...

class ScalesRequest(_message.Message):
    __slots__ = ["model_id"]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    def __init__(self, model_id: _Optional[str] = ...) -> None: ...

class ScalesResponse(_message.Message):
    __slots__ = ["boot_id", "kv_cache_dtype", "layers", "model_id", "name"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    kv_cache_dtype: str
    layers: _containers.RepeatedCompositeFieldContainer[LayerObservation]
    model_id: str
    name: str
    def __init__(self, boot_id: _Optional[str] = ..., model_id: _Optional[str] = ..., name: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ..., layers: _Optional[_Iterable[_Union[LayerObservation, _Mapping]]] = ...) -> None: ...

class SealRequest(_message.Message):
    __slots__ = ["namespace", "sequence", "tokens"]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    sequence: str
    tokens: int
    def __init__(self, namespace: _Optional[str] = ..., sequence: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class SealResponse(_message.Message):
    __slots__ = ["boot_id", "tokens"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    tokens: int
    def __init__(self, boot_id: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class SequenceInfo(_message.Message):
    __slots__ = ["committed_tokens", "evicted_tokens", "kv_cache_dtype", "lowered", "memory", "model_id", "saturated_values", "sequence", "source_bytes", "state"]
    COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    LOWERED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SATURATED_VALUES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    committed_tokens: int
    evicted_tokens: int
    kv_cache_dtype: str
    lowered: _containers.RepeatedCompositeFieldContainer[LoweredPages]
    memory: MemoryParts
    model_id: str
    saturated_values: int
    sequence: str
    source_bytes: int
    state: SequenceState
    def __init__(self, sequence: _Optional[str] = ..., model_id: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ..., state: _Optional[_Union[SequenceState, str]] = ..., committed_tokens: _Optional[int] = ..., memory: _Optional[_Union[MemoryParts, _Mapping]] = ..., source_bytes: _Optional[int] = ..., saturated_values: _Optional[int] = ..., evicted_tokens: _Optional[int] = ..., lowered: _Optional[_Iterable[_Union[LoweredPages, _Mapping]]] = ...) -> None: ...

class SequenceManifest(_message.Message):
    __slots__ = ["committed_tokens", "first_head", "first_token", "k_rope", "layers", "model_id", "num_tokens", "page_tokens", "sealed", "sequence"]
    COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    K_ROPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    committed_tokens: int
    first_head: int
    first_token: int
    k_rope: _model_pb2.RopeState
    layers: _containers.RepeatedCompositeFieldContainer[LayerManifest]
    model_id: str
    num_tokens: int
    page_tokens: int
    sealed: bool
    sequence: str
    def __init__(self, sequence: _Optional[str] = ..., model_id: _Optional[str] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., committed_tokens: _Optional[int] = ..., sealed: bool = ..., first_head: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerManifest, _Mapping]]] = ..., page_tokens: _Optional[int] = ..., k_rope: _Optional[_Union[_model_pb2.RopeState, str]] = ...) -> None: ...

class SequenceRange(_message.Message):
    __slots__ = ["block_ids", "first_token", "lease_id", "model_id", "num_tokens", "sequence"]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    first_token: int
    lease_id: int
    model_id: str
    num_tokens: int
    sequence: str
    def __init__(self, sequence: _Optional[str] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., model_id: _Optional[str] = ..., lease_id: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SetPressureRequest(_message.Message):
    __slots__ = ["namespace", "pressure"]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    pressure: Pressure
    def __init__(self, namespace: _Optional[str] = ..., pressure: _Optional[_Union[Pressure, str]] = ...) -> None: ...

class SetPressureResponse(_message.Message):
    __slots__ = ["boot_id", "ladder"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    LADDER_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    ladder: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, boot_id: _Optional[str] = ..., ladder: _Optional[_Iterable[str]] = ...) -> None: ...

class SetQuotaRequest(_message.Message):
    __slots__ = ["namespace", "quota_bytes"]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    quota_bytes: int
    def __init__(self, namespace: _Optional[str] = ..., quota_bytes: _Optional[int] = ...) -> None: ...

class SetQuotaResponse(_message.Message):
    __slots__ = ["boot_id", "held_bytes", "quota_bytes"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    held_bytes: int
    quota_bytes: int
    def __init__(self, boot_id: _Optional[str] = ..., quota_bytes: _Optional[int] = ..., held_bytes: _Optional[int] = ...) -> None: ...

class StoredPart(_message.Message):
    __slots__ = ["data", "offset", "page", "tokens"]
    DATA_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    offset: int
    page: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, page: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., offset: _Optional[int] = ...) -> None: ...

class TruncateRequest(_message.Message):
    __slots__ = ["namespace", "sequence", "tokens", "writer_epoch"]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WRITER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    sequence: str
    tokens: int
    writer_epoch: int
    def __init__(self, namespace: _Optional[str] = ..., sequence: _Optional[str] = ..., tokens: _Optional[int] = ..., writer_epoch: _Optional[int] = ...) -> None: ...

class TruncateResponse(_message.Message):
    __slots__ = ["boot_id", "tokens"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    tokens: int
    def __init__(self, boot_id: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ["namespace", "pin_id"]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    pin_id: int
    def __init__(self, namespace: _Optional[str] = ..., pin_id: _Optional[int] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ["boot_id"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    def __init__(self, boot_id: _Optional[str] = ...) -> None: ...

class Layout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class NonFinitePolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class PinKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class ReadAs(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class SequenceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class Pressure(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []
