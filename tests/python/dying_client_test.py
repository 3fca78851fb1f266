"""Clients that die, cancel and abort against a real kvtierd: what they had comes back, and nobody else notices."""

import os
import pathlib
import signal
import subprocess
import sys
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

LAYERS, HEADS, DIM, TOKENS = 2, 2, 64, 512
BOUND_S = 20  # a slow machine's; what is waited for takes a second or two

# Sends its first tokens, says so, and waits to be killed.
WRITER = f"""
import sys, time
sys.path.insert(0, {str(PYTHON)!r})
import numpy as np, kvtier
client = kvtier.Client(sys.argv[1])
model = client.register_model("m", [kvtier.Layer({HEADS}, {DIM})] * {LAYERS})
data = np.load(sys.argv[2])
stream = client.append(sys.argv[3], model, writer_epoch=int(sys.argv[4]))
for layer in range({LAYERS}):
    stream.send(layer, 0, *(kvtier.from_float32(x[:100], "bfloat16") for x in data[layer]))
stream.flush()
print("sent", flush=True)
time.sleep(600)
"""


class DyingClientTest(RefusalCase):
    def setUp(self):
        self.server = LiveServer("64MiB", "--open-sequence-deadline=2s")
        self.addCleanup(self.server.stop)
        self.client = kvtier.Client(self.server.address)
        self.addCleanup(self.client.close)
        self.model = self.client.register_model("m", [kvtier.Layer(HEADS, DIM)] * LAYERS)
        random = np.random.default_rng(11)
        self.values = random.standard_normal((LAYERS, 2, TOKENS, HEADS, DIM), np.float32)
        self.data = kvtier.from_float32(self.values, "bfloat16")
        self.free = self.client.capacity().memory.free

    def start_writer(self, sequence, epoch=0):
        path = pathlib.Path(self.server.folder) / "values.npy"
        np.save(path, self.values)
        command = [sys.executable, "-c", WRITER, self.server.address, str(path), sequence, str(epoch)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.addCleanup(writer.stdout.close)
        self.addCleanup(writer.wait)
        self.addCleanup(writer.kill)
        self.assertEqual(writer.stdout.readline().strip(), "sent")
        return writer

    def put(self, sequence, first=0, tokens=TOKENS, epoch=0):
        with self.client.append(sequence, self.model, writer_epoch=epoch) as stream:
            for layer, (k, v) in enumerate(self.data):
                stream.send(layer, first, k[first:tokens], v[first:tokens])

    def wait_for(self, what, is_so):
        deadline = time.monotonic() + BOUND_S
        while not is_so():
            self.assertLess(time.monotonic(), deadline, what)
            time.sleep(0.05)

    def wait_for_free_memory(self):
        self.wait_for("the memory did not come back", lambda: self.client.capacity().memory.free == self.free)

    def test_a_killed_writer_goes_on_with_a_higher_epoch(self):
        stale = self.start_writer("a", epoch=1)
        killed = self.start_writer("b", epoch=1)
        os.kill(killed.pid, signal.SIGKILL)
        for sequence in "ab":
            stream = self.client.append(sequence, self.model, writer_epoch=2)
            self.assertEqual(stream.received_tokens, 100)
            for layer, (k, v) in enumerate(self.data):
                stream.send(layer, 100, k[100:], v[100:])
            stream.close()
            self.client.seal(sequence, TOKENS)
            layer = self.client.read(sequence).layers[1]
            np.testing.assert_array_equal(layer.k, self.data[1][0])
            np.testing.assert_array_equal(layer.v, self.data[1][1])
        self.assert_refused("SEALED", lambda: self.client.append("a", self.model, writer_epoch=1))
        stale.kill()

    def test_an_older_epoch_comes_too_late(self):
        self.start_writer("a", epoch=1).kill()
        self.put("a", 100, 200, epoch=2)
        self.assert_refused("OLD_EPOCH", lambda: self.client.append("a", self.model, writer_epoch=1))

    def test_what_a_killed_writer_left_is_given_up_and_its_name_is_free(self):
        os.kill(self.start_writer("a").pid, signal.SIGKILL)
        self.assertLess(self.client.capacity().memory.free, self.free)
        self.wait_for_free_memory()
        self.put("a")
        self.client.seal("a", TOKENS)

    def test_a_cancelled_read_holds_nothing(self):
        self.put("a")
        self.client.seal("a", TOKENS)
        with grpc.insecure_channel(self.server.address) as channel:
            stub = rpc.KvTierServiceStub(channel)
            for _ in range(20):
                request = pb.ReadRequest(sequences=[pb.SequenceRange(sequence="a")])
                call = stub.Read(request)
                next(call)
                call.cancel()
        self.client.remove("a")
        self.wait_for_free_memory()

    def test_a_thousand_aborts_strand_nothing(self):
        random = np.random.default_rng(5)
        for i in range(1000):
            tokens = int(random.integers(1, 40))
            stream = self.client.append("a", self.model)
            stream.send(0, 0, self.data[0][0][:tokens], self.data[0][1][:tokens])
            if i % 2:
                stream.flush()
            self.client.abort("a")
        self.wait_for_free_memory()

    def test_health_is_not_the_clients(self):
        writers = [self.start_writer(str(i)) for i in range(3)]
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
        with grpc.insecure_channel(self.server.health_address) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            deadline = time.monotonic() + 4  # past the deadline of their sequences
            while time.monotonic() < deadline:
                self.assertEqual(check(b"", timeout=5), b"\x08\x01")  # SERVING
                time.sleep(0.2)

    def test_four_tokens_far_in(self):
        tokens, first = 15_000, 14_816
        model = self.client.register_model("long", [kvtier.Layer(1, 32)])
        values = np.arange(tokens * 32, dtype=np.float32).reshape(tokens, 1, 32)
        data = kvtier.from_float32(values % 251, "bfloat16")
        with self.client.append("long", model) as stream:
            stream.send(0, 0, data, -data)
        layer = self.client.read("long", tokens=range(first, first + 4)).layers[0]
        np.testing.assert_array_equal(layer.k, data[first : first + 4])
        np.testing.assert_array_equal(layer.v, -data[first : first + 4])
        layer = self.client.read("long").layers[0]
        np.testing.assert_array_equal(layer.k, data)


if __name__ == "__main__":
    unittest.main()
