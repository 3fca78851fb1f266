"""The Python client against a real kvtierd."""

import pathlib
import sys
import unittest

try:
    import grpc
    import numpy as np
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed") from None

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
import kvtier
from live_server import LiveServer

LAYERS, HEADS, DIM, TOKENS = 3, 4, 64, 300
SHAPE = [kvtier.Layer(HEADS, DIM)] * LAYERS


def setUpModule():
    global server, address
    server = LiveServer()
    address = server.address


def tearDownModule():
    server.stop()


def random_kv(dtype="bfloat16", shape=(TOKENS, HEADS, DIM)):
    """{layer: (k, v)} of N(0, 1)."""
    random = np.random.default_rng(7)
    return {
        layer: tuple(kvtier.from_float32(random.standard_normal(shape, np.float32), dtype) for _ in "kv")
        for layer in range(LAYERS)
    }


class ClientTest(unittest.TestCase):
    def setUp(self):
        self.client = kvtier.Client(address)
        self.addCleanup(self.client.close)
        self.sequence = self.id()

    def model(self, kv_cache_dtype="auto", dtype="bfloat16", **options):
        return self.client.register_model("m", SHAPE, dtype=dtype, kv_cache_dtype=kv_cache_dtype, **options)

    def put(self, model, data, chunk=TOKENS, **options):
        with self.client.append(self.sequence, model, **options) as stream:
            for begin in range(0, TOKENS, chunk):
                for layer, (k, v) in data.items():
                    stream.send(layer, begin, k[begin : begin + chunk], v[begin : begin + chunk])
            stream.flush()
            self.assertEqual(stream.received_tokens, TOKENS)
        self.client.seal(self.sequence, TOKENS)

    def assert_same(self, result, data, part=np.s_[:]):
        for layer, (k, v) in data.items():
            np.testing.assert_array_equal(result.layers[layer].k, k[part])
            np.testing.assert_array_equal(result.layers[layer].v, v[part])

    def test_auto_gives_the_bits_back(self):
        for dtype in ("bfloat16", "float16", "float32"):
            with self.subTest(dtype):
                data = random_kv(dtype)
                self.put(self.model(dtype=dtype), data, chunk=77)
                result = self.client.read(self.sequence)
                self.assertEqual((result.tokens, result.sealed, result.layers[0].dtype), (TOKENS, True, dtype))
                self.assert_same(result, data)
                self.client.remove(self.sequence)

    def test_ranges_and_layouts_are_slices_of_the_whole(self):
        data = random_kv()
        self.put(self.model(), data)
        part = self.client.read(self.sequence, layers=range(1, 3), heads=range(1, 3), tokens=range(10, 250))
        self.assertEqual(sorted(part.layers), [1, 2])
        self.assert_same(part, {layer: data[layer] for layer in (1, 2)}, np.s_[10:250, 1:3])
        turned = self.client.read(self.sequence, layout="HND")
        self.assert_same(turned, {layer: (k.transpose(1, 0, 2), v.transpose(1, 0, 2)) for layer, (k, v) in data.items()})

    def test_heads_first_and_head_shards_go_in_alike(self):
        data = random_kv()
        model = self.model()
        for first in (0, 2):
            with self.client.append(self.sequence, model, first_head=first, num_heads=2, layout="HND") as stream:
                for layer, (k, v) in data.items():
                    stream.send(layer, 0, k[:, first : first + 2].transpose(1, 0, 2), v[:, first : first + 2].transpose(1, 0, 2))
        self.client.seal(self.sequence, TOKENS)
        self.assert_same(self.client.read(self.sequence), data)

    def test_quantized_values_are_near(self):
        data = random_kv()
        for kv_cache_dtype, most in (("fp8", 0.05), ("int8_per_token_head", 0.01), ("kivi4", 0.1), ("kivi2", 0.5)):
            with self.subTest(kv_cache_dtype):
                self.put(self.model(kv_cache_dtype), data)
                result = self.client.read(self.sequence, dtype="float32")
                for layer, sides in data.items():
                    for got, source in zip(result.layers[layer][:2], sides):
                        want = kvtier.to_float32(source, "bfloat16")
                        self.assertLess(np.linalg.norm(got - want) / np.linalg.norm(want), most)
                self.client.remove(self.sequence)

    def test_fp8_comes_with_its_scales(self):
        data = random_kv()
        scales = {layer: (np.full(HEADS, 0.02) * np.arange(1, HEADS + 1), 0.03) for layer in range(LAYERS)}
        self.put(self.model("fp8", scales=scales), data)
        layer = self.client.read(self.sequence, dtype="fp8_e4m3").layers[1]
        np.testing.assert_array_equal(layer.k_scale, np.float32(scales[1][0]))
        np.testing.assert_array_equal(layer.v_scale, np.float32([0.03]))
        exact = self.client.read(self.sequence, dtype="float32").layers[1]
        np.testing.assert_array_equal(kvtier.to_float32(layer.k, layer.dtype, layer.k_scale), exact.k)
        np.testing.assert_array_equal(kvtier.to_float32(layer.v, layer.dtype, layer.v_scale), exact.v)

    def test_query_scales_are_handed_on_and_magnitudes_observed(self):
        data = random_kv()
        scales = {layer: (0.02, 0.03, np.arange(1, HEADS + 1)) for layer in range(LAYERS)}
        model = self.model("fp8", scales=scales, scales_source="calibrated (here)")
        self.assertEqual(model.reply.scales_line, f"scales: calibrated {LAYERS} of {LAYERS} layers (here)")
        self.put(model, data)
        layer = self.client.read(self.sequence, dtype="float32", heads=range(1, 3)).layers[1]
        np.testing.assert_array_equal(layer.q_scale, np.float32([2, 3]))
        observed = self.client.scales(model).layers[1]
        self.assertEqual(observed.tokens, TOKENS)
        np.testing.assert_array_equal(np.float32(observed.k_scale), np.float32([0.02]))
        for amax, side in zip((observed.k_amax, observed.v_amax), data[1]):
            largest = np.abs(kvtier.to_float32(side, "bfloat16")).max(axis=(0, 2))
            np.testing.assert_array_equal(np.float32(amax), largest)

    def test_fp8_scales_are_measured_if_asked_for(self):
        data = random_kv()
        self.put(self.model(), data)
        layer = self.client.read(self.sequence, dtype="fp8_e4m3", measure_scales=True).layers[1]
        for scale, source in zip((layer.k_scale, layer.v_scale), data[1]):
            largest = np.abs(kvtier.to_float32(source, "bfloat16")).max(axis=(0, 2))
            np.testing.assert_allclose(scale, largest / 448, rtol=1e-6)

    def test_a_stream_resumes_where_it_stands(self):
        data = random_kv()
        model = self.model()
        with self.client.append(self.sequence, model) as stream:
            for layer, (k, v) in data.items():
                stream.send(layer, 0, k[:100], v[:100])
        with self.client.append(self.sequence, model) as stream:
            self.assertEqual(stream.received_tokens, 100)
            for layer, (k, v) in data.items():
                stream.send(layer, 100, k[100:], v[100:])
        self.client.seal(self.sequence, TOKENS)
        self.assert_same(self.client.read(self.sequence), data)

    def test_what_comes_after_a_seal_by_another_call_is_refused(self):
        data = random_kv()
        stream = self.client.append(self.sequence, self.model())
        for layer, (k, v) in data.items():
            stream.send(layer, 0, k, v)
        stream.flush()
        self.client.seal(self.sequence, TOKENS)
        with self.assertRaises(kvtier.KvTierError) as raised:
            stream.send(0, TOKENS, *data[0])
            stream.flush()
        self.assertEqual((raised.exception.code, raised.exception.reason), (grpc.StatusCode.FAILED_PRECONDITION, "SEALED"))
        self.assert_same(self.client.read(self.sequence), data)

    def test_a_large_array_is_split(self):
        model = self.client.register_model("wide", [kvtier.Layer(8, 128)])
        k = kvtier.from_float32(np.random.default_rng(1).standard_normal((3000, 8, 128), np.float32), "bfloat16")
        with self.client.append(self.sequence, model) as stream:
            stream.send(0, 0, k, k)  # 12 MB; the server takes 4 MiB at once
        np.testing.assert_array_equal(self.client.read(self.sequence).layers[0].v, k)

    def test_refusals_carry_code_and_reason(self):
        data = random_kv()
        model = self.model()
        with self.assertRaises(kvtier.KvTierError) as raised:
            with self.client.append(self.sequence, model) as stream:
                stream.send(0, 5, *data[0])
        self.assertEqual((raised.exception.code, raised.exception.reason), (grpc.StatusCode.OUT_OF_RANGE, "TOKEN_GAP"))
        self.assertIn("first_token is 5", raised.exception.message)
        with self.assertRaises(kvtier.KvTierError) as raised:
            self.client.read("nobody")
        self.assertEqual(raised.exception.reason, "UNKNOWN_SEQUENCE")
        with self.assertRaises(kvtier.KvTierError) as raised:
            kvtier.Client("127.0.0.1:1").capacity()
        self.assertEqual((raised.exception.code, raised.exception.reason), (grpc.StatusCode.UNAVAILABLE, ""))

    def test_wrong_arrays_are_refused_before_they_are_sent(self):
        k, v = random_kv()[0]
        with self.client.append(self.sequence, self.model()) as stream:
            for wrong in (k[:, :2], k.astype(np.float32), k.reshape(TOKENS, -1)):
                with self.assertRaisesRegex(ValueError, r"k of layer 0 is .*; want uint16\[tokens, 4, 64\]"):
                    stream.send(0, 0, wrong, v)
            with self.assertRaisesRegex(ValueError, "v has 299 tokens; k has 300"):
                stream.send(0, 0, k, v[1:])
            with self.assertRaisesRegex(ValueError, "layer is 3; want 0 to 2"):
                stream.send(3, 0, k, v)

    def test_lists_describes_and_counts(self):
        self.put(self.model("kivi4"), random_kv())
        self.assertIn(self.sequence, [info.sequence for info in self.client.list_sequences()])
        self.assertEqual(self.client.describe(self.sequence).info.committed_tokens, TOKENS)
        self.assertGreater(self.client.capacity(self.model("kivi4")).models[0].compression_ratio, 1)


if __name__ == "__main__":
    unittest.main()
