"""The real K, V and queries of tests/data, and what was lost of them."""
import json
import pathlib
import statistics
import struct

import numpy as np

SAMPLE = pathlib.Path(__file__).resolve().parent.parent / "tests/data/smollm2-135m-kv.safetensors"


def load(path):
    """The float tensors of a safetensors file, as float32 arrays."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    tensors = {}
    for name, info in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in info["data_offsets"])
        if info["dtype"] == "BF16":  # the upper half of a float32
            values = (np.frombuffer(raw[begin:end], "<u2").astype("<u4") << 16).view("<f4")
        else:
            values = np.frombuffer(raw[begin:end], {"F16": "<f2", "F32": "<f4"}[info["dtype"]])
        tensors[name] = values.astype(np.float32).reshape(info["shape"])
    return tensors


def attention(q, k, v):
    """softmax(q k^T / sqrt(d)) v; q [tokens, heads, d], k and v [tokens, kv_heads, d], heads grouped over kv_heads."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    logits = np.einsum("qhd,thd->hqt", q, k) / np.sqrt(q.shape[2])
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqt,thd->qhd", weights, v)


def relative_error(got, want):
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def errors(source, served):
    """Relative errors |x' - x| / |x|, each the mean over layers."""
    rows = []
    for layer in range(sum(name.endswith(".k") for name in source)):
        q, k, v = (source[f"layers.{layer}.{name}"] for name in "qkv")
        k2, v2 = (served[f"layers.{layer}.{name}"] for name in "kv")
        exact = attention(q, k, v)
        rows.append(
            {
                "k_error": relative_error(k2, k),
                "v_error": relative_error(v2, v),
                "output_error_from_k": relative_error(attention(q, k2, v), exact),
                "output_error_from_v": relative_error(attention(q, k, v2), exact),
                "output_error": relative_error(attention(q, k2, v2), exact),
            }
        )
    return {name: statistics.mean(row[name] for row in rows) for name in rows[0]}
