"""What each format loses: of K and V of a real model, and of rows with heavy tails whose heads differ in size."""

import json
import pathlib
import sys
import unittest

try:
    import numpy as np
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed") from None

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))
import kvtier
from live_server import LiveServer

# format -> largest |x' - x| / |x| over a head: K and V of the capture, K of heavy tails. Measured, and a tenth more.
BUDGETS = {
    "fp8_e4m3": (0.031, 0.032, 0.030),
    "fp8_e5m2": (0.060, 0.065, 0.055),
    "fp8_e4m3(scale=page)": (0.030, 0.030, 0.029),
    "int8_per_token_head": (0.016, 0.015, 0.013),
    "fp8_per_token_head": (0.027, 0.028, 0.023),
    "int4_per_token_head": (0.102, 0.103, 0.093),
    "nvfp4": (0.107, 0.106, 0.101),
    "nvfp4_4over6": (0.102, 0.100, 0.100),
    "q8_0": (0.012, 0.012, 0.012),
    "q4_0": (0.176, 0.169, 0.178),
    "q4_0(k_rotation=hadamard)": (0.096, 0.169, 0.088),
    "kivi4": (0.064, 0.103, 0.070),
    "kivi2": (0.323, 0.542, 0.358),
    "kivi2(scales=fp8_e4m3)": (0.348, 0.605, 0.381),
}


def setUpModule():
    global server
    server = LiveServer()


def tearDownModule():
    server.stop()


def capture():
    """{layer: (k, v)} of SmolLM2-135M as float32 [tokens, heads, dim], rounded to bfloat16."""
    raw = (ROOT / "tests/data/smollm2-135m-kv.safetensors").read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    tensors = {}
    for name, tensor in header.items():
        if name == "__metadata__" or not name.endswith((".k", ".v")):
            continue
        begin, stop = (end + offset for offset in tensor["data_offsets"])
        tensors[name] = np.frombuffer(raw[begin:stop], np.uint16).reshape(tensor["shape"])
    layers = sorted({int(name.split(".")[1]) for name in tensors})
    return [(tensors[f"layers.{layer}.k"], tensors[f"layers.{layer}.v"]) for layer in layers]


def heavy_tails(tokens=512, heads=4, dim=64):
    """K of Student's t with 3 degrees of freedom, a few channels that lie far out, heads of sizes from 1/64 to 8."""
    random = np.random.default_rng(11)
    k = random.standard_t(3, (tokens, heads, dim)).astype(np.float32)
    k[:, :, [5, 40]] += 12
    k = np.clip(k, -40, 40) * np.array([1 / 64, 1 / 4, 1, 8], np.float32)[:, None]
    return kvtier.from_float32(k, "bfloat16")


def error_by_head(got, stored):
    want = kvtier.to_float32(stored, "bfloat16")
    return np.linalg.norm(got - want, axis=(0, 2)) / np.linalg.norm(want, axis=(0, 2))


class QualityTest(unittest.TestCase):
    def errors(self, client, kv_cache_dtype, layers):
        """The largest error of a head, of K and of V."""
        spec = [kvtier.Layer(k.shape[1], k.shape[2]) for k, _ in layers]
        model = client.register_model("m", spec, kv_cache_dtype=kv_cache_dtype)
        with client.append(self.id(), model) as stream:
            for layer, (k, v) in enumerate(layers):
                stream.send(layer, 0, k, v)
        client.seal(self.id(), len(layers[0][0]))
        result = client.read(self.id(), dtype="float32")
        client.remove(self.id())
        pairs = [(result.layers[layer], sides) for layer, sides in enumerate(layers)]
        return tuple(max(error_by_head(got[side], sides[side]).max() for got, sides in pairs) for side in (0, 1))

    def test_formats_lose_what_they_are_known_to(self):
        real, tails = capture(), heavy_tails()
        with kvtier.Client(server.address) as client:
            for kv_cache_dtype, (most_k, most_v, most_of_tails) in BUDGETS.items():
                with self.subTest(kv_cache_dtype):
                    k, v = self.errors(client, kv_cache_dtype, real)
                    self.assertLessEqual(k, most_k)
                    self.assertLessEqual(v, most_v)
                    self.assertLessEqual(self.errors(client, kv_cache_dtype, [(tails, tails)])[0], most_of_tails)


if __name__ == "__main__":
    unittest.main()
