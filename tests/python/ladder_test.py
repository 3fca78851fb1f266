"""What a namespace that takes the ladder keeps under pressure, by the Python client against a real kvtierd."""

import pathlib
import sys
import unittest

try:
    import grpc  # noqa: F401
    import numpy as np
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed") from None

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
import kvtier
from live_server import LiveServer
from refusal_case import RefusalCase

LAYERS, HEADS, DIM, TOKENS, PAGE = 2, 2, 64, 256, 128
EACH = LAYERS * 2 * TOKENS * HEADS * DIM * 2  # bytes of a sequence's values
FIT = 8  # sequences at source precision


class LadderTest(RefusalCase):
    def setUp(self):
        self.server = LiveServer(f"{(FIT + 1) * EACH // 1024}KiB")
        self.addCleanup(self.server.stop)
        self.client = kvtier.Client(self.server.address)
        self.addCleanup(self.client.close)
        self.model = self.client.register_model("m", [kvtier.Layer(HEADS, DIM)] * LAYERS, page_tokens=PAGE)
        values = np.random.default_rng(3).standard_normal((2, LAYERS, TOKENS, HEADS, DIM), np.float32)
        self.data = kvtier.from_float32(values, "bfloat16")

    def put(self, sequence):
        with self.client.append(sequence, self.model) as stream:
            for layer in range(LAYERS):
                stream.send(layer, 0, *self.data[:, layer])
        self.client.seal(sequence, TOKENS)

    def readable(self):
        return sum(info.committed_tokens for info in self.client.list_sequences())

    def error(self, sequence):
        read = self.client.read(sequence, dtype="float32")
        want = kvtier.to_float32(self.data, "bfloat16")
        got = np.stack([[read.layers[layer][side] for layer in range(LAYERS)] for side in (0, 1)])
        return np.linalg.norm(got - want) / np.linalg.norm(want)

    def test_tokens_stay_in_fewer_bits(self):
        self.assertEqual(self.client.set_pressure("ladder"), ["fp8_e4m3(scale=page)", "k4v2", "kivi2"])
        for i in range(3 * FIT):
            self.put(f"s{i}")
        self.assertEqual(self.readable(), 3 * FIT * TOKENS)
        lowered = {entry.kv_cache_dtype: entry.pages for entry in self.client.describe("s0").info.lowered}
        self.assertEqual(sum(lowered.values()), TOKENS // PAGE)
        self.assertGreater(self.error("s0"), 0.01)
        self.assertLess(self.error("s0"), 0.6)
        self.assertEqual(self.error(f"s{3 * FIT - 1}"), 0)

    def test_without_it_tokens_go(self):
        for i in range(3 * FIT):
            self.put(f"s{i}")
        self.assertLessEqual(self.readable(), (FIT + 1) * TOKENS)
        self.assertEqual(self.error(f"s{3 * FIT - 1}"), 0)
        self.assertEqual(self.client.set_pressure("evict"), [])

    def test_a_pressure_that_cannot_be(self):
        with self.assertRaisesRegex(ValueError, "pressure is 'squeeze'; want one of evict, ladder"):
            self.client.set_pressure("squeeze")


if __name__ == "__main__":
    unittest.main()
