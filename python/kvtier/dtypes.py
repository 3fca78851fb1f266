"""The dtypes of K and V in numpy, which has neither bfloat16 nor FP8: those are their bits, uint16 and uint8.

llama.cpp's q8_0 and q4_0 are the bytes of their blocks: uint8, row_length(dtype, dim) of them for a row of dim values.
"""

import numpy as np

from kvtier.v1 import kv_tier_pb2 as pb

# name -> (DType of the contract, numpy dtype of the array)
DTYPES = {
    "bfloat16": (pb.DTYPE_BF16, np.dtype("<u2")),
    "float16": (pb.DTYPE_FP16, np.dtype("<f2")),
    "float32": (pb.DTYPE_FP32, np.dtype("<f4")),
    "fp8_e4m3": (pb.DTYPE_FP8_E4M3, np.dtype("u1")),
    "fp8_e5m2": (pb.DTYPE_FP8_E5M2, np.dtype("u1")),
    "q8_0": (pb.DTYPE_Q8_0, np.dtype("u1")),
    "q4_0": (pb.DTYPE_Q4_0, np.dtype("u1")),
}
NAMES = {number: name for name, (number, _) in DTYPES.items()}


_BLOCK_BYTES = {"q8_0": 34, "q4_0": 18}


def row_length(dtype, dim):
    """How long a row of dim values is in an array of `dtype`."""
    return dim // 32 * _BLOCK_BYTES[dtype] if dtype in _BLOCK_BYTES else dim


def _fp8_values(mantissa_bits, bias, nan_from):
    codes = np.arange(128)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    values = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    values[nan_from:] = np.nan
    if mantissa_bits == 2:
        values[0x7C] = np.inf
    return np.concatenate([values, -values]).astype(np.float32)


_FP8 = {"fp8_e4m3": _fp8_values(3, 7, 0x7F), "fp8_e5m2": _fp8_values(2, 15, 0x7D)}


def to_float32(array, dtype, scale=None):
    """The values of an array of `dtype`, times `scale` (a number, or one per head for [tokens, heads, dim])."""
    if dtype == "bfloat16":
        values = (array.astype(np.uint32) << 16).view(np.float32)
    elif dtype in _FP8:
        values = _FP8[dtype][array]
    elif dtype in _BLOCK_BYTES:
        raise ValueError(f"dtype is {dtype!r}, blocks of llama.cpp's; read them as bfloat16, float16 or float32")
    else:
        values = array.astype(np.float32)
    if scale is None or len(np.atleast_1d(scale)) == 0:
        return values
    scale = np.atleast_1d(np.asarray(scale, np.float32))
    return values * (scale[0] if len(scale) == 1 else scale[:, None])


def from_float32(values, dtype):
    """Values as an array of "bfloat16" (nearest even), "float16" or "float32"."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
    if dtype in ("float16", "float32"):
        return values.astype(DTYPES[dtype][1])
    raise ValueError(f"dtype is {dtype!r}; want bfloat16, float16 or float32")
