"""Every format over the head dims that models have, through a real kvtierd, beside references written from the formulas."""

import pathlib
import sys
import unittest

try:
    import numpy as np
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed") from None

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
import kvtier
from live_server import LiveServer

TOKENS = 150  # more than a page of 128, more than KIVI's residual
HEAD_DIMS = (64, 80, 96, 100, 112, 128, 192, 256, 512, 576)

# format -> (what K's head dim must be a multiple of, V's, largest relative error on N(0, 1))
FORMATS = {
    "auto": (1, 1, 0),
    "float16": (1, 1, 1e-6),
    "fp8_e4m3": (1, 1, 0.04),
    "fp8_e5m2": (1, 1, 0.08),
    "fp8_e4m3(scale=page)": (4, 4, 0.04),
    "fp8_e4m3(scale=page,k_rotation=hadamard)": (4, 4, 0.04),
    "int8_per_token_head": (4, 4, 0.012),
    "fp8_per_token_head": (4, 4, 0.04),
    "int4_per_token_head": (2, 2, 0.15),
    "nvfp4": (16, 16, 0.12),
    "nvfp4_4over6": (16, 16, 0.11),
    "q8_0": (32, 32, 0.008),
    "q4_0": (32, 32, 0.12),
    "kivi2": (2, 32, 0.45),
    "kivi4": (2, 32, 0.1),
    "kivi2(scales=fp8_e4m3)": (2, 32, 0.5),
    "kivi4(k_rotation=hadamard)": (2, 32, 0.1),
}


def setUpModule():
    global server
    server = LiveServer()


def tearDownModule():
    server.stop()


