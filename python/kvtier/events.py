"""KV events: which hash blocks of a namespace can be found by lookup, as they come and go."""

import dataclasses

import grpc

from kvtier.errors import from_rpc_error
from kvtier.v1 import kv_events_pb2 as pb

@dataclasses.dataclass(frozen=True)
class Position:
    """How far a subscriber has come: pass it to Client.subscribe to be told only what came since."""

    log_id: int = 0
    number: int = 0

    def to_proto(self, namespace):
        return pb.SubscribeRequest(namespace=namespace, log_id=self.log_id, number=self.number)


@dataclasses.dataclass(frozen=True)
class BlockStored:
    """Blocks that follow one another can be found from now on. Fields as in vLLM's event of this name.

    block_hashes: prefix keys, 32 bytes each; parent_block_hash: of the block before the first, None where that begins a
    prompt; token_ids: block_size a block, empty where the prompt came as hashes, which are engine_block_hashes then;
    extra_keys: {index in block_hashes: bytes}.
    """

    model_id: str
    block_hashes: tuple
    parent_block_hash: bytes | None
    token_ids: tuple
    block_size: int
    lora_name: str | None
    medium: str
    extra_keys: dict
    engine_block_hashes: tuple

    @classmethod
    def from_proto(cls, event):
        return cls(
            model_id=event.model_id,
            block_hashes=tuple(event.block_hashes),
            parent_block_hash=event.parent_block_hash or None,
            token_ids=tuple(event.token_ids),
            block_size=event.block_size,
            lora_name=event.lora_name or None,
            medium=event.medium,
            extra_keys=dict(event.extra_keys),
            engine_block_hashes=tuple(event.engine_block_hashes),
        )


@dataclasses.dataclass(frozen=True)
class BlockRemoved:
    """Blocks that can be found no longer."""

    block_hashes: tuple
    medium: str

    @classmethod
    def from_proto(cls, event):
        return cls(block_hashes=tuple(event.block_hashes), medium=event.medium)


@dataclasses.dataclass(frozen=True)
class AllBlocksCleared:
    """Nothing of what was told before can be relied on; all that is held follows."""

    @classmethod
    def from_proto(cls, _):
        return cls()


_EVENTS = {
    "block_stored": BlockStored,
    "block_removed": BlockRemoved,
    "all_blocks_cleared": AllBlocksCleared,
}


class Subscription:
    """An endless iterator of lists of events. Whoever applies them all knows exactly what lookup would find.

    position: where to go on after the lists so far. Ends with KvTierError; close() ends it from any thread, quietly.
    """

    def __init__(self, call, position):
        self._call = call
        self._closed = False
        self.position = position

    def __iter__(self):
        return self

    def __next__(self):
        try:
            message = next(self._call)
        except grpc.RpcError as error:
            if self._closed:
                raise StopIteration from error
            raise from_rpc_error(error) from error
        self.position = Position(message.log_id, message.number)
        kinds = ((event.WhichOneof("event"), event) for event in message.events)
        # Of a newer server there may be others.
        return [_EVENTS[kind].from_proto(getattr(event, kind)) for kind, event in kinds if kind in _EVENTS]

    def close(self):
        self._closed = True
        self._call.cancel()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
