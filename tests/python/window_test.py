"""Models that keep of their sliding-window layers what a window sees, by the Python client against a real kvtierd."""

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

HEADS, DIM, TOKENS, PAGE, WINDOW = 2, 64, 1000, 64, 100
LAYERS = [kvtier.Layer(HEADS, DIM), kvtier.Layer(HEADS, DIM, kind="sliding_window", window=WINDOW)]


class WindowTest(RefusalCase):
    @classmethod
    def setUpClass(cls):
        cls.server = LiveServer()
        cls.client = kvtier.Client(cls.server.address)
        cls.prompt = kvtier.Prompt(token_ids=list(range(TOKENS)))
        values = np.random.default_rng(1).standard_normal((2, len(LAYERS), TOKENS, HEADS, DIM), np.float32)
        cls.data = kvtier.from_float32(values, "bfloat16")
        for retention in ("all", "window"):
            cls.put(retention, retention)

    @classmethod
    def tearDownClass(cls):
        cls.client.close()
        cls.server.stop()

    @classmethod
    def put(cls, sequence, retention):
        model = cls.client.register_model("m", LAYERS, page_tokens=PAGE, retention=retention)
        with cls.client.append(sequence, model, prompt=cls.prompt) as stream:
            for layer in range(len(LAYERS)):
                stream.send(layer, 0, *cls.data[:, layer])
        cls.client.seal(sequence, TOKENS)
        return model

    def held(self, sequence):
        memory = self.client.describe(sequence).info.memory
        return sum(getattr(memory, part) for part in ("codes", "scales", "residual", "header", "slack"))

    def test_what_the_window_sees_is_read_whatever_is_kept(self):
        for sequence in ("all", "window"):
            for layout, axis in (("NHD", 0), ("HND", 1)):
                read = self.client.read(sequence, layout=layout, within_windows=True)
                self.assertEqual((read.first_token, read.tokens), (0, TOKENS))
                self.assertEqual([read.layers[layer].first_token for layer in (0, 1)], [0, TOKENS - WINDOW])
                for layer, first in ((0, 0), (1, TOKENS - WINDOW)):
                    for side, got in enumerate(read.layers[layer][:2]):
                        np.testing.assert_array_equal(np.moveaxis(got, axis, 0), self.data[side, layer, first:])
        read = self.client.read("window", tokens=range(TOKENS - 50, TOKENS), within_windows=True)
        self.assertEqual(read.layers[1].first_token, TOKENS - 50)

    def test_fewer_bytes_are_held(self):
        first = (TOKENS - WINDOW - 16) // PAGE * PAGE
        gone = first // PAGE * 2 * (PAGE * HEADS * DIM * 2 + 128)
        self.assertAlmostEqual(self.held("all") - self.held("window"), gone, delta=first // PAGE * 256)

    def test_what_went_is_not_found(self):
        said = self.assert_refused("BEHIND_WINDOW", lambda: self.client.read("window"))
        self.assertRegex(said, "tokens before [0-9]+ of layer 1 .* its window is 100")
        self.assertEqual(self.client.read("window", layers=range(0, 1)).layers[0].k.shape[0], TOKENS)
        said = self.assert_refused("BEHIND_WINDOW", lambda: self.client.fork("window", "f", 512))
        self.assertIn("tokens is 512", said)

    def test_a_prompt_hits_near_its_end(self):
        for retention, shorter in (("all", 496), ("window", 0)):
            model = self.client.register_model("m", LAYERS, page_tokens=PAGE, retention=retention)
            half = kvtier.Prompt(token_ids=list(range(500)))
            self.assertEqual(self.client.lookup(model, [self.prompt, half]), [TOKENS // 16 * 16, shorter])
        with self.client.acquire(prompt=self.prompt, model=model) as lease:
            read = self.client.read(lease, within_windows=True)
            self.assertEqual(read.layers[1].first_token, lease.tokens - WINDOW)

    def test_bad_input(self):
        with self.assertRaisesRegex(ValueError, "retention is 'some'; want one of all, window"):
            self.client.register_model("m", LAYERS, retention="some")


if __name__ == "__main__":
    unittest.main()
