"""What a read brings: a whole sequence, or one that is followed as it is received."""

import collections
import dataclasses

import numpy as np

from kvtier.dtypes import DTYPES, NAMES, row_length
from kvtier.errors import rpc_errors

# One layer of a read: k and v [tokens, heads, dim] (NHD) or [heads, tokens, dim] (HND); dtype is that of dtypes.DTYPES.
# k_scale and v_scale: FP8 only, [1] or [heads]; a value is code * scale. q_scale: as registered, [0], [1] or [heads].
# first_token: of k and v; the read's, or where the layer's window begins.
LayerData = collections.namedtuple("LayerData", "k v dtype k_scale v_scale q_scale first_token")


@dataclasses.dataclass(frozen=True)
class ReadResult:
    """layers: {index in the model: LayerData}; first_token, tokens: of the read; sealed: the sequence takes no more."""

    layers: dict
    first_token: int
    tokens: int
    sealed: bool
    saturated_values: int


def assemble(messages, layout):
    """The ReadResult of a whole read's messages."""
    manifest = next(messages).manifest
    sequence = manifest.sequences[0]
    heads_axis = 0 if layout == "HND" else 1
    layers, left = {}, manifest.total_bytes
    for layer in sequence.layers:
        name = NAMES[layer.dtype]
        first_token = layer.first_token if layer.HasField("first_token") else sequence.first_token
        tokens = sequence.first_token + sequence.num_tokens - first_token

        def array(dim, layer=layer, name=name, tokens=tokens):
            shape = [tokens, row_length(name, dim)]
            shape.insert(heads_axis, layer.num_heads)
            return np.empty(shape, DTYPES[name][1])

        layers[layer.layer] = LayerData(
            array(layer.k_head_dim),
            array(layer.v_head_dim),
            name,
            np.array(layer.k_scale, np.float32),
            np.array(layer.v_scale, np.float32),
            np.array(layer.q_scale, np.float32),
            first_token,
        )
    saturated = 0
    for message in messages:
        if message.HasField("summary"):
            saturated = message.summary.saturated_values
            continue
        chunk = message.chunk
        begin = chunk.first_token - layers[chunk.layer].first_token
        for into, data in zip(layers[chunk.layer], (chunk.k, chunk.v)):
            part = (slice(None),) * (1 - heads_axis) + (slice(begin, begin + chunk.num_tokens),)
            into[part] = np.frombuffer(data, into.dtype).reshape(into[part].shape)
            left -= len(data)
    if left != 0:
        raise EOFError(f"the read ended {left} bytes before what its manifest says")
    return ReadResult(layers, sequence.first_token, sequence.num_tokens, sequence.sealed, saturated)


# What came of one layer: k and v from first_token on, [tokens, heads, dim] (NHD) or [heads, tokens, dim] (HND).
Piece = collections.namedtuple("Piece", "layer first_token k v")


class Follow:
    """Yields a Piece whenever a layer has received more, of each layer in order of tokens; a context manager.

    Waits for the writer as long as that takes. Once all that was asked for has come and is committed it ends. Where the
    sequence went first it raises KvTierError with the reason SEQUENCE_GONE, and LEASE_ENDED where it took the server too
    long: what came before is then to be thrown away. manifest: the contract's SequenceManifest, with dtypes and FP8 scales.
    tokens: that were read; None until it has ended.
    """

    def __init__(self, messages, layout):
        self._messages = messages
        self._heads_first = layout == "HND"
        with rpc_errors():
            self.manifest = next(messages).manifest.sequences[0]
        self._layers = {layer.layer: layer for layer in self.manifest.layers}
        self.tokens = None

    def __iter__(self):
        return self

    def __next__(self):
        if self.tokens is not None:
            raise StopIteration
        with rpc_errors():
            message = next(self._messages, None)
        if message is None:
            raise EOFError("the read ended without a summary")
        if message.HasField("summary"):
            self.tokens = message.summary.tokens[0]
            raise StopIteration
        chunk = message.chunk
        layer = self._layers[chunk.layer]
        return Piece(
            chunk.layer,
            chunk.first_token,
            self._array(chunk.k, chunk.num_tokens, layer, layer.k_head_dim),
            self._array(chunk.v, chunk.num_tokens, layer, layer.v_head_dim),
        )

    def _array(self, data, tokens, layer, dim):
        name = NAMES[layer.dtype]
        shape = (layer.num_heads, tokens) if self._heads_first else (tokens, layer.num_heads)
        return np.frombuffer(data, DTYPES[name][1]).reshape(*shape, row_length(name, dim))

    def close(self):
        """Ends it where it stands."""
        self._messages.cancel()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
