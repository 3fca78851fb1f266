from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor
DIRECTION_APPEND: Direction
DIRECTION_READ: Direction
DIRECTION_UNSPECIFIED: Direction

class CloseTransportRequest(_message.Message):
    __slots__ = ["transport_id"]
    TRANSPORT_ID_FIELD_NUMBER: _ClassVar[int]
    transport_id: bytes
    def __init__(self, transport_id: _Optional[bytes] = ...) -> None: ...

class CloseTransportResponse(_message.Message):
    __slots__ = ["boot_id"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    def __init__(self, boot_id: _Optional[str] = ...) -> None: ...

class GrantCreditRequest(_message.Message):
    __slots__ = ["chunks", "read_id", "transfers", "transport_id"]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    READ_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_ID_FIELD_NUMBER: _ClassVar[int]
    chunks: int
    read_id: int
    transfers: int
    transport_id: bytes
    def __init__(self, transport_id: _Optional[bytes] = ..., read_id: _Optional[int] = ..., chunks: _Optional[int] = ..., transfers: _Optional[int] = ...) -> None: ...

class GrantCreditResponse(_message.Message):
    __slots__ = ["boot_id"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    def __init__(self, boot_id: _Optional[str] = ...) -> None: ...

class LayerBlocks(_message.Message):
    __slots__ = ["k_block_stride", "k_offset", "v_block_stride", "v_offset"]
    K_BLOCK_STRIDE_FIELD_NUMBER: _ClassVar[int]
    K_OFFSET_FIELD_NUMBER: _ClassVar[int]
    V_BLOCK_STRIDE_FIELD_NUMBER: _ClassVar[int]
    V_OFFSET_FIELD_NUMBER: _ClassVar[int]
    k_block_stride: int
    k_offset: int
    v_block_stride: int
    v_offset: int
    def __init__(self, k_offset: _Optional[int] = ..., v_offset: _Optional[int] = ..., k_block_stride: _Optional[int] = ..., v_block_stride: _Optional[int] = ...) -> None: ...

class NcclTransport(_message.Message):
    __slots__ = ["direction", "gpu", "nccl_version", "unique_id"]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    NCCL_VERSION_FIELD_NUMBER: _ClassVar[int]
    UNIQUE_ID_FIELD_NUMBER: _ClassVar[int]
    direction: Direction
    gpu: str
    nccl_version: int
    unique_id: bytes
    def __init__(self, direction: _Optional[_Union[Direction, str]] = ..., unique_id: _Optional[bytes] = ..., nccl_version: _Optional[int] = ..., gpu: _Optional[str] = ...) -> None: ...

class OpenTransportRequest(_message.Message):
    __slots__ = ["nccl", "shm"]
    NCCL_FIELD_NUMBER: _ClassVar[int]
    SHM_FIELD_NUMBER: _ClassVar[int]
    nccl: NcclTransport
    shm: ShmTransport
    def __init__(self, shm: _Optional[_Union[ShmTransport, _Mapping]] = ..., nccl: _Optional[_Union[NcclTransport, _Mapping]] = ...) -> None: ...

class OpenTransportResponse(_message.Message):
    __slots__ = ["boot_id", "max_transfer_bytes", "memory_bytes", "shm_socket", "transport_id"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHM_SOCKET_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    max_transfer_bytes: int
    memory_bytes: int
    shm_socket: str
    transport_id: bytes
    def __init__(self, boot_id: _Optional[str] = ..., transport_id: _Optional[bytes] = ..., shm_socket: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., max_transfer_bytes: _Optional[int] = ...) -> None: ...

class ReadTarget(_message.Message):
    __slots__ = ["bytes", "layers", "offset", "read_id", "ring", "transport_id"]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    READ_ID_FIELD_NUMBER: _ClassVar[int]
    RING_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_ID_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    layers: _containers.RepeatedCompositeFieldContainer[LayerBlocks]
    offset: int
    read_id: int
    ring: bool
    transport_id: bytes
    def __init__(self, transport_id: _Optional[bytes] = ..., offset: _Optional[int] = ..., bytes: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[LayerBlocks, _Mapping]]] = ..., ring: bool = ..., read_id: _Optional[int] = ...) -> None: ...

class ShmTransport(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class Direction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = []
