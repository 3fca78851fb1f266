"""A decode worker that reads while a prefill worker still writes, by the Python client against a real kvtierd."""

import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
import unittest

try:
    import grpc
    import numpy as np
except ImportError as missing:
    raise unittest.SkipTest(f"{missing.name} is not installed") from None

PYTHON = pathlib.Path(__file__).resolve().parents[2] / "python"
sys.path.insert(0, str(PYTHON))
import kvtier
from kvtier.v1 import kv_tier_pb2 as pb
from kvtier.v1 import kv_tier_pb2_grpc as rpc
from live_server import LiveServer
from refusal_case import RefusalCase

LAYERS, HEADS, DIM, TOKENS = 3, 2, 64, 512
BOUND_S = 20  # a slow machine's; what is waited for takes a second or two

# Sends one layer, says so, and waits to be killed.
WRITER = f"""
import sys, time
sys.path.insert(0, {str(PYTHON)!r})
import numpy as np, kvtier
client = kvtier.Client(sys.argv[1])
model = client.register_model("m", [kvtier.Layer({HEADS}, {DIM})] * {LAYERS})
zeros = np.zeros(({TOKENS}, {HEADS}, {DIM}), np.uint16)
stream = client.append("s", model)
stream.send(0, 0, zeros, zeros)
stream.flush()
print("sent", flush=True)
time.sleep(600)
"""


class Follower(threading.Thread):
    """Follows in a thread of its own: pieces come in a queue, then how it ended, a number of tokens or an error."""

    def __init__(self, client, sequence, **options):
        super().__init__(daemon=True)
        self.pieces = queue.Queue()
        self._follow = client.follow(sequence, **options)
        self.start()

    def run(self):
        try:
            for piece in self._follow:
                self.pieces.put(piece)
            self.pieces.put(self._follow.tokens)
        except kvtier.KvTierError as error:
            self.pieces.put(error)

    def next(self):
        return self.pieces.get(timeout=BOUND_S)

    def close(self):
        self._follow.close()
        self.join(BOUND_S)


class FollowCase(RefusalCase):
    flags = ("--open-sequence-deadline=2s",)

    def setUp(self):
        self.server = LiveServer("64MiB", *self.flags)
        self.addCleanup(self.server.stop)
        self.client = kvtier.Client(self.server.address)
        self.addCleanup(self.client.close)
        self.model = self.client.register_model("m", [kvtier.Layer(HEADS, DIM)] * LAYERS)
        values = np.random.default_rng(3).standard_normal((LAYERS, 2, TOKENS, HEADS, DIM), np.float32)
        self.data = kvtier.from_float32(values, "bfloat16")

    def follow(self, sequence="s", **options):
        follower = Follower(self.client, sequence, **options)
        self.addCleanup(follower.close)
        return follower

    def take(self, follower, layer, first, until):
        """Takes what comes of a layer until it has all."""
        while first < until:
            piece = follower.next()
            self.assertIsInstance(piece, kvtier.Piece)
            self.assertEqual((piece.layer, piece.first_token), (layer, first))
            np.testing.assert_array_equal(piece.k, self.data[layer][0][first : first + len(piece.k)])
            np.testing.assert_array_equal(piece.v, self.data[layer][1][first : first + len(piece.v)])
            first += len(piece.k)
        self.assertEqual(first, until)


