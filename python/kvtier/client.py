"""The client: one connection, the calls of the contract, arrays in and out."""

import contextlib
import dataclasses
import queue

import grpc
import numpy as np

from kvtier.batch import outcome_of
from kvtier.dtypes import DTYPES
from kvtier.errors import KvTierError, rpc_errors
from kvtier.events import Position, Subscription
from kvtier.grants import Lease, Pin
from kvtier.reads import Follow, assemble
from kvtier.v1 import kv_tier_pb2 as pb
from kvtier.v1 import kv_tier_pb2_grpc as rpc
from kvtier.values import checked

_KINDS = {"full": pb.LAYER_KIND_FULL, "sliding_window": pb.LAYER_KIND_SLIDING_WINDOW, "mla": pb.LAYER_KIND_MLA}
_LAYOUTS = {"NHD": pb.LAYOUT_NHD, "HND": pb.LAYOUT_HND}
_READ_AS = {
    "source": pb.READ_AS_SOURCE,
    "bfloat16": pb.READ_AS_BF16,
    "float16": pb.READ_AS_FP16,
    "float32": pb.READ_AS_FP32,
    "fp8_e4m3": pb.READ_AS_FP8_E4M3,
    "fp8_e5m2": pb.READ_AS_FP8_E5M2,
}
_RETENTIONS = {"all": pb.RETENTION_ALL, "window": pb.RETENTION_WINDOW}
_PRESSURES = {"evict": pb.PRESSURE_EVICT, "ladder": pb.PRESSURE_LADDER}
_WINDOW = 8  # chunks under way before an ack is waited for


def _one_of(field, value, table):
    if value not in table:
        raise ValueError(f"{field} is {value!r}; want one of {', '.join(table)}")
    return table[value]


@dataclasses.dataclass(frozen=True)
class Layer:
    """The shape of one layer. v_head_dim: head_dim unless given; 0 for MLA."""

    kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    kind: str = "full"  # full, sliding_window, mla
    window: int = 0

    def to_proto(self):
        return pb.LayerSpec(
            kind=_one_of("kind", self.kind, _KINDS),
            window=self.window,
            kv_heads=self.kv_heads,
            k_head_dim=self.head_dim,
            v_head_dim=self.head_dim if self.v_head_dim is None else self.v_head_dim,
        )


@dataclasses.dataclass(frozen=True)
class Model:
    """A registered model: what append needs of it, and what the server said."""

    id: str
    layers: tuple
    dtype: str
    reply: pb.RegisterModelResponse


