"""Appends to many sequences in one call: a decode step's tokens."""

import collections
import dataclasses

import grpc
import numpy as np

from kvtier.dtypes import DTYPES
from kvtier.errors import KvTierError
from kvtier.v1 import kv_tier_pb2 as pb

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
        chunks = [
            pb.AppendChunk(
                first_layer=layer,
                first_token=self.first_token,
                num_tokens=len(k),
                k=self._bytes("k", layer, k),
                v=self._bytes("v", layer, v),
            )
            for layer, (k, v) in enumerate(zip(self.k, self.v, strict=True))
        ]
        opening = pb.AppendOpen(
            sequence=self.sequence,
            model_id=self.model.id,
            writer_epoch=self.writer_epoch,
            prompt=self.prompt.to_proto() if self.prompt else None,
        )
        return pb.AppendEntry(open=opening, chunks=chunks)

    def _bytes(self, name, layer, array):
        array = np.asarray(array)
        dtype = DTYPES[self.model.dtype][1]
        if array.ndim != 3 or array.dtype.itemsize != dtype.itemsize:
            raise ValueError(
                f"{name} of layer {layer} of {self.sequence!r} is {array.dtype}{list(array.shape)}; want {dtype}[tokens, heads, dim]"
            )
        return array.tobytes()


def outcome_of(outcome):
    """The Ack of an entry, or the KvTierError that refused it."""
    if outcome.code:
        return KvTierError(_CODES[outcome.code], outcome.message, outcome.reason)
    ack = outcome.ack
    return Ack(ack.received_tokens, ack.committed_tokens, ack.skipped_tokens, ack.saturated_values)