class FollowTest(FollowCase):
    def test_a_layer_comes_before_the_next_was_sent(self):
        with self.client.append("s", self.model) as stream:
            followers = [self.follow(), self.follow(num_tokens=TOKENS)]
            for layer, (k, v) in enumerate(self.data):
                stream.send(layer, 0, k, v)
                for follower in followers:
                    self.take(follower, layer, 0, TOKENS)
                if layer == 0:
                    self.assertEqual(self.client.describe("s").info.committed_tokens, 0)
        self.assertEqual(followers[1].next(), TOKENS)  # before it is sealed
        self.assertTrue(followers[0].pieces.empty())
        self.client.seal("s", TOKENS)
        self.assertEqual(followers[0].next(), TOKENS)
        whole = self.follow(layers=range(1, 2), first_token=100)
        self.take(whole, 1, 100, TOKENS)
        self.assertEqual(whole.next(), TOKENS - 100)

    def test_writers_may_take_over(self):
        follower = None
        for epoch, begin in enumerate(range(0, 50, 10)):
            with self.client.append("s", self.model, writer_epoch=epoch) as stream:
                follower = follower or self.follow()
                for layer, (k, v) in enumerate(self.data):
                    stream.send(layer, begin, k[begin : begin + 10], v[begin : begin + 10])
                    self.take(follower, layer, begin, begin + 10)

    def test_heads_layouts_and_dtypes(self):
        with self.client.append("s", self.model) as stream:
            follow = self.client.follow("s", "float32", "HND", heads=range(1, 2), num_tokens=100)
            for layer, (k, v) in enumerate(self.data):
                stream.send(layer, 0, k, v)
            got = np.zeros((LAYERS, 2, 1, 100, DIM), np.float32)
            for layer, first, k, v in follow:
                got[layer, 0, :, first : first + k.shape[1]] = k
                got[layer, 1, :, first : first + k.shape[1]] = v
        self.assertEqual(follow.tokens, 100)
        want = kvtier.to_float32(self.data, "bfloat16")[:, :, :100, 1:].transpose(0, 1, 3, 2, 4)
        np.testing.assert_array_equal(got, want)
        self.assertEqual(follow.manifest.layers[2].num_heads, 1)

    def test_a_killed_writer_ends_it(self):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, self.server.address], stdout=subprocess.PIPE, text=True)
        self.addCleanup(writer.stdout.close)
        self.addCleanup(writer.wait)
        self.addCleanup(writer.kill)
        self.assertEqual(writer.stdout.readline().strip(), "sent")
        follower = self.follow()
        self.assertEqual(follower.next().layer, 0)
        os.kill(writer.pid, signal.SIGKILL)
        while isinstance(ended := follower.next(), kvtier.Piece):
            self.assertEqual(ended.layer, 0)
        self.assertEqual((ended.code, ended.reason), (grpc.StatusCode.ABORTED, "SEQUENCE_GONE"))
        self.assertIn("had no message for 2s", ended.message)

    def test_what_drops_a_sequence_ends_it(self):
        for name, drop in (("aborted", self.client.abort), ("removed", self.client.remove)):
            stream = self.client.append(name, self.model)
            stream.send(0, 0, *self.data[0])
            follower = self.follow(name)
            self.take(follower, 0, 0, TOKENS)
            drop(name)
            self.assertEqual(follower.next().reason, "SEQUENCE_GONE")

    def test_a_reader_that_goes_costs_the_writer_nothing(self):
        free = self.client.capacity().memory.free
        with self.client.append("s", self.model) as stream:
            for _ in range(20):
                self.client.follow("s").close()
            follower = self.follow()
            for layer, (k, v) in enumerate(self.data):
                stream.send(layer, 0, k, v)
                self.take(follower, layer, 0, TOKENS)
            follower.close()
        self.client.remove("s")
        deadline = time.monotonic() + BOUND_S
        while self.client.capacity().memory.free != free:
            self.assertLess(time.monotonic(), deadline, "the memory did not come back")
            time.sleep(0.05)

    def test_refusals(self):
        self.assert_refused("UNKNOWN_SEQUENCE", lambda: self.client.follow("s"))
        with self.client.append("s", self.model) as stream:
            for layer, (k, v) in enumerate(self.data):
                stream.send(layer, 0, k[:10], v[:10])
        lease = self.client.acquire(sequence="s")
        self.addCleanup(lease.release)
        stub = rpc.KvTierServiceStub(self.client._channel)

        def refused(text, **fields):
            fields = {"sequences": [pb.SequenceRange(sequence="s")], "follow": True, **fields}

            def read():
                with kvtier.errors.rpc_errors():
                    next(stub.Read(pb.ReadRequest(**fields)))

            self.assertIn(text, self.assert_refused("INVALID_FIELD", read))

        refused("as is STORED", **{"as": pb.READ_AS_STORED})
        refused("measure_scales", **{"as": pb.READ_AS_FP8_E4M3, "measure_scales": True})
        refused(f"lease_id is {lease.id}", sequences=[pb.SequenceRange(lease_id=lease.id)])
        refused("sequences has 0", sequences=[])
        longer = self.follow(num_tokens=11)
        for layer in range(LAYERS):
            self.take(longer, layer, 0, 10)
        self.client.seal("s", 10)
        self.assertEqual(longer.next().reason, "PAST_COMMITTED")


class LeaseEndTest(FollowCase):
    flags = ("--max-lease=2s",)

    def test_it_ends_with_its_lease_though_nothing_comes(self):
        stream = self.client.append("s", self.model)
        stream.send(0, 0, *self.data[0])
        follower = self.follow()
        self.take(follower, 0, 0, TOKENS)
        ended = follower.next()
        self.assertEqual((ended.code, ended.reason), (grpc.StatusCode.ABORTED, "LEASE_ENDED"))


if __name__ == "__main__":
    unittest.main()