class Client:
    """A connection to one kvtier server. Thread-safe; append streams are not.

    namespace: "" is the server's default. call_timeout_s: of one call; stream_timeout_s: of a whole append or read.
    Errors of the server are KvTierError; arguments that cannot be are ValueError.
    """

    def __init__(self, address="127.0.0.1:7071", namespace="", call_timeout_s=30.0, stream_timeout_s=600.0):
        self._channel = grpc.insecure_channel(
            address, options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        )
        self._stub = rpc.KvTierServiceStub(self._channel)
        self._namespace = namespace
        self._call_timeout_s = call_timeout_s
        self._stream_timeout_s = stream_timeout_s

    def close(self):
        self._channel.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _call(self, method, request):
        with rpc_errors():
            return method(request, timeout=self._call_timeout_s)

    def register_model(
        self,
        name,
        layers,
        dtype="bfloat16",
        kv_cache_dtype="auto",
        skip_layers=(),
        page_tokens=0,
        scales=None,
        max_tokens=0,
        scales_source="given",
        retention="all",
    ):
        """Registers `layers` (Layer, one each) and gives the Model. Idempotent.

        retention: window has sliding-window layers keep only the pages that their window sees; read within_windows then.
        scales: {layer: (k_scale, v_scale)} or (k_scale, v_scale, q_scale), each a number or one per KV head; of all FP8
        layers or of none. scales_source: for the server's log, "calibrated (CHECKPOINT)" say.
        """
        request = pb.RegisterModelRequest(
            spec=pb.ModelSpec(
                name=name, source_dtype=_one_of("dtype", dtype, DTYPES)[0], layers=[layer.to_proto() for layer in layers]
            ),
            policy=pb.FormatPolicy(
                kv_cache_dtype=kv_cache_dtype,
                kv_cache_dtype_skip_layers=[str(layer) for layer in skip_layers],
                retention=_one_of("retention", retention, _RETENTIONS),
            ),
            page_tokens=page_tokens,
            scales=[
                pb.LayerScales(layer=layer, **dict(zip(("k_scale", "v_scale", "q_scale"), map(np.atleast_1d, values))))
                for layer, values in (scales or {}).items()
            ],
            scales_source=scales_source if scales else "",
            max_tokens=max_tokens,
        )
        reply = self._call(self._stub.RegisterModel, request)
        return Model(reply.model_id, tuple(layers), dtype, reply)

    def append(
        self,
        sequence,
        model,
        first_layer=0,
        num_layers=0,
        first_head=0,
        num_heads=0,
        layout="NHD",
        writer_epoch=0,
        saturate=False,
        prompt=None,
    ):
        """Opens a stream that writes these layers and KV heads of `sequence`; 0 of a count means all that follow.

        prompt: a Prompt. A sequence that isn't held begins with the whole pages that others have of it: go on from the
        stream's received_tokens.
        """
        opening = pb.AppendOpen(
            namespace=self._namespace,
            sequence=sequence,
            model_id=model.id,
            first_layer=first_layer,
            num_layers=num_layers,
            first_head=first_head,
            num_heads=num_heads,
            layout=_one_of("layout", layout, _LAYOUTS),
            writer_epoch=writer_epoch,
            non_finite=pb.NON_FINITE_POLICY_SATURATE if saturate else pb.NON_FINITE_POLICY_REFUSE,
            prompt=prompt.to_proto() if prompt else None,
        )
        return AppendStream(self._stub, opening, model, layout, self._stream_timeout_s)

    def lookup(self, model, prompts):
        """How many tokens of each Prompt are held, in whole hash blocks. Holds nothing."""
        request = pb.LookupRequest(
            namespace=self._namespace, model_id=model.id, prompts=[prompt.to_proto() for prompt in prompts]
        )
        return list(self._call(self._stub.Lookup, request).tokens)

    def acquire(self, model=None, prompt=None, sequence="", duration_s=0.0):
        """A Lease on what is held of a model's Prompt, or on what a sequence has committed; 0 s: the server's default."""
        request = pb.AcquireRequest(**self._grant_of(model, prompt, sequence, duration_s))
        reply = self._call(self._stub.Acquire, request)
        return Lease(self, reply.lease_id, reply.tokens)

    def _grant_of(self, model, prompt, sequence, duration_s):
        return {
            "namespace": self._namespace,
            "model_id": model.id if model else "",
            "prompt": prompt.to_proto() if prompt else None,
            "sequence": sequence,
            "duration_ms": round(duration_s * 1000),
        }

    def _renew(self, lease_id, duration_s):
        request = pb.RenewRequest(namespace=self._namespace, lease_id=lease_id, duration_ms=round(duration_s * 1000))
        self._call(self._stub.Renew, request)

    def _release(self, lease_id):
        self._call(self._stub.Release, pb.ReleaseRequest(namespace=self._namespace, lease_id=lease_id))

    def pin(self, model=None, prompt=None, sequence="", hard=False, duration_s=0.0):
        """A Pin on what is held of a model's Prompt, or of a sequence; 0 s: the server's default.

        Soft, it is evicted only once nothing unpinned is left; hard, not at all.
        """
        kind = pb.PIN_KIND_HARD if hard else pb.PIN_KIND_SOFT
        request = pb.PinRequest(kind=kind, **self._grant_of(model, prompt, sequence, duration_s))
        reply = self._call(self._stub.Pin, request)
        return Pin(self, reply.pin_id, reply.tokens)

    def _unpin(self, pin_id):
        self._call(self._stub.Unpin, pb.UnpinRequest(namespace=self._namespace, pin_id=pin_id))

    def quota(self):
        """(quota, held) of the namespace in bytes; a quota of 0 is the whole budget."""
        reply = self._call(self._stub.GetQuota, pb.GetQuotaRequest(namespace=self._namespace))
        return reply.quota_bytes, reply.held_bytes

    def set_quota(self, quota_bytes):
        """Bounds what the namespace holds, 0: as the server has it by default; (quota, held) as they are then."""
        request = pb.SetQuotaRequest(namespace=self._namespace, quota_bytes=quota_bytes)
        reply = self._call(self._stub.SetQuota, request)
        return reply.quota_bytes, reply.held_bytes

    def set_pressure(self, pressure):
        """What gives way first in the namespace when room is needed: "evict", tokens; "ladder", bits of pages that nobody uses.

        The formats that these are stored as, one after the other; [] for "evict".
        """
        request = pb.SetPressureRequest(namespace=self._namespace, pressure=_one_of("pressure", pressure, _PRESSURES))
        return list(self._call(self._stub.SetPressure, request).ladder)

    def append_batch(self, entries):
        """What became of each BatchEntry: an Ack, or a KvTierError, which costs the others nothing.

        One call, of at most max_message_bytes: for the few tokens that a decode step adds to each of many sequences.
        """
        request = pb.AppendBatchRequest(namespace=self._namespace, entries=[entry.to_proto() for entry in entries])
        return [outcome_of(outcome) for outcome in self._call(self._stub.AppendBatch, request).outcomes]

    def subscribe(self, after=None):
        """A Subscription to the namespace's KV events; after: the Position that an earlier one had come to.

        Where the server can't tell all that came since, and without one, it begins with AllBlocksCleared and what is held.
        """
        position = after or Position()
        return Subscription(self._stub.Subscribe(position.to_proto(self._namespace)), position)

    def fork(self, sequence, new_sequence, tokens=None):
        """Opens new_sequence with the first tokens of `sequence`, all if None; how many it begins with: whole pages but at
        the current length."""
        request = pb.ForkRequest(namespace=self._namespace, sequence=sequence, new_sequence=new_sequence, tokens=tokens)
        return self._call(self._stub.Fork, request).tokens

    def seal(self, sequence, tokens):
        self._call(self._stub.Seal, pb.SealRequest(namespace=self._namespace, sequence=sequence, tokens=tokens))

    def truncate(self, sequence, tokens, writer_epoch=0):
        """Ends an open sequence after `tokens` tokens; its append streams end. A group of codes is never cut."""
        request = pb.TruncateRequest(
            namespace=self._namespace, sequence=sequence, tokens=tokens, writer_epoch=writer_epoch
        )
        self._call(self._stub.Truncate, request)

    def abort(self, sequence):
        self._call(self._stub.Abort, pb.AbortRequest(namespace=self._namespace, sequence=sequence))

    def remove(self, sequence):
        self._call(self._stub.Remove, pb.RemoveRequest(namespace=self._namespace, sequence=sequence))

    def describe(self, sequence):
        """The contract's DescribeResponse."""
        return self._call(self._stub.Describe, pb.DescribeRequest(namespace=self._namespace, sequence=sequence))

    def list_sequences(self):
        """SequenceInfo of every sequence of the namespace, ordered by id."""
        token = ""
        while True:
            request = pb.ListSequencesRequest(namespace=self._namespace, page_token=token)
            reply = self._call(self._stub.ListSequences, request)
            yield from reply.sequences
            token = reply.next_page_token
            if not token:
                return

    def capacity(self, model=None, kv_cache_dtype=""):
        """The contract's CapacityResponse; kv_cache_dtype: what if the model had that format."""
        request = pb.CapacityRequest(model_id=model.id if model else "", kv_cache_dtype=kv_cache_dtype)
        return self._call(self._stub.Capacity, request)

    def scales(self, model):
        """The contract's ScalesResponse: scales in use, and the largest magnitudes received, by layer and KV head."""
        return self._call(self._stub.Scales, pb.ScalesRequest(model_id=model.id))

    def read(
        self,
        sequence,
        dtype="source",
        layout="NHD",
        layers=None,
        heads=None,
        tokens=None,
        k_scale=None,
        v_scale=None,
        measure_scales=False,
        within_windows=False,
    ):
        """Reads a sequence, or what a Lease holds, as ReadResult. layers, heads, tokens: ranges of step 1, all if None.

        dtype: source, bfloat16, float16, float32, or fp8_e4m3, fp8_e5m2 with k_scale and v_scale (if None: the stored
        ones, else 1.0; with measure_scales one per head, measured over what is read). within_windows: of sliding-window
        layers only what their window sees at the end.
        """
        if isinstance(sequence, Lease) and not sequence.id:
            raise ValueError("the lease holds nothing: nothing of its prompt was held")
        held = {"lease_id": sequence.id} if isinstance(sequence, Lease) else {"sequence": sequence}
        request = self._read_request(
            held,
            dtype,
            layout,
            layers,
            heads,
            k_scale=k_scale,
            v_scale=v_scale,
            measure_scales=measure_scales,
            within_windows=within_windows,
        )
        _set_range(request.sequences[0], "token", tokens)
        with rpc_errors():
            return assemble(self._stub.Read(request, timeout=self._stream_timeout_s), layout)

    def follow(
        self,
        sequence,
        dtype="source",
        layout="NHD",
        layers=None,
        heads=None,
        first_token=0,
        num_tokens=0,
        k_scale=None,
        v_scale=None,
    ):
        """Reads a sequence as it is received: a Follow, which yields (layer, first_token, k, v) as they come.

        num_tokens: how many from first_token on; 0: up to where the sequence is sealed. The others as of read.
        """
        request = self._read_request(
            {"sequence": sequence, "first_token": first_token, "num_tokens": num_tokens},
            dtype,
            layout,
            layers,
            heads,
            k_scale=k_scale,
            v_scale=v_scale,
            follow=True,
        )
        return Follow(self._stub.Read(request, timeout=self._stream_timeout_s), layout)

    def _read_request(self, held, dtype, layout, layers, heads, **options):
        request = pb.ReadRequest(
            namespace=self._namespace,
            sequences=[pb.SequenceRange(**held)],
            layout=_one_of("layout", layout, _LAYOUTS),
            **{"as": _one_of("dtype", dtype, _READ_AS)},
            **options,
        )
        _set_range(request, "layer", layers)
        _set_range(request, "head", heads)
        return request


