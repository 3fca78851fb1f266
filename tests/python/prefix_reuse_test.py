"""Prompts that begin alike, leases and forks, by the Python client against a real kvtierd."""

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

LAYERS, HEADS, DIM, TOKENS, PAGE = 2, 2, 64, 300, 128


def setUpModule():
    global server
    server = LiveServer()


def tearDownModule():
    server.stop()


class PrefixReuseTest(RefusalCase):
    def setUp(self):
        self.client = kvtier.Client(server.address)
        self.addCleanup(self.client.close)
        self.model = self.client.register_model("m", [kvtier.Layer(HEADS, DIM)] * LAYERS, page_tokens=PAGE)
        random = np.random.default_rng(len(self.id()))
        self.data = random.standard_normal((LAYERS, 2, TOKENS, HEADS, DIM), np.float32)
        # Token ids of this test alone.
        self.ids = random.integers(0, 2**32, TOKENS, np.uint32)
        self.free = self.client.capacity().memory.free

    def prompt(self, tokens=TOKENS, **options):
        return kvtier.Prompt(token_ids=self.ids[:tokens], **options)

    def put(self, sequence, tokens, prompt=None, data=None):
        data = self.data if data is None else data
        with self.client.append(sequence, self.model, prompt=prompt) as stream:
            first = stream.received_tokens
            for layer, (k, v) in enumerate(data):
                k, v = (kvtier.from_float32(x[first:tokens], "bfloat16") for x in (k, v))
                stream.send(layer, first, k, v)
        return first

    def assert_reads(self, sequence, tokens, data=None):
        data = self.data if data is None else data
        result = self.client.read(sequence)
        self.assertEqual(result.tokens, tokens)
        for layer, (k, v) in enumerate(data):
            for got, want in ((result.layers[layer].k, k), (result.layers[layer].v, v)):
                np.testing.assert_array_equal(got, kvtier.from_float32(want[:tokens], "bfloat16"))

    def test_a_prefix_is_found_and_shared(self):
        self.assertEqual(self.client.lookup(self.model, [self.prompt()]), [0])
        self.assertEqual(self.put("a", 290, self.prompt(290)), 0)
        other = self.ids.copy()
        other[200:] += 1
        parted = kvtier.Prompt(token_ids=other)
        found = self.client.lookup(self.model, [self.prompt(), parted, self.prompt(salt=b"s"), self.prompt(40)])
        self.assertEqual(found, [288, 192, 0, 32])
        data = self.data.copy()
        data[:, :, 200:] += 1
        self.assertEqual(self.put("b", TOKENS, parted, data), PAGE)
        self.assert_reads("b", TOKENS, data)
        self.assert_reads("a", 290)
        self.client.remove("a")
        self.assert_reads("b", TOKENS, data)
        self.client.remove("b")
        self.assertEqual(self.client.capacity().memory.free, self.free)

    def test_a_lease_keeps_what_is_removed(self):
        self.put("a", TOKENS, self.prompt())
        with self.client.acquire(self.model, self.prompt(200)) as lease:
            self.assertEqual(lease.tokens, 192)
            self.client.remove("a")
            self.assert_reads(lease, 192)
            lease.renew(5)
            self.assert_reads(lease, 192)
        self.assert_refused("LEASE_ENDED", lambda: self.client.read(lease))
        self.assertEqual(self.client.capacity().memory.free, self.free)

    def test_a_lease_expires(self):
        self.put("a", TOKENS, self.prompt())
        lease = self.client.acquire(sequence="a", duration_s=2)
        self.client.remove("a")
        self.assert_reads(lease, TOKENS)
        time.sleep(2.1)
        self.assert_refused("LEASE_ENDED", lambda: self.client.read(lease))
        self.assert_refused("LEASE_ENDED", lease.renew)
        deadline = time.monotonic() + 10
        while self.client.capacity().memory.free < self.free and time.monotonic() < deadline:
            time.sleep(0.1)
        self.assertEqual(self.client.capacity().memory.free, self.free)
        lease.release()

    def test_nothing_held_is_no_error(self):
        lease = self.client.acquire(self.model, self.prompt())
        self.assertEqual((lease.id, lease.tokens), (0, 0))
        with self.assertRaisesRegex(ValueError, "holds nothing"):
            self.client.read(lease)

    def test_forks_go_their_own_way(self):
        self.put("a", 200)
        self.assertEqual(self.client.fork("a", "b"), 200)
        self.assertEqual(self.client.fork("a", "c", tokens=190), PAGE)
        data = self.data.copy()
        data[:, :, 200:] += 1
        self.assertEqual(self.put("b", TOKENS, data=data), 200)
        self.assertEqual(self.put("a", 250), 200)
        self.assert_reads("b", TOKENS, data)
        self.assert_reads("a", 250)
        self.assert_reads("c", PAGE)
        for sequence in "abc":
            self.client.remove(sequence)

    def test_bad_input_names_the_field(self):
        self.put("a", 100, self.prompt(100))
        refused = self.assert_refused
        both = kvtier.Prompt(token_ids=[1], block_hashes=(b"h",))
        self.assertIn("token_ids", refused("INVALID_FIELD", lambda: self.client.lookup(self.model, [both])))
        self.assertIn("prompts has 0", refused("INVALID_FIELD", lambda: self.client.lookup(self.model, [])))
        self.assertIn("neither prompt nor", refused("INVALID_FIELD", self.client.acquire))
        self.assertIn(
            "duration_ms is 3600000",
            refused("INVALID_FIELD", lambda: self.client.acquire(sequence="a", duration_s=3600)),
        )
        self.assertIn("new_sequence", refused("SEQUENCE_EXISTS", lambda: self.client.fork("a", "a")))
        self.assertIn("new_sequence has 0", refused("INVALID_FIELD", lambda: self.client.fork("a", "")))
        self.assertIn("100 committed", refused("PAST_COMMITTED", lambda: self.client.fork("a", "b", tokens=101)))
        another = kvtier.Prompt(token_ids=self.ids[::-1])
        refused("PROMPT_MISMATCH", lambda: self.client.append("a", self.model, prompt=another))
        self.client.remove("a")


if __name__ == "__main__":
    unittest.main()
