"""Appends to many sequences in one call: a decode step's tokens."""

import collections
import dataclasses

import grpc

from kvtier.errors import KvTierError
from kvtier.v1 import kv_tier_pb2 as pb
from kvtier.values import checked

_CODES = {code.value[0]: code for code in grpc.StatusCode}

# Of one entry of a batch. received_tokens: as the entry left the sequence; skipped_tokens: were there before.
Ack = collections.namedtuple("Ack", "received_tokens committed_tokens skipped_tokens saturated_values")


@dataclasses.dataclass(frozen=True)
class BatchEntry:
    """Some tokens of all layers of one sequence, which is opened where it isn't held.

    k, v: [layers, tokens, heads, dim] in the model's dtype, where all layers are alike; else a list with one
    [tokens, heads, dim] a layer. writer_epoch: above that of a stream that lives. prompt: as in Client.append.
    """

    sequence: str
    model: object
    first_token: int
    k: object
    v: object
    writer_epoch: int = 0
    prompt: object = None

    def to_proto(self):
        """Raises ValueError for a shape or dtype that the model does not have."""
        layers = len(self.model.layers)
        opening = pb.AppendOpen(
            sequence=self.sequence,
            model_id=self.model.id,
            writer_epoch=self.writer_epoch,
            prompt=self.prompt.to_proto() if self.prompt else None,
        )
        if (len(self.k), len(self.v)) != (layers, layers):
            raise ValueError(f"{self.sequence!r}: k and v are of {len(self.k)} and {len(self.v)} layers; want {layers}")
        try:
            return pb.AppendEntry(open=opening, chunks=map(self._chunk, range(layers), self.k, self.v))
        except ValueError as error:
            raise ValueError(f"{self.sequence!r}: {error}") from None

    def _chunk(self, layer, k, v):
        heads = self.model.layers[layer].kv_heads
        k = checked("k", k, self.model, layer, heads)
        v = checked("v", v, self.model, layer, heads)
        if len(v) != len(k):
            raise ValueError(f"v of layer {layer} has {len(v)} tokens; k has {len(k)}")
        return pb.AppendChunk(
            first_layer=layer, first_token=self.first_token, num_tokens=len(k), k=k.tobytes(), v=v.tobytes()
        )


def outcome_of(outcome):
    """The Ack of an entry, or the KvTierError that refused it."""
    if outcome.code:
        return KvTierError(_CODES[outcome.code], outcome.message, outcome.reason)
    ack = outcome.ack
    return Ack(ack.received_tokens, ack.committed_tokens, ack.skipped_tokens, ack.saturated_values)