def _set_range(target, field, wanted):
    """first_FIELD and num_FIELDs of a range, or as they are where it is None."""
    if wanted is None:
        return
    if wanted.step != 1 or len(wanted) == 0:
        raise ValueError(f"{field}s is {wanted}; want a range of step 1 that is not empty")
    setattr(target, f"first_{field}", wanted.start)
    setattr(target, f"num_{field}s", len(wanted))


class AppendStream:
    """Writes K and V of some layers and heads of one sequence; a context manager that waits for the last ack.

    received_tokens: least over the stream's layers and heads, as of the last ack; where a stream that resumes goes on.
    committed_tokens: of the sequence. saturated_values: so far. After an error the stream is over; what was acknowledged
    stays.
    """

    def __init__(self, stub, opening, model, layout, timeout_s):
        self._model = model
        self._opening = opening
        self._layout = layout
        self._token_axis = 1 if layout == "HND" else 0
        self._requests = queue.Queue(_WINDOW + 1)
        self._unacked = 0
        self.saturated_values = 0
        self._acks = stub.Append(iter(self._requests.get, None), timeout=timeout_s)
        self._put(pb.AppendRequest(open=opening))
        self._take_ack()

    def send(self, layer, first_token, k, v):
        """K and V of one layer from first_token on, in the stream's layout and the model's dtype; split as needed.

        Raises ValueError for a shape or dtype that the model does not have. Returns before the server has taken it.
        """
        if not 0 <= layer < len(self._model.layers):
            raise ValueError(f"layer is {layer}; want 0 to {len(self._model.layers) - 1}")
        spec = self._model.layers[layer]
        heads = self._opening.num_heads or spec.kv_heads - self._opening.first_head
        k = checked("k", k, self._model, layer, heads, self._layout)
        v = checked("v", v, self._model, layer, heads, self._layout)
        tokens = k.shape[self._token_axis]
        if v.shape[self._token_axis] != tokens:
            raise ValueError(f"v has {v.shape[self._token_axis]} tokens; k has {tokens}")
        most = max(1, self._model.reply.max_message_bytes * tokens // max(1, k.nbytes + v.nbytes))
        for begin in range(0, tokens, most):
            part = (slice(None),) * self._token_axis + (slice(begin, begin + most),)
            k_part, v_part = k[part], v[part]
            chunk = pb.AppendChunk(
                first_layer=layer,
                first_token=first_token + begin,
                num_tokens=k_part.shape[self._token_axis],
                k=k_part.tobytes(),
                v=v_part.tobytes(),
            )
            while self._unacked >= _WINDOW:
                self._take_ack()
            self._put(pb.AppendRequest(chunk=chunk))

    def flush(self):
        """Waits until the server has acknowledged everything sent."""
        while self._unacked > 0:
            self._take_ack()

    def close(self):
        """Flushes and ends the stream."""
        try:
            self.flush()
            self._requests.put(None)
            with rpc_errors():
                for _ in self._acks:
                    pass
        finally:
            self._end()

    def __enter__(self):
        return self

    def __exit__(self, failed, *_):
        if failed:
            self._end()
        else:
            self.close()

    def _put(self, request):
        self._requests.put(request)
        self._unacked += 1

    def _take_ack(self):
        try:
            with rpc_errors():
                ack = next(self._acks)
        except StopIteration:
            # The one end that a server gives a stream by itself, and no error.
            said = f"the sequence was sealed by another call; {self._unacked} messages came too late"
            raise KvTierError(grpc.StatusCode.FAILED_PRECONDITION, said, "SEALED") from None
        except Exception:
            self._end()
            raise
        self._unacked -= 1
        self.received_tokens = ack.received_tokens
        self.committed_tokens = ack.committed_tokens
        self.saturated_values += ack.saturated_values

    def _end(self):
        """Lets gRPC's sending thread go, whatever it waits for."""
        self._acks.cancel()
        with contextlib.suppress(queue.Full):
            self._requests.put_nowait(None)
