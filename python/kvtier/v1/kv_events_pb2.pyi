from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AllBlocksCleared(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class BlockEvent(_message.Message):
    __slots__ = ["all_blocks_cleared", "block_removed", "block_stored"]
    ALL_BLOCKS_CLEARED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_REMOVED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STORED_FIELD_NUMBER: _ClassVar[int]
    all_blocks_cleared: AllBlocksCleared
    block_removed: BlockRemoved
    block_stored: BlockStored
    def __init__(self, block_stored: _Optional[_Union[BlockStored, _Mapping]] = ..., block_removed: _Optional[_Union[BlockRemoved, _Mapping]] = ..., all_blocks_cleared: _Optional[_Union[AllBlocksCleared, _Mapping]] = ...) -> None: ...

class BlockRemoved(_message.Message):
    __slots__ = ["block_hashes", "medium"]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    medium: str
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ..., medium: _Optional[str] = ...) -> None: ...

class BlockStored(_message.Message):
    __slots__ = ["block_hashes", "block_size", "engine_block_hashes", "extra_keys", "lora_name", "medium", "model_id", "parent_block_hash", "token_ids"]
    class ExtraKeysEntry(_message.Message):
        __slots__ = ["key", "value"]
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: bytes
        def __init__(self, key: _Optional[int] = ..., value: _Optional[bytes] = ...) -> None: ...
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    block_size: int
    engine_block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    extra_keys: _containers.ScalarMap[int, bytes]
    lora_name: str
    medium: str
    model_id: str
    parent_block_hash: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model_id: _Optional[str] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., parent_block_hash: _Optional[bytes] = ..., block_size: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., engine_block_hashes: _Optional[_Iterable[bytes]] = ..., lora_name: _Optional[str] = ..., extra_keys: _Optional[_Mapping[int, bytes]] = ..., medium: _Optional[str] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ["log_id", "namespace", "number"]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    log_id: int
    namespace: str
    number: int
    def __init__(self, namespace: _Optional[str] = ..., log_id: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class SubscribeResponse(_message.Message):
    __slots__ = ["boot_id", "events", "log_id", "number"]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOG_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    events: _containers.RepeatedCompositeFieldContainer[BlockEvent]
    log_id: int
    number: int
    def __init__(self, boot_id: _Optional[str] = ..., log_id: _Optional[int] = ..., number: _Optional[int] = ..., events: _Optional[_Iterable[_Union[BlockEvent, _Mapping]]] = ...) -> None: ...
