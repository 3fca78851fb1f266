"""Client of kvtier: K and V of a model's layers to and from a kvtier server, as numpy arrays.

    client = kvtier.Client("127.0.0.1:7071")
    model = client.register_model("m", [kvtier.Layer(kv_heads=8, head_dim=128)] * 32, kv_cache_dtype="kivi4")
    with client.append("request-1", model) as stream:
        stream.send(layer=0, first_token=0, k=k, v=v)  # [tokens, heads, dim]
        ...
    client.seal("request-1", tokens)
    k, v = client.read("request-1").layers[0][:2]
"""

from kvtier.batch import Ack, BatchEntry
from kvtier.client import AppendStream, Client, Layer, Model
from kvtier.dtypes import from_float32, to_float32
from kvtier.errors import KvTierError
from kvtier.events import AllBlocksCleared, BlockRemoved, BlockStored, Position, Subscription
from kvtier.grants import Lease, Pin
from kvtier.prefix import Prompt, prefix_keys, root_key
from kvtier.reads import Follow, LayerData, Piece, ReadResult

__all__ = [
    "Ack",
    "AllBlocksCleared",
    "AppendStream",
    "BatchEntry",
    "BlockRemoved",
    "BlockStored",
    "Client",
    "Follow",
    "KvTierError",
    "Layer",
    "LayerData",
    "Lease",
    "Model",
    "Piece",
    "Pin",
    "Position",
    "Prompt",
    "ReadResult",
    "Subscription",
    "from_float32",
    "prefix_keys",
    "root_key",
    "to_float32",
]
