"""A decode step's tokens to many sequences in one call, by the Python client against a real kvtierd."""

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
from kvtier.v1 import kv_tier_pb2 as pb
from live_server import LiveServer
from refusal_case import RefusalCase

LAYERS, HEADS, DIM, SEQUENCES, STEPS = 3, 2, 64, 20, 40


def setUpModule():
    global server
    server = LiveServer()


def tearDownModule():
    server.stop()


class AppendBatchTest(RefusalCase):
    def setUp(self):
        self.client = kvtier.Client(server.address, namespace=self.id())
        self.addCleanup(self.client.close)
        self.model = self.client.register_model("m", [kvtier.Layer(HEADS, DIM)] * LAYERS, "bfloat16", kv_cache_dtype="kivi2")
        random = np.random.default_rng(7)
        values = random.standard_normal((SEQUENCES, 2, LAYERS, STEPS, HEADS, DIM), np.float32)
        self.data = kvtier.from_float32(values, "bfloat16")

    def entry(self, i, begin, end, **options):
        k, v = self.data[i, :, :, begin:end]
        return kvtier.BatchEntry(f"s{i}", self.model, begin, k, v, **options)

    def test_many_sequences_grow_together_as_by_streams(self):
        for step in range(STEPS):
            outcomes = self.client.append_batch([self.entry(i, step, step + 1) for i in range(SEQUENCES)])
            self.assertEqual(outcomes, [kvtier.Ack(step + 1, step + 1, 0, 0)] * SEQUENCES)
        with self.client.append("stream", self.model) as stream:
            for layer in range(LAYERS):
                stream.send(layer, 0, *self.data[3, :, layer])
        batch, stream = self.client.read("s3"), self.client.read("stream")
        for layer in range(LAYERS):
            np.testing.assert_array_equal(batch.layers[layer].k, stream.layers[layer].k)
            np.testing.assert_array_equal(batch.layers[layer].v, stream.layers[layer].v)

    def test_one_that_is_refused_costs_the_others_nothing(self):
        self.client.append_batch([self.entry(0, 0, 8), self.entry(1, 0, 8), self.entry(2, 0, 8)])
        self.client.seal("s1", 8)
        outcomes = self.client.append_batch(
            [self.entry(0, 8, 9), self.entry(1, 8, 9), self.entry(2, 12, 13), self.entry(3, 0, 5)]
        )
        reasons = [getattr(outcome, "reason", "") for outcome in outcomes]
        self.assertEqual(reasons, ["", "SEALED", "TOKEN_GAP", ""])
        self.assertIn("s1", str(outcomes[1]))
        self.assertEqual(outcomes[1].code, grpc.StatusCode.FAILED_PRECONDITION)
        self.assertEqual(outcomes[3].committed_tokens, 5)
        self.assertEqual(self.client.read("s0").tokens, 9)

    def test_a_live_stream_goes_first_and_a_higher_epoch_before_it(self):
        with self.assertRaises(kvtier.KvTierError), self.client.append("s0", self.model, writer_epoch=1) as stream:
            (equal,) = self.client.append_batch([self.entry(0, 0, 4, writer_epoch=1)])
            self.assertEqual(equal.reason, "WRITER_EXISTS")
            (higher,) = self.client.append_batch([self.entry(0, 0, 4, writer_epoch=2)])
            self.assertEqual(higher.received_tokens, 4)
            stream.send(0, 4, *self.data[0, :, 0, 4:5])
            stream.flush()

    def test_a_prompt_is_shared(self):
        prompt = kvtier.Prompt(token_ids=range(STEPS))
        self.client.append_batch([self.entry(0, 0, STEPS, prompt=prompt)])
        self.assertEqual(self.client.lookup(self.model, [prompt]), [STEPS // 16 * 16])

    def test_what_is_taken_before_a_chunk_is_refused_stays(self):
        entry = self.entry(0, 0, 4).to_proto()
        entry.chunks[1].k = b"short"
        stub = self.client._stub
        (outcome,) = stub.AppendBatch(pb.AppendBatchRequest(namespace=self.id(), entries=[entry])).outcomes
        self.assertEqual((outcome.code, outcome.reason), (grpc.StatusCode.INVALID_ARGUMENT.value[0], "INVALID_FIELD"))
        self.assertEqual(outcome.ack.chunks, 1)
        (resent,) = self.client.append_batch([self.entry(0, 0, 4)])
        self.assertEqual((resent.committed_tokens, resent.skipped_tokens), (4, 0))

    def test_bad_batches(self):
        self.assert_refused("INVALID_FIELD", lambda: self.client.append_batch([]))
        said = self.assert_refused("INVALID_FIELD", lambda: self.client.append_batch([self.entry(0, 0, 1)] * 1025))
        self.assertIn("entries has 1025 entries; want 1 to 1024", said)
        said = self.assert_refused("INVALID_FIELD", lambda: self.client.append_batch([self.entry(0, 0, 1), self.entry(0, 1, 2)]))
        self.assertIn('entries[1].open.sequence is "s0"', said)
        for k, said in (
            ([np.zeros((1, 2))], "'s': k and v are of 1 and 1 layers; want 3"),
            ([np.zeros((1, 2))] * LAYERS, "'s': k of layer 0 is float64"),
        ):
            with self.assertRaisesRegex(ValueError, said):
                self.client.append_batch([kvtier.BatchEntry("s", self.model, 0, k, k)])


if __name__ == "__main__":
    unittest.main()
