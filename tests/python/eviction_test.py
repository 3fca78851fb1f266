"""A full server: what goes, what stays, and what a reader is told, by the Python client against a real kvtierd."""

import pathlib
import sys
import time
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

LAYERS, HEADS, DIM, TOKENS, PAGE = 2, 2, 64, 256, 64
EACH = LAYERS * 2 * TOKENS * HEADS * DIM * 2  # bytes of a sequence's values
DEADLINE_S = 10


class FullServerCase(RefusalCase):
    flags = ()

    def setUp(self):
        self.server = LiveServer("2MiB", *self.flags)  # of seven sequences, and a little
        self.addCleanup(self.server.stop)
        self.client = kvtier.Client(self.server.address)
        self.addCleanup(self.client.close)
        self.model = self.client.register_model("m", [kvtier.Layer(HEADS, DIM)] * LAYERS, page_tokens=PAGE)
        random = np.random.default_rng(7)
        values = random.standard_normal((LAYERS, 2, TOKENS, HEADS, DIM), np.float32)
        self.data = kvtier.from_float32(values, "bfloat16")

    def put(self, number, client=None, seal=True):
        client = client or self.client
        prompt = kvtier.Prompt(token_ids=np.arange(TOKENS, dtype=np.uint32) + 1000 * number)
        with client.append(str(number), self.model, prompt=prompt) as stream:
            for layer, (k, v) in enumerate(self.data):
                stream.send(layer, 0, k, v)
        if seal:
            client.seal(str(number), TOKENS)
        return prompt

    def held(self, number):
        try:
            return self.client.describe(str(number)).info.committed_tokens
        except kvtier.KvTierError as error:
            self.assertEqual(error.reason, "UNKNOWN_SEQUENCE")
            return 0


class EvictionTest(FullServerCase):
    def test_the_coldest_goes_and_a_prefix_stays(self):
        prompts = [self.put(i) for i in range(7)]
        self.client.read("0")
        number = 7
        while self.held(1) == TOKENS:
            prompts.append(self.put(number))
            number += 1
        self.assertEqual(self.held(0), TOKENS)  # it was read last
        left = self.held(1)
        self.assertEqual(left % PAGE, 0)
        self.assertGreater(left, 0)
        self.assertEqual(self.client.lookup(self.model, [prompts[1]]), [left])
        self.assertIn(f"from token {left} on", self.assert_refused("EVICTED", lambda: self.client.read("1")))
        with self.client.acquire(self.model, prompts[1]) as lease:
            self.assertEqual(lease.tokens, left)
            layers = self.client.read(lease).layers
            for layer, (k, v) in enumerate(self.data):
                np.testing.assert_array_equal(layers[layer].k, k[:left])
                np.testing.assert_array_equal(layers[layer].v, v[:left])
        for i in range(number, number + 14):
            self.put(i)
        self.assertEqual(self.held(1), 0)

    def test_what_is_open_stays(self):
        for i in range(7):
            self.put(i, seal=False)
        self.assert_refused("BUDGET", lambda: self.put(7))
        self.client.seal("3", TOKENS)
        self.client.remove("7")
        self.put(8)
        self.assertEqual([self.held(i) == TOKENS for i in range(7)], [True] * 3 + [False] + [True] * 3)

    def test_pins(self):
        self.put(0)
        self.put(1)
        hard = self.client.pin(sequence="0", hard=True)
        soft = self.client.pin(sequence="1", duration_s=60)
        self.assertEqual((hard.tokens, soft.tokens), (TOKENS, TOKENS))
        for i in range(2, 20):
            self.put(i)
        self.assertEqual((self.held(0), self.held(1)), (TOKENS, TOKENS))
        hard.unpin()
        soft.unpin()
        for i in range(20, 40):
            self.put(i)
        self.assertEqual((self.held(0), self.held(1)), (0, 0))
        self.assertIn("duration_ms", self.assert_refused("INVALID_FIELD", lambda: self.client.pin(duration_s=1e9)))
        self.assertIn("neither prompt", self.assert_refused("INVALID_FIELD", self.client.pin))

    def test_a_namespace_at_its_quota_evicts_its_own(self):
        with kvtier.Client(self.server.address, namespace="other") as other:
            self.assertEqual(other.quota(), (0, 0))
            quota, held = other.set_quota(3 * EACH)
            self.assertEqual((quota, held), (3 * EACH, 0))
            for i in range(3):
                self.put(i)
            for i in range(20):
                self.put(i, other)
                self.assertLessEqual(other.quota()[1], 3 * EACH)
            self.assertEqual([self.held(i) for i in range(3)], [TOKENS] * 3)
            for i in range(100, 102):
                self.put(i, other, seal=False)
            self.assert_refused("QUOTA", lambda: self.put(102, other))
            self.assertEqual(other.set_quota(0)[0], 0)
            other.remove("102")
            self.put(103, other)

    def test_truncate(self):
        with self.client.append("a", self.model) as stream:
            stream.send(0, 0, *self.data[0])
            stream.send(1, 0, *self.data[1])
        self.client.truncate("a", 100)
        self.assertEqual(self.held("a"), 100)
        other = self.client.append("a", self.model, writer_epoch=1)
        self.assertEqual(other.received_tokens, 100)
        for layer, (k, v) in enumerate(self.data):
            other.send(layer, 100, v[100:], k[100:])
        other.flush()
        self.client.truncate("a", 200, writer_epoch=1)

        def send_more():
            other.send(0, 200, self.data[0][0][200:], self.data[0][1][200:])
            other.flush()

        self.assert_refused("OLD_EPOCH", send_more)
        layer = self.client.read("a").layers[0]
        np.testing.assert_array_equal(layer.k, np.concatenate([self.data[0][0][:100], self.data[0][1][100:200]]))
        self.assertIn("201", self.assert_refused("PAST_COMMITTED", lambda: self.client.truncate("a", 201, 1)))
        self.assert_refused("OLD_EPOCH", lambda: self.client.truncate("a", 10, 0))


class IdleTest(FullServerCase):
    flags = ("--idle-ttl=2s", "--eviction=s3-fifo")

    def test_what_nobody_uses_goes(self):
        self.put(0)
        self.put(1)
        pin = self.client.pin(sequence="1", hard=True)
        deadline = time.monotonic() + DEADLINE_S
        while self.held(0) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.assertEqual((self.held(0), self.held(1)), (0, TOKENS))
        pin.unpin()


class NoEvictionTest(FullServerCase):
    flags = ("--eviction=none",)

    def test_what_does_not_fit_is_refused(self):
        for i in range(7):
            self.put(i)
        self.assertIn("memory budget", self.assert_refused("BUDGET", lambda: self.put(7)))
        self.assertEqual([self.held(i) for i in range(7)], [TOKENS] * 7)


if __name__ == "__main__":
    unittest.main()
