from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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
    __slots__ = ["chunks", "read_id", "transport_id"]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    READ_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_ID_FIELD_NUMBER: _ClassVar[int]
    chunks: int
    read_id: int
    transport_id: bytes
    def __init__(self, transport_id: _Optional[bytes] = ..., read_id: _Optional[int] = ..., chunks: _Optional[int] = ...) -> None: ...

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

class OpenTransportRequest(_message.Message):
    __slots__ = ["shm"]
    SHM_FIELD_NUMBER: _ClassVar[int]
    shm: ShmTransport
    def __init__(self, shm: _Optional[_Union[ShmTransport, _Mapping]] = ...) -> None: ...

class OpenTransportResponse(_message.Message):
    __slots__ = ["boot_id", "shm_socket", "transport_id"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SHM_SOCKET_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    shm_socket: str
    transport_id: bytes
    def __init__(self, boot_id: _Optional[str] = ..., transport_id: _Optional[bytes] = ..., shm_socket: _Optional[str] = ...) -> None: ...

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