def random_rows(shape, dtype="bfloat16", seed=3):
    return kvtier.from_float32(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def relative_error(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


class LiveTest(unittest.TestCase):
    def setUp(self):
        self.client = kvtier.Client(server.address)
        self.addCleanup(self.client.close)

    def round_trip(self, model, k, v, **read):
        with self.client.append(self.id(), model) as stream:
            stream.send(0, 0, k, v)
        self.client.seal(self.id(), len(k))
        result = self.client.read(self.id(), **read)
        self.client.remove(self.id())
        return result.layers[0]


class FormatsTest(LiveTest):
    def expect_refusal(self, layer, kv_cache_dtype, message):
        with self.assertRaises(kvtier.KvTierError) as raised:
            self.client.register_model("m", [layer], kv_cache_dtype=kv_cache_dtype)
        self.assertEqual(raised.exception.reason, "FORMAT_REFUSED")
        self.assertIn(message, raised.exception.message)

    def test_every_head_dim_works_or_is_refused_with_the_reason(self):
        for kv_cache_dtype, (k_multiple, v_multiple, most) in FORMATS.items():
            for dim in HEAD_DIMS:
                with self.subTest(kv_cache_dtype=kv_cache_dtype, dim=dim):
                    layer = kvtier.Layer(2, dim)
                    if dim % k_multiple or dim % v_multiple:
                        side, multiple = ("k", k_multiple) if dim % k_multiple else ("v", v_multiple)
                        self.expect_refusal(
                            layer, kv_cache_dtype, f"{side}_head_dim is {dim}; {kv_cache_dtype} needs a multiple of {multiple}"
                        )
                        continue
                    k, v = random_rows((TOKENS, 2, dim)), random_rows((TOKENS, 2, dim), seed=4)
                    model = self.client.register_model("m", [layer], kv_cache_dtype=kv_cache_dtype)
                    got = self.round_trip(model, k, v, dtype="float32")
                    self.assertLessEqual(relative_error(got.k, kvtier.to_float32(k, "bfloat16")), most)
                    self.assertLessEqual(relative_error(got.v, kvtier.to_float32(v, "bfloat16")), most)

    def test_v_may_be_narrower_than_k_and_mla_has_none(self):
        k, v = random_rows((TOKENS, 2, 192)), random_rows((TOKENS, 2, 128), seed=4)
        latent, nothing = random_rows((TOKENS, 1, 576)), np.empty((TOKENS, 1, 0), np.uint16)
        for kv_cache_dtype in (*FORMATS, "fp8_ds_mla"):
            with self.subTest(kv_cache_dtype):
                most = FORMATS.get(kv_cache_dtype, (0, 0, 0.04))[2]
                if kv_cache_dtype != "fp8_ds_mla":
                    model = self.client.register_model("m", [kvtier.Layer(2, 192, 128)], kv_cache_dtype=kv_cache_dtype)
                    got = self.round_trip(model, k, v, dtype="float32")
                    self.assertLessEqual(relative_error(got.k, kvtier.to_float32(k, "bfloat16")), most)
                    self.assertLessEqual(relative_error(got.v, kvtier.to_float32(v, "bfloat16")), most)
                mla = self.client.register_model("m", [kvtier.Layer(1, 576, 0, kind="mla")], kv_cache_dtype=kv_cache_dtype)
                got = self.round_trip(mla, latent, nothing, dtype="float32")
                self.assertLessEqual(relative_error(got.k, kvtier.to_float32(latent, "bfloat16")), most)

    def test_deepseeks_cell_is_refused_to_others(self):
        self.expect_refusal(kvtier.Layer(1, 512, 0, kind="mla"), "fp8_ds_mla", "k_head_dim is 512")
        self.expect_refusal(kvtier.Layer(1, 576), "fp8_ds_mla", "needs mla layers")

    def test_a_source_in_llamas_blocks_is_kept(self):
        for dtype, block in (("q8_0", 34), ("q4_0", 18)):
            with self.subTest(dtype):
                model = self.client.register_model("m", [kvtier.Layer(2, 64)], dtype=dtype)
                rows = np.random.default_rng(1).integers(0, 256, (TOKENS, 2, 2 * block), np.uint8)
                rows[..., 1::block] &= 0xBF  # the scales are finite
                got = self.round_trip(model, rows, rows)
                self.assertEqual(got.dtype, dtype)
                np.testing.assert_array_equal(got.k, rows)
                values = self.round_trip(model, rows, rows, dtype="float32").v
                scale = rows[..., :2].copy().view(np.float16).astype(np.float32)
                if dtype == "q8_0":
                    first = rows[..., 2:34].view(np.int8) * scale
                else:
                    first = np.concatenate([rows[..., 2:18] & 15, rows[..., 2:18] >> 4], -1).astype(np.float32) * scale - 8 * scale
                np.testing.assert_allclose(values[..., :32], first, rtol=1e-6)


def kivi_in_fp16(x, bits):
    """Groups along the last axis, every step rounded to fp16: what is read back, as fp32."""
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    scale = (high - low) / np.float16(2**bits - 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        steps = np.where(scale > 0, (x - low) / scale, np.float16(0))
    code = np.rint(np.clip(steps, 0, 2**bits - 1)).astype(np.float32)
    return code * scale.astype(np.float32) + low.astype(np.float32)


class ReferenceTest(LiveTest):
    def test_kivi_of_fp16_is_the_published_arithmetic(self):
        tokens = 400
        k, v = (random_rows((tokens, 2, 64), "float16", seed) for seed in (5, 6))
        k[:, :, 3] += 100  # a channel that lies far from 0
        for bits in (2, 4, 8):
            with self.subTest(bits=bits):
                model = self.client.register_model(
                    "m", [kvtier.Layer(2, 64)], dtype="float16", kv_cache_dtype=f"kivi({bits},{bits},32,128)"
                )
                got = self.round_trip(model, k, v, dtype="float32")
                want_k, want_v = (x.astype(np.float32) for x in (k, v))
                of_k = tokens // 128 * 128
                by_channel = k[:of_k].reshape(-1, 32, 2, 64).transpose(0, 2, 3, 1)
                want_k[:of_k] = kivi_in_fp16(by_channel, bits).transpose(0, 3, 1, 2).reshape(of_k, 2, 64)
                of_v = tokens - 128
                want_v[:of_v] = kivi_in_fp16(v[:of_v].reshape(of_v, 2, 2, 32), bits).reshape(of_v, 2, 64)
                # The read is fused and rounded once, the reference's product is rounded before the sum.
                np.testing.assert_allclose(got.k, want_k, rtol=1e-6, atol=1e-5)
                np.testing.assert_allclose(got.v, want_v, rtol=1e-6, atol=1e-5)

    def test_fp8_is_ml_dtypes_where_nothing_saturates(self):
        try:
            import ml_dtypes
        except ImportError:
            self.skipTest("ml_dtypes is not installed")
        k = random_rows((TOKENS, 2, 64), "float32") * 100
        for kv_cache_dtype, name, scale in (("fp8_e4m3", "float8_e4m3fn", 1.7), ("fp8_e5m2", "float8_e5m2", 0.3)):
            with self.subTest(kv_cache_dtype):
                model = self.client.register_model(
                    "m", [kvtier.Layer(2, 64)], dtype="float32", kv_cache_dtype=kv_cache_dtype, scales={0: (scale, scale)}
                )
                got = self.round_trip(model, k, k, dtype=kv_cache_dtype).k
                want = (k / np.float32(scale)).astype(getattr(ml_dtypes, name)).view(np.uint8)
                fits = np.abs(k / np.float32(scale)) < (440 if kv_cache_dtype == "fp8_e4m3" else 50000)
                np.testing.assert_array_equal(got[fits], want[fits])


if __name__ == "__main__":
    unittest.main()
