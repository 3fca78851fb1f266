from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor
DTYPE_BF16: DType
DTYPE_FP16: DType
DTYPE_FP32: DType
DTYPE_FP8_E4M3: DType
DTYPE_FP8_E5M2: DType
DTYPE_Q4_0: DType
DTYPE_Q8_0: DType
DTYPE_UNSPECIFIED: DType
LAYER_KIND_FULL: LayerKind
LAYER_KIND_MLA: LayerKind
LAYER_KIND_SLIDING_WINDOW: LayerKind
LAYER_KIND_UNSPECIFIED: LayerKind
RETENTION_ALL: Retention
RETENTION_UNSPECIFIED: Retention
RETENTION_WINDOW: Retention
ROPE_STATE_AFTER: RopeState
ROPE_STATE_BEFORE: RopeState
ROPE_STATE_UNSPECIFIED: RopeState

class FormatPolicy(_message.Message):
    __slots__ = ["kv_cache_dtype", "kv_cache_dtype_skip_layers", "retention"]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_SKIP_LAYERS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    kv_cache_dtype: str
    kv_cache_dtype_skip_layers: _containers.RepeatedScalarFieldContainer[str]
    retention: Retention
    def __init__(self, kv_cache_dtype: _Optional[str] = ..., kv_cache_dtype_skip_layers: _Optional[_Iterable[str]] = ..., retention: _Optional[_Union[Retention, str]] = ...) -> None: ...

class LayerScales(_message.Message):
    __slots__ = ["k_scale", "layer", "q_scale", "v_scale"]
    K_SCALE_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    Q_SCALE_FIELD_NUMBER: _ClassVar[int]
    V_SCALE_FIELD_NUMBER: _ClassVar[int]
    k_scale: _containers.RepeatedScalarFieldContainer[float]
    layer: int
    q_scale: _containers.RepeatedScalarFieldContainer[float]
    v_scale: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, layer: _Optional[int] = ..., k_scale: _Optional[_Iterable[float]] = ..., v_scale: _Optional[_Iterable[float]] = ..., q_scale: _Optional[_Iterable[float]] = ...) -> None: ...

class LayerSpec(_message.Message):
    __slots__ = ["k_head_dim", "kind", "kv_heads", "v_head_dim", "window"]
    KIND_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    K_HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    V_HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    k_head_dim: int
    kind: LayerKind
    kv_heads: int
    v_head_dim: int
    window: int
    def __init__(self, kind: _Optional[_Union[LayerKind, str]] = ..., window: _Optional[int] = ..., kv_heads: _Optional[int] = ..., k_head_dim: _Optional[int] = ..., v_head_dim: _Optional[int] = ...) -> None: ...

class ModelSpec(_message.Message):
    __slots__ = ["hash_block_tokens", "k_rope", "layers", "name", "revision", "source_dtype"]
    HASH_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    K_ROPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    hash_block_tokens: int
    k_rope: RopeState
    layers: _containers.RepeatedCompositeFieldContainer[LayerSpec]
    name: str
    revision: str
    source_dtype: DType
    def __init__(self, name: _Optional[str] = ..., revision: _Optional[str] = ..., source_dtype: _Optional[_Union[DType, str]] = ..., k_rope: _Optional[_Union[RopeState, str]] = ..., hash_block_tokens: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerSpec, _Mapping]]] = ...) -> None: ...

class RegisterModelRequest(_message.Message):
    __slots__ = ["max_tokens", "page_tokens", "policy", "scales", "scales_source", "spec"]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    SCALES_SOURCE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    page_tokens: int
    policy: FormatPolicy
    scales: _containers.RepeatedCompositeFieldContainer[LayerScales]
    scales_source: str
    spec: ModelSpec
    def __init__(self, spec: _Optional[_Union[ModelSpec, _Mapping]] = ..., policy: _Optional[_Union[FormatPolicy, _Mapping]] = ..., page_tokens: _Optional[int] = ..., scales: _Optional[_Iterable[_Union[LayerScales, _Mapping]]] = ..., scales_source: _Optional[str] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class RegisterModelResponse(_message.Message):
    __slots__ = ["boot_id", "capacity_line", "capacity_tokens", "kv_cache_dtype", "max_message_bytes", "model_id", "notices", "page_tokens", "scales_line"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_LINE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SCALES_LINE_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    capacity_line: str
    capacity_tokens: int
    kv_cache_dtype: str
    max_message_bytes: int
    model_id: str
    notices: _containers.RepeatedScalarFieldContainer[str]
    page_tokens: int
    scales_line: str
    def __init__(self, boot_id: _Optional[str] = ..., model_id: _Optional[str] = ..., page_tokens: _Optional[int] = ..., kv_cache_dtype: _Optional[str] = ..., capacity_line: _Optional[str] = ..., scales_line: _Optional[str] = ..., notices: _Optional[_Iterable[str]] = ..., max_message_bytes: _Optional[int] = ..., capacity_tokens: _Optional[int] = ...) -> None: ...

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class LayerKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class RopeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []

class Retention(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []
